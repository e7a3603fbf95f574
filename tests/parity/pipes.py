"""Pipelines that meet every pair of settings at least once: ``python -m tests.parity.pipes`` prints them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Any

from shardwise.models.config import ModelSpec, with_fields
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from shardwise.techniques.pp.actions import SCHEDULES
from tests.covering import Pair, pairs
from tests.parity.cases import FP64, SEQ_LEN
from tests.parity.dpo_ranks import SEQ_LEN as PAIRS_LEN
from tests.parity.pairwise import DENSE, LORA

MODELS = ("untied", "tied", "adapters", "pairs", "uneven", "frozen first blocks")
"""All with packed rows, each micro-batch its own documents and its own number of supervised tokens."""
REMAT = ("none", "selective", "full")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
FROZEN = ("embed.*", "layers.0.*", "layers.1.*")
"""Of two stages the first then has nothing to train, of four the first two."""
LEAST_ROWS = 4
"""A step."""
MANY = 8
"""Micro-batches, where not the fewest that a schedule can have."""


def split(stages: int, blocks: int) -> tuple[int, ...]:
    """As even as can be, a block more in the stages before the last, of which one at least is larger if it is uneven:
    what is left over goes to the second stage on."""
    each, more = divmod(blocks, stages)
    return tuple(each + (1 <= stage <= more) if stages > 2 else each + (stage < more) for stage in range(stages))


def spec_of(model: str, stages: int) -> ModelSpec:
    """A model of a block for each stage, and one more if it is ``uneven``."""
    blocks = max(4 if "frozen" in model else 2, stages) + (model == "uneven")
    spec = replace(DENSE, name=f"tiny-pp-{blocks}", num_hidden_layers=blocks)
    if model == "tied":
        return replace(spec, tie_word_embeddings=True)
    if model == "adapters":
        return with_fields(spec, attention_bias=True, mlp_bias=True)
    return replace(spec, vocab_size=301) if model == "pairs" else spec


def stages_per_rank(schedule: str) -> int:
    """Two wherever a rank may have several: interleaved_zb may have one as well."""
    return 1 if SCHEDULES[schedule].most_stages == 1 else 2


def pipeline(schedule: str, pp: int, spec: ModelSpec) -> dict[str, Any]:
    """What of a plan a schedule decides, but for the rest of its layout."""
    each = stages_per_rank(schedule)
    return {"pipeline": Pipeline(schedule, each, split(pp * each, spec.num_hidden_layers))}  # type: ignore[arg-type]


def layout_of(schedule: str, pp: int, **degrees: int) -> Layout:
    return Layout(pp=pp, v_shaped=SCHEDULES[schedule].shape == "v", **degrees)


def plan(schedule: str, spec: ModelSpec, strategy: str = "ddp", *, pp: int = 2, micro: int = 4, **degrees: int) -> Plan:
    """A pipeline of ``pp`` ranks, of one row a micro-batch; ``degrees``: of the other axes."""
    shard = Shard("zero3" if strategy == "hsdp" else strategy, bucket_bytes=4096)  # type: ignore[arg-type]
    batch = Batch(1, micro, SEQ_LEN, loss_chunk_tokens=7)
    return Plan(layout_of(schedule, pp, **degrees), batch, shard, FP64, **pipeline(schedule, pp, spec))


@dataclass(frozen=True)
class Case:
    schedule: str
    model: str
    strategy: str
    pp: int
    tp: int
    many: bool
    remat: str

    @property
    def layout(self) -> Layout | None:
        """Two or four data-parallel ranks, but replicas of one pipeline where its micro-batches are few or it has
        eight ranks already. None where it would take more."""
        if self.strategy == "hsdp":
            degrees = {"dp_replicate": 2, "dp_shard": 2}
        elif self.strategy == "ddp":
            degrees = {"dp_replicate": 2 if self.many and self.pp * self.tp < 8 else 1}
        else:
            degrees = {"dp_shard": 2}
        layout = layout_of(self.schedule, self.pp, tp=self.tp, **degrees)
        return layout if layout.world <= 8 else None

    @property
    def stages(self) -> int:
        return self.pp * stages_per_rank(self.schedule)

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.model, self.stages)

    @property
    def lora(self) -> Lora | None:
        return LORA.get(self.model)

    @property
    def micro(self) -> int:
        return MANY if self.many else SCHEDULES[self.schedule].least_micro_batches(self.pp)

    @property
    def plan(self) -> Plan:
        layout = self.layout
        assert layout is not None
        dpo = self.model == "pairs"
        length, chunk = (PAIRS_LEN, 23) if dpo else (SEQ_LEN, 7)
        rows = max(1, LEAST_ROWS // self.micro // layout.dp)
        batch = Batch(rows, self.micro, length, loss_chunk_tokens=chunk)
        shard = Shard("zero3" if self.strategy == "hsdp" else self.strategy, bucket_bytes=4096)  # type: ignore[arg-type]
        return Plan(
            layout,
            batch,
            shard,
            FP64,
            Remat(self.remat),  # type: ignore[arg-type]
            sequence_parallel=self.tp > 1 and not self.many,
            lora=self.lora,
            frozen=FROZEN if self.model == "frozen first blocks" else (),
            loss="dpo" if dpo else "cross_entropy",
            **pipeline(self.schedule, self.pp, self.spec),
        )

    @property
    def calls(self) -> int:
        """What its time grows with: ranks, blocks, and micro-batches."""
        return self.plan.layout.world * self.spec.num_hidden_layers * self.micro

    @property
    def legal(self) -> bool:
        """Whether there is such a layout, and eight micro-batches are not the fewest."""
        return self.layout is not None and self.many == (self.micro == MANY)

    def pairs(self) -> set[Pair]:
        return pairs(astuple(self))


EVERY = [
    case
    for values in product(SCHEDULES, MODELS, STRATEGIES, (2, 4), (1, 2), (False, True), REMAT)
    if (case := Case(*values)).legal
]


def chosen() -> list[Case]:
    """One for every schedule and model, the largest two axes: that with most pairs that none before it has, unless it
    is dear. Then what meets the rest."""
    met = {case: case.pairs() for case in EVERY}
    missing, found = set[Pair]().union(*met.values()), list[Case]()

    def take(among: list[Case], dearness: float) -> None:
        found.append(max(among, key=lambda case: (len(met[case] & missing) - dearness * case.calls, -case.calls)))
        missing.difference_update(met[found[-1]])

    for both in product(MODELS, SCHEDULES):
        take([case for case in EVERY if (case.model, case.schedule) == both], 0.01)
    while missing:
        take([case for case in EVERY if met[case] & missing], 0.0)
    return found


CASES = chosen()


if __name__ == "__main__":
    for case in CASES:
        print(case)
