"""Attention whose keys are on several ranks is attention: beside dense scores of everybody and everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from shardwise import techniques
from shardwise.distributed import collectives
from shardwise.models.config import with_fields
from shardwise.models.moe import MoE
from shardwise.models.router_losses import RowPlaces
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan
from shardwise.techniques import cp
from shardwise.techniques.tp import row_counts
from tests.models.hf_models import spec_of
from tests.parity.mixtures import MIXTRAL
from tests.parity.rings import DENSE
from tests.techniques import cp_ranks
from tests.techniques.cp_ranks import Asked, dense, error

ODD = (0, 1, 20, 23, 48, 49, 60, 61, 90, 96)
"""Documents of two rows of 48: of one token, within a piece, over borders of pieces, from the first piece to the
last."""
MASKS: dict[str, dict[str, object]] = {
    "causal": {},
    "full": {"causal": False},
    "documents": {"bounds": ODD},
    "full documents": {"bounds": ODD, "causal": False},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "full window": {"window": 9, "causal": False},
    "window in documents": {"window": 15, "bounds": ODD},
    "capped": {"soft_cap": 2.0},
    "capped window in documents": {"soft_cap": 2.0, "window": 11, "bounds": ODD},
    "sinks": {"sinks": True},
    "sinks, windows, documents": {"sinks": True, "window": 13, "bounds": ODD},
    "scaled": {"scale": 0.7},
    "one key head": {"key_heads": 1},
    "all key heads": {"key_heads": 4},
    "one row": {"rows": 1},
}
KINDS = (
    ("ring", 2),
    ("ring", 3),
    ("ring", 4),
    ("gather", 2),
    ("gather", 3),
    ("ulysses", 2),
    ("ulysses", 4),
    ("nested", 4),
)


@pytest.mark.prove
@pytest.mark.parametrize("ranks_", [2, 3, 4])
def test_it_is_attention(ranks: RankPool, ranks_: int) -> None:
    """Output and all gradients, in float64, to 1e-12."""
    asked = [Asked(kind, n, **mask) for (kind, n), mask in product(KINDS, MASKS.values()) if n == ranks_]  # type: ignore[arg-type]
    answers = ranks.run(cp_ranks.each, asked, world=ranks_)
    for number, one in enumerate(asked):
        found = error(one, [answer[number] for answer in answers], dense(one))
        assert max(found.values()) < 1e-12, f"{one}: {found}"


def test_C12_S9_gradients_of_keys_that_have_travelled_far(ranks: RankPool) -> None:
    """Of a ring of four each of q, k and v by itself: a block's keys, and their gradients, pass through all ranks."""
    asked = Asked("ring", 4, length=64)
    answers = ranks.run(cp_ranks.each, [asked], world=4)
    found = error(asked, [answer[0] for answer in answers], dense(asked))
    assert found.keys() == {"out", "q", "k", "v"} and max(found.values()) < 1e-12


def test_C8_every_head_has_its_own_sink(ranks: RankPool) -> None:
    """Sinks that all differ, with heads spread over ranks and keys around a ring; their gradient too."""
    for kind, world in (("ring", 3), ("ulysses", 4), ("nested", 4), ("gather", 2)):
        asked = Asked(kind, world, sinks=True)  # type: ignore[arg-type]
        answers = ranks.run(cp_ranks.each, [asked], world=world)
        found = error(asked, [answer[0] for answer in answers], dense(asked))
        assert "sinks" in found and max(found.values()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_C13_large_logits_do_not_grow_with_the_ring(ranks: RankPool, dtype: torch.dtype) -> None:
    """Scores of some 1e3, on 1, 2, 3 and 4 ranks: what is joined in fp32 is as near as one rank's own, to a quarter
    more and a rounding of the dtype."""
    alone = Asked("ring", 1, length=48, dtype=dtype, logits=1e3)
    right, unit = dense(alone), torch.finfo(dtype).eps
    [[before]] = ranks.run(cp_ranks.each, [alone], world=1)
    own = error(alone, [before], right)
    for world in (2, 3, 4):
        asked = replace(alone, ranks=world)
        answers = ranks.run(cp_ranks.each, [asked], world=world)
        found = error(asked, [answer[0] for answer in answers], right)
        assert all(found[name] <= 1.25 * own[name] + unit for name in found), (world, found, own)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("mask", ["documents", "window", "window in documents"])
def test_C6_a_token_moves_only_what_may_see_it(ranks: RankPool, mask: str) -> None:
    """The gradient of one query's output by every key and value is zero, exactly, where it may not see them: of the
    first token of the last document, and of one in the middle of a piece."""
    for kind, world in (("ring", 2), ("gather", 2), ("ulysses", 2)):
        asked = Asked(kind, world, **MASKS[mask])  # type: ignore[arg-type]
        right = dense(asked)
        answers = ranks.run(cp_ranks.moved, asked, world=world)
        for (row, token), seen in cp_ranks.seen_by(asked).items():
            moved = torch.zeros(asked.length, dtype=torch.bool)
            for index, found in answers:
                moved[index[row]] |= found[row, token]
            assert torch.equal(moved, seen), (kind, row, token)
        assert right["out"].isfinite().all()


SPEC = with_fields(DENSE, num_attention_heads=12, num_key_value_heads=4)


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "query heads": (
        {"layout": Layout(cp=8, ulysses=8), "cp_kind": "ulysses"},
        "8 does not divide 12 query heads",
        "one of 2, 4, 12 ranks",
    ),
    "key heads": ({"layout": Layout(cp=3, ulysses=3), "cp_kind": "ulysses"}, "3 does not divide 4 key heads", "ring"),
    "length": (
        {"layout": Layout(cp=4), "batch": Batch(1, 1, 1004)},
        "rows of 1,004 tokens cannot be cut",
        "a multiple of 8, such as 1,000",
    ),
    "ring": ({"layout": Layout(cp=4, ulysses=2)}, "contradict each other", "ulysses 1 for ring and gather"),
    "ulysses": (
        {"layout": Layout(cp=4, ulysses=2), "cp_kind": "ulysses"},
        "contradict each other",
        "as large as cp for ulysses",
    ),
    "nested": (
        {"layout": Layout(cp=4, ulysses=4), "cp_kind": "nested"},
        "contradict each other",
        "a divisor between the two",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_C10_what_cannot_be_is_refused_with_what_can(what: str) -> None:
    changes, words, fix = REFUSED[what]
    plan = replace(Plan(batch=Batch(1, 1, 960)), **changes)  # type: ignore[arg-type]
    [problem] = techniques.check(SPEC, plan, parse_cluster("8xH100"))
    assert problem.code == "PLAN026" and words in problem.what and fix in problem.fix


def test_models_in_transformers_own_modules_are_refused_by_name() -> None:
    plan = Plan(Layout(cp=2), Batch(1, 1, 64))
    codes = [
        (problem.code, problem.what) for problem in techniques.check(spec_of("gpt2"), plan, parse_cluster("2xH100"))
    ]
    assert [code for code, _ in codes] == ["PLAN026"] and "gpt2" in codes[0][1].lower()


def test_counts_of_rows_are_summed_over_tp_and_cp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequence-parallel ranks in a ring each has a part of the same rows: both groups sum, one after the other."""
    monkeypatch.setattr(collectives, "summed", lambda counts, group: counts * 2 if group == "cp" else counts * 3)
    monkeypatch.setattr(row_counts, "summed", collectives.summed)
    layout = Layout(cp=2, tp=2)
    meshes = SimpleNamespace(size=layout.size, index=lambda axis: 1, groups={"tp": "tp", "cp": "cp"})
    layer = MoE(MIXTRAL)
    row_counts.share_rows(layer, (3, 10), meshes)  # type: ignore[arg-type]
    cp._share_rows(layer, meshes)  # type: ignore[arg-type]
    assert layer.over_rows(torch.ones(1)) == 2 * 3
    assert layer.rows_of(torch.zeros(15, 1)) == RowPlaces(3, 10, 15, ranks=2)
