"""When plans use tensor parallelism, over which devices, and what they say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import ConfigError
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import MARGIN, fits, kind, seconds
from shardwise.planner.search import Search, best_of_kinds, choose
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.recipe import Parallel, Recipe, Train

EIGHT_B, SEVENTY_B = load_spec("Llama-3.1-8B"), load_spec("Llama-3.1-70B")


def recipe(seq_len: int = 4096, **sections: object) -> Recipe:
    return Recipe.model_validate({"train": Train(seq_len=seq_len, global_batch_size=64), **sections})


@pytest.mark.prove
def test_auto_uses_it_where_it_is_faster_or_nothing_else_fits() -> None:
    """70 B parameters on two nodes: ZeRO-3 with full recomputation is above the margin, half of each layer is not. Of
    an 8 B no layer is too large, and the links cost more than they save."""
    cluster = parse_cluster("2x8xRTX-PRO-6000+200Gb/node")
    alone = choose(recipe(parallel=Parallel(tp=1)), SEVENTY_B, cluster)
    assert alone.layout.tp == 1 and not fits(alone)
    chosen = choose(recipe(), SEVENTY_B, cluster)
    assert chosen.layout.tp > 1 and chosen.sequence_parallel and fits(chosen)
    assert chosen.why["layout.tp"].startswith("searched: ")
    assert choose(recipe(), EIGHT_B, parse_cluster("8xH100")).layout.tp == 1


@pytest.mark.parametrize("sequence", [True, False])
def test_a_degree_that_is_pinned_is_kept(sequence: bool) -> None:
    """Groups stay inside a node, and so the rest of it is what is sharded over."""
    pinned = Parallel(strategy="hsdp", tp=4, sequence_parallel=sequence)
    plan = choose(recipe(parallel=pinned), EIGHT_B, parse_cluster("2x8xH100+400Gb/node"))
    assert plan.layout == Layout(dp_replicate=2, dp_shard=2, tp=4, ranks_per_node=8)
    assert plan.sequence_parallel is sequence and plan.why["layout.tp"] == "pinned"
    sent = {(t.axis, t.kind): t.link for t in plan.estimate.traffic if t.category == "activations"}
    assert set(sent.values()) == {"node"}
    assert (("tp", "reduce_scatter") in sent) is sequence


@pytest.mark.prove
def test_every_degree_inside_a_node_is_tried_with_the_same_sequences_a_step() -> None:
    search = Search(recipe(), EIGHT_B, parse_cluster("8xH100"))
    assert {plan.layout.tp for plan in search.all} == {1, 2, 4, 8}
    assert {plan.batch.global_batch_size(plan.layout.dp) for plan in search.all} == {64}
    (best,) = (plan for plan in best_of_kinds(search) if kind(plan) == "tp")
    assert seconds(best).exposed_s["tp"] > 0 and best.batch.global_batch_size(best.layout.dp) == 64


def test_what_it_cannot_cut_leaves_the_other_settings() -> None:
    """An odd `intermediate_size`: auto plans without it, and a pin is told."""
    odd = replace(SEVENTY_B, intermediate_size=28_673)
    cluster = parse_cluster("1x2xRTX-4090")
    assert choose(recipe(), odd, cluster).layout.tp == 1
    with pytest.raises(ConfigError) as refused:
        choose(recipe(parallel=Parallel(tp=2)), odd, cluster)
    assert [problem.code for problem in refused.value.problems] == ["PLAN022"]


@pytest.mark.parametrize(
    ("tp", "sections", "code", "fix"),
    [
        (3, {}, "PLAN001", "1, 2, 4, 8"),
        (2, {"parallel": Parallel(tp=2, dp_shard=8, strategy="zero3")}, "PLAN001", "1 x 4"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(
    tp: int, sections: dict[str, object], code: str, fix: str
) -> None:
    asked = recipe(**{"parallel": Parallel(tp=tp), **sections})
    with pytest.raises(ConfigError) as refused:
        choose(asked, EIGHT_B, parse_cluster("8xH100"))
    assert {problem.code for problem in refused.value.problems} == {code}
    assert all(fix in problem.fix for problem in refused.value.problems)


@pytest.mark.prove
def test_the_margin_holds_with_it_too() -> None:
    plan = choose(recipe(131_072), EIGHT_B, parse_cluster("8xH100"))
    assert plan.estimate.peak_bytes <= MARGIN * plan.estimate.capacity_bytes
