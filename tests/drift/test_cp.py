"""Context parallelism: what ranks send, hold and save, to the byte, beside every setting that it meets; and what each
kind sends, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.prove.drift import drift, predict
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from tests.parity.rings import CASES, Case

SPEC = model_spec("drift-cp", 601, 64, 96, 2, 8, 2, 8)
BF16 = Precision(compute="bf16")


@pytest.mark.matrix(12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_that_it_meets(case: Case) -> None:
    world = case.plan.layout.world
    for rank in sorted({0, world // 2, world - 1}):
        assert drift(case.spec, case.plan, rank).differences() == []


LONG = model_spec("drift-cp-long", 1024, 2048, 2048, 2, 16, 16, 128)
"""Long enough for a step of more than a GiB, whose peak counts."""


@pytest.mark.matrix
@pytest.mark.parametrize("window", [None, 5_000], ids=["all", "windows"])
@pytest.mark.parametrize("precision", [BF16, Precision()], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("kind", "ulysses"), [("ring", 1), ("gather", 1), ("ulysses", 4), ("nested", 2)])
def test_peaks_of_the_first_a_middle_and_the_last_rank(
    kind: str, ulysses: int, precision: Precision, window: int | None
) -> None:
    """Within a thousandth, where 3 % are allowed elsewhere: the steps of a ring are told one by one."""
    spec = with_fields(LONG, sliding_window=window)
    plan = planned(kind, ulysses, 4, 2**17, precision)
    for rank in (0, 2, 3):
        found = drift(spec, plan, rank)
        assert found.differences() == []
        assert abs(found.peak_error) < 1e-3 and found.measured.peak_bytes > 2**30


def planned(kind: str, ulysses: int, cp: int, seq_len: int, precision: Precision = BF16, **more: object) -> Plan:
    layout = Layout(cp=cp, ulysses=ulysses)
    batch = Batch(1, 1, seq_len, loss_chunk_tokens=1024)
    return Plan(layout, batch, Shard("zero3"), precision, cp_kind=kind, **more)  # type: ignore[arg-type]


def sent(plan: Plan, rank: int = 0, spec: ModelSpec = SPEC) -> Counter[tuple[str, int]]:
    """Calls a layer, by kind and bytes, of what is sent for attention."""
    found: Counter[tuple[str, int]] = Counter()
    for (axis, kind, size), calls in predict(spec, plan, rank).sent.items():
        if axis in ("cp", "ring", "ulysses") and kind != "all_reduce" and not weights(kind, size, spec, plan):
            found[kind, size] += calls // spec.num_hidden_layers
    return found


def weights(kind: str, size: int, spec: ModelSpec, plan: Plan) -> bool:
    """Whether it is a gather of weights, or of their gradients, which are cut over the same ranks."""
    return kind in ("all_gather", "reduce_scatter") and size not in gathered_keys(spec, plan)


def gathered_keys(spec: ModelSpec, plan: Plan) -> tuple[int, int]:
    whole = 2 * spec.attention.num_key_value_heads * spec.attention.head_dim * plan.batch.seq_len
    return 2 * whole, 4 * whole


TOKENS, KEYS, QUERIES = 256, 2 * 2 * 8, 8 * 8
"""Of a rank's row; numbers of keys and values, and of queries, a token."""


def test_what_a_ring_sends() -> None:
    """Forward w - 1 times its keys and values in bf16, and as often back; backward the same, and w - 1 times the sums
    of their gradients in fp32, of which the last go home."""
    keys, sums = 2 * TOKENS * KEYS, 4 * TOKENS * KEYS
    for rank in range(4):
        found = sent(planned("ring", 1, 4, 4 * TOKENS), rank)
        assert found == {(kind, size): n for kind in ("send", "recv") for size, n in ((keys, 6), (sums, 3))}


def test_a_ring_sends_nothing_that_no_query_sees() -> None:
    """A window of 100 in pieces of 128 tokens: the two pieces of a rank are seen by its neighbours in the row, which
    are one rank before it and one behind; of the first and the last rank one of them is itself."""
    keys, sums = 2 * TOKENS * KEYS, 4 * TOKENS * KEYS
    for rank, others in ((0, 1), (1, 2), (2, 2), (3, 1)):
        found = sent(planned("ring", 1, 4, 4 * TOKENS), rank, with_fields(SPEC, sliding_window=100))
        expected = {(kind, size): n for kind in ("send", "recv") for size, n in ((keys, 2 * others), (sums, others))}
        assert found == expected, rank


def test_what_is_gathered() -> None:
    """The keys and values of all ranks forward and backward in bf16; the sums of their gradients scattered in fp32."""
    whole = 4 * TOKENS * KEYS
    assert sent(planned("gather", 1, 4, 4 * TOKENS)) == {("all_gather", 2 * whole): 2, ("reduce_scatter", 4 * whole): 1}


def test_what_ulysses_sends() -> None:
    """Queries, the output and their gradients; keys and values as often as a head for each rank takes: twice."""
    queries, keys = 2 * TOKENS * QUERIES, 2 * TOKENS * 2 * KEYS // 2
    assert sent(planned("ulysses", 4, 4, 4 * TOKENS)) == {("all_to_all", queries): 4, ("all_to_all", keys): 4}


def test_what_nested_sends() -> None:
    """Heads among two neighbours, then the keys of one head around a ring of two, for twice the tokens."""
    queries, keys = 2 * TOKENS * QUERIES, 2 * TOKENS * KEYS // 2
    ring, sums = 2 * 2 * TOKENS * KEYS // 2, 4 * 2 * TOKENS * KEYS // 2
    around = {(kind, size): n for kind in ("send", "recv") for size, n in ((ring, 2), (sums, 1))}
    found = sent(planned("nested", 2, 4, 4 * TOKENS))
    assert found == {("all_to_all", queries): 4, ("all_to_all", keys): 4, **around}


@pytest.mark.parametrize(("kind", "ulysses"), [("ring", 1), ("gather", 1), ("ulysses", 4), ("nested", 2)])
def test_recomputation_sends_nothing_again_that_it_has_saved(kind: str, ulysses: int) -> None:
    from shardwise.spec.plan import Remat

    plan = planned(kind, ulysses, 4, 4 * TOKENS)
    assert sent(replace(plan, remat=Remat("selective"))) == sent(plan)
    found = drift(SPEC, replace(plan, remat=Remat("selective")), 1)
    assert found.differences() == []
