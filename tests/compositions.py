"""Which techniques have been proved together, from the tests' own rows: ``python -m tests.compositions >
docs/compositions.md``. tests/test_compositions.py fails when the page is stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, product
from typing import Any

from shardwise import techniques
from shardwise.models.config import ModelSpec, flat, with_fields
from shardwise.prove import regimes
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Lora, Optim, Plan, Precision, Remat
from shardwise.techniques.pp.actions import SCHEDULES
from tests.drift import (
    test_compile,
    test_drift,
    test_float8,
    test_frozen_float8,
    test_hf_models,
    test_lora,
    test_pp,
    test_tp,
)
from tests.models.hf_models import spec_of
from tests.parity import cases, float8s, mixtures, offloading, pairwise, pipes, rings, test_muon
from tests.parity import test_dpo as parity_dpo
from tests.parity import test_float8 as parity_float8
from tests.parity import test_float8_gather as parity_gather
from tests.parity import test_fp32_bf16 as parity_types
from tests.parity import test_frozen as parity_frozen
from tests.parity import test_frozen_float8 as parity_float8s
from tests.parity import test_lora as parity_lora
from tests.parity import test_tp_compile as parity_compile
from tests.prove import test_certify
from tests.prove.pairs import COMPILED, ROWS, Row, with_all
from tests.prove.planted_sizes import FAULTS
from tests.techniques import test_float8 as float8

BF16 = Precision("bf16")
Holds = Callable[[ModelSpec, Plan], bool]


def _strategy(name: str) -> Holds:
    return lambda spec, plan: plan.shard.strategy == name and not plan.layout.dp_replicate > 1 < plan.layout.dp_shard


FEATURES: dict[str, Holds] = {
    "DDP": lambda spec, plan: plan.shard.strategy == "ddp" and plan.layout.dp_replicate > 1,
    "ZeRO-1": _strategy("zero1"),
    "ZeRO-2": _strategy("zero2"),
    "ZeRO-3": _strategy("zero3"),
    "hybrid": lambda spec, plan: plan.layout.dp_replicate > 1 < plan.layout.dp_shard and plan.shard.strategy != "ddp",
    "tp": lambda spec, plan: plan.layout.tp > 1,
    "sp": lambda spec, plan: plan.sequence_parallel and plan.layout.tp > 1,
    "ring": lambda spec, plan: plan.layout.ring > 1 and plan.cp_kind != "gather",
    "Ulysses": lambda spec, plan: plan.layout.ulysses > 1,
    "gather": lambda spec, plan: plan.layout.cp > 1 and plan.cp_kind == "gather",
    **{name: (lambda spec, plan, name=name: _staged(plan, name)) for name in SCHEDULES},
    "experts": lambda spec, plan: spec.experts.num_experts > 0,
    "ep": lambda spec, plan: plan.layout.ep > 1,
    "selective": lambda spec, plan: plan.remat.mode == "selective",
    "full": lambda spec, plan: plan.remat.mode == "full",
    "accumulation": lambda spec, plan: plan.batch.accumulation > 1 and plan.layout.pp == 1,
    "LoRA": lambda spec, plan: plan.lora is not None,
    "DoRA": lambda spec, plan: plan.lora is not None and plan.lora.dora,
    "4 bits": lambda spec, plan: plan.lora is not None and plan.lora.nf4,
    "8 bits": lambda spec, plan: plan.lora is not None and plan.lora.float8,
    "frozen": lambda spec, plan: bool(plan.frozen),
    "DPO": lambda spec, plan: plan.loss == "dpo",
    "tied": lambda spec, plan: spec.tie_word_embeddings,
    "compile": lambda spec, plan: plan.compile,
    "bf16": lambda spec, plan: plan.precision.compute == "bf16",
    "fp16": lambda spec, plan: plan.precision.compute == "fp16",
    "modules": lambda spec, plan: bool(plan.precision.modules),
    "8-bit moments": lambda spec, plan: plan.optim.name == "adamw8bit",
    "bf16 moments": lambda spec, plan: plan.optim.moments == "bf16",
    "HF modules": lambda spec, plan: spec.hf_model is not None,
    "offload": lambda spec, plan: plan.offload.optimizer != "none",
    "Muon": lambda spec, plan: plan.optim.name == "muon",
    "float8": lambda spec, plan: plan.precision.products == "float8",
    "codes": lambda spec, plan: plan.precision.gather == "float8",
}
"""What a plan and its model may have."""
MEANING = {
    "hybrid": "ZeRO within groups of ranks, which are replicas of one another",
    "sp": "sequence parallelism",
    "ring": "context parallelism whose keys go round a ring; with Ulysses: nested",
    "gather": "context parallelism whose keys are gathered",
    "experts": "a mixture of experts",
    "ep": "expert parallelism, of a mixture of experts",
    "selective": "selective recomputation",
    "full": "full recomputation",
    "accumulation": "several micro-batches without a pipeline",
    "4 bits": "frozen weights in NF4 (QLoRA)",
    "8 bits": "frozen weights in float8 (lora.frozen: float8)",
    "frozen": "model.frozen",
    "tied": "one weight for the embedding and the output layer",
    "modules": "dtypes of their own for some modules (precision.modules)",
    "HF modules": "a model that runs in transformers' own modules",
    "offload": "the optimizer on the host",
    "float8": "products of linear layers in float8 (precision.products)",
    "codes": "weights in float8 that zero3 gathers as their codes (precision.gather)",
}


def _staged(plan: Plan, name: str) -> bool:
    return plan.layout.pp > 1 and plan.pipeline.schedule == name


EXCLUSIVE = (
    ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid"),
    tuple(SCHEDULES),
    ("ring", "gather"),
    ("Ulysses", "gather"),
    ("selective", "full"),
    ("bf16", "fp16"),
    ("4 bits", "8 bits"),
    ("8-bit moments", "bf16 moments", "Muon"),
    ("accumulation", *SCHEDULES),
    ("experts", "HF modules"),
)
"""Of each a plan has one, or none."""


MOMENTS = ("8-bit moments", "bf16 moments")
"""Certificates train with AdamW's own in their place."""


@dataclass(frozen=True)
class Source:
    """Tests in ``file`` prove the ``rows``: their numbers, or (``drift``) what they send and hold; ``without`` these
    features, which the rows have and the tests leave out; ``of`` a feature, only what is together with that."""

    file: str
    rows: list[Row]
    drift: bool = False
    without: tuple[str, ...] = ()
    of: str = ""


def _dense(strategy: str, world: int, **more: Any) -> Plan:
    return cases.plan(strategy, world, cases.FP64, **more)


@cache
def sources() -> list[Source]:
    """The tests' own rows, numbers before bytes."""
    every = ("none", "selective", "full")
    grid = [
        (cases.UNTIED, _dense(strategy, 4 if strategy == "hsdp" else 2, remat=Remat(remat), accumulation=m))  # type: ignore[arg-type]
        for strategy, remat, m in product((*cases.STRATEGIES, "hsdp"), every, (1, 4))
    ]
    tied = [
        (cases.TIED, _dense(s, w, remat=Remat("full"), accumulation=2))
        for w, s in zip((2, 4, 2, 4), cases.STRATEGIES, strict=True)
    ]
    adapters = [
        (cases.UNTIED, parity_lora.lora_plan(s, 2, Lora(3, 6.0), remat, m)) for _, s, remat, m in parity_lora.CASES
    ]
    settings = (("ddp", "none", 2), ("zero3", "full", 1), ("zero3", "selective", 2), ("zero3", "full", 2))
    for lora in (Lora(3, 6.0, nf4=True), Lora(3, 6.0, dora=True), Lora(3, 6.0, nf4=True, dora=True)):
        adapters += [(parity_lora.WIDE, parity_lora.lora_plan(s, 2, lora, remat, m)) for s, remat, m in settings]
    adapters.append((parity_lora.WIDE, parity_lora.lora_plan("hsdp", 4, Lora(2, 5.0, nf4=True), "full", 2)))
    frozen = [
        (cases.UNTIED, parity_frozen.frozen_plan(s, 2, parity_frozen.FROZEN[what], remat, m))
        for what, s, remat, m in parity_frozen.CASES
    ]
    frozen.append((cases.UNTIED, parity_frozen.frozen_plan("hsdp", 4, ("embed.*",), "full", 2)))
    frozen += [
        (cases.TIED, parity_frozen.frozen_plan(s, 2, ("embed.*",), "none", 2)) for s in ("ddp", "zero1", "zero3")
    ]
    pairs = [(parity_dpo.SPEC, parity_dpo.plan(s, 2, remat, m)) for s, remat, m in parity_dpo.SETTINGS]
    pairs += [
        (parity_dpo.SPEC, parity_dpo.plan(s, 2, remat, m, parity_dpo.ADAPTERS))
        for s, remat, m in parity_dpo.SETTINGS[::2]
    ]
    pairs.append((parity_dpo.SPEC, parity_dpo.plan("hsdp", 4, "none", 1)))
    compiled = {**parity_compile.CASES, **parity_compile.MORE}.values()
    narrow = [
        (float8s.spec_of(lora), float8s.plan_of(*case, lora))
        for *case, lora in ((*case, parity_float8.TRAINED[trained]) for *case, trained in parity_float8.CASES)
    ]
    gathered = [parity_gather.row(*case) for case in parity_gather.CASES]
    gathered.append((float8s.SPEC, parity_gather.COMPILED))
    gathered += [(float8s.EXPERTS, parity_gather.of_experts(layout)) for layout in parity_gather.SPREAD]
    hf = spec_of("gpt2")
    modules = [(hf, _dense(s, 2, remat=Remat(r), accumulation=4)) for s, r in (("ddp", "full"), ("zero3", "selective"))]  # type: ignore[arg-type]
    modules.append((hf, replace(_dense("zero3", 2, remat=Remat("full"), accumulation=4), lora=Lora(2, 4.0))))
    bf16 = [(cases.UNTIED, plan) for plan in parity_types.covering(cases.BF16)]
    return [
        Source("tests/parity/test_fp64.py", grid + tied),
        Source("tests/parity/test_tp_pairwise.py", [(case.spec, case.plan) for case in pairwise.CASES]),
        Source("tests/parity/test_pp_pairwise.py", [(case.spec, case.plan) for case in pipes.CASES]),
        Source("tests/parity/test_cp_pairwise.py", [(case.spec, case.plan) for case in rings.CASES]),
        Source("tests/parity/test_ep_pairwise.py", [(case.spec, case.plan) for case in mixtures.CASES]),
        Source("tests/parity/test_offload.py", [(case.spec, case.plan) for case in offloading.CASES], of="offload"),
        Source("tests/parity/test_lora.py", adapters),
        Source("tests/parity/test_frozen_float8.py", [*(parity_float8s.TWO | parity_float8s.FOUR).values()]),
        Source("tests/parity/test_frozen.py", frozen),
        Source("tests/parity/test_dpo.py", pairs),
        Source("tests/parity/test_hf_models.py", modules),
        Source("tests/parity/test_muon.py", [test_muon.planned(case) for case in test_muon.CASES], of="Muon"),
        Source("tests/parity/test_float8.py", narrow, of="float8"),
        Source("tests/parity/test_float8_gather.py", gathered, of="codes"),
        Source("tests/techniques/test_float8.py", [(float8.SPEC, plan) for plan in float8.COMPILED], of="float8"),
        Source("tests/parity/test_tp_compile.py", [(spec, replace(plan, compile=True)) for spec, plan in compiled]),
        Source("tests/parity/test_fp32_bf16.py", bf16),
        Source("tests/prove/test_certify.py", list(test_certify.COMPOSITIONS.values())),
        Source("tests/prove/test_pairs.py", [with_all(*names) for names in ROWS], without=MOMENTS),
        Source("tests/prove/test_pairs.py", [with_all(*names) for names in COMPILED]),
        *_drift(),
        Source("tests/prove/test_pairs.py", [with_all(*names) for names in ROWS], drift=True),
    ]


def _drift() -> Iterator[Source]:
    of, shardings = test_drift.plan_of, test_drift.SHARDINGS
    dense = [
        (test_drift.SPEC, test_drift.subset(*case))
        for case in product(shardings, test_drift.PRECISIONS, test_drift.REMATS, (1, 2))
    ]
    dense += [
        (replace(test_drift.SPEC, tie_word_embeddings=True), of(sharding, 8, precision=precision))
        for sharding, precision in product(shardings, test_drift.PRECISIONS.values())
    ]
    yield Source("tests/drift/test_drift.py", dense, drift=True)
    adapted = []
    for (number, (spec, lora)), (turn, sharding) in product(
        enumerate(test_lora.ADAPTERS.values()), enumerate(shardings)
    ):
        adapted.append(
            (spec, test_lora.lora_plan(sharding, lora, *test_lora.GRID[(number + turn) % len(test_lora.GRID)]))
        )
    yield Source("tests/drift/test_lora.py", adapted, drift=True)
    yield Source("tests/drift/test_frozen_float8.py", [*test_frozen_float8.PLANS.values()], drift=True)
    tensor = [
        (test_tp.SPEC, test_tp.plan_of(sharding, sequence, precision=precision, remat=remat))
        for sharding, precision, remat, sequence in product(
            test_tp.SHARDINGS, test_drift.PRECISIONS.values(), test_drift.REMATS.values(), test_tp.SEQUENCE
        )
    ]
    for other, sharding, sequence in product(test_tp.OTHERS.values(), test_tp.SHARDINGS, test_tp.SEQUENCE):
        tensor.append((test_tp.SPEC, test_tp.plan_of(sharding, sequence, **other)))
    yield Source("tests/drift/test_tp.py", tensor, drift=True)
    staged = [
        (
            test_pp.SPEC,
            test_pp.plan_of(schedule, sharding, tensor, remat=test_pp.REMATS[remat], precision=Precision("bf16")),
        )
        for schedule, _, sharding, tensor, remat in test_pp.SETTINGS
    ]
    for model, schedule, _ in test_pp.SCHEDULED:
        settings = dict(test_pp.MODELS[model])
        features = {key: settings.pop(key) for key in list(settings) if key in flat(test_pp.SPEC)}
        turn = list(test_pp.MODELS).index(model) + list(SCHEDULES).index(schedule)
        sharding, tensor = (list(each)[turn % len(each)] for each in (test_pp.SHARDINGS, test_pp.TENSOR))
        staged.append((with_fields(test_pp.SPEC, **features), test_pp.plan_of(schedule, sharding, tensor, **settings)))  # type: ignore[arg-type]
    yield Source("tests/drift/test_pp.py", staged, drift=True)
    compiled = [(test_compile.SPEC, replace(test_compile.plan_of(*case), compile=True)) for case in test_compile.QUICK]
    narrow = [(test_float8.SPEC, test_float8.plan_of(*case)) for case in test_float8.CASES]
    yield Source("tests/drift/test_float8.py", narrow, drift=True, of="float8")
    gathered = [test_float8.gathered_case(*case) for case in test_float8.IN_CODES]
    yield Source("tests/drift/test_float8.py", gathered, drift=True, of="codes")
    yield Source("tests/drift/test_compile.py", compiled, drift=True)
    spread = [(case.spec, replace(case.plan, precision=BF16)) for case in mixtures.CASES]
    yield Source("tests/drift/test_ep.py", spread, drift=True)
    outside = [(case.spec, case.plan) for case in offloading.CASES]
    yield Source("tests/drift/test_offload.py", outside, drift=True)
    hf = [(spec_of("gpt2"), plan) for plan in test_hf_models.PLANS.values()]
    yield Source("tests/drift/test_hf_models.py", hf, drift=True)


def refused(one: str, other: str) -> list[str]:
    """The codes with which a plan that has both is refused."""
    spec, plan = with_all(one, other)
    return [problem.code for problem in techniques.check(spec, plan, parse_cluster(f"{plan.layout.world}xH100"))]


@dataclass(frozen=True)
class Pair:
    """Two features: the first source of each kind that has a row with both; the codes that refuse it."""

    numbers: int | None
    bytes: int | None
    refused: tuple[str, ...]


def exclusive(one: str, other: str) -> bool:
    return any(one in group and other in group for group in EXCLUSIVE)


@cache
def pairs() -> dict[tuple[str, str], Pair]:
    """Every two features that one plan may have."""
    found: dict[tuple[str, str], list[int | None]] = {}
    for place, source in enumerate(sources()):
        for spec, plan in source.rows:
            has = [name for name, holds in FEATURES.items() if holds(spec, plan) and name not in source.without]
            for both in (both for both in combinations(has, 2) if not source.of or source.of in both):
                first = found.setdefault(both, [None, None])
                first[source.drift] = place if first[source.drift] is None else first[source.drift]
    every = [both for both in combinations(FEATURES, 2) if not exclusive(*both)]
    return {both: Pair(*found.get(both, (None, None)), tuple(dict.fromkeys(refused(*both)))) for both in every}


@cache
def paths() -> dict[str, tuple[str, int | None]]:
    """Every path that code takes at some sizes only: who states it, and the first source whose rows take it."""
    spec, plan = with_all("experts", "4 bits")
    plan = replace(plan, optim=Optim("lion"))
    found: dict[str, int] = {}
    for place, source in enumerate(sources()):
        for row in () if source.drift else source.rows:
            for name in regimes.held(*row):
                found.setdefault(name, place)
    who = [*regimes.stated(spec, plan)]
    others = [one for one in techniques.ORDER if "regimes" in vars(one) and one not in {each for each, _ in who}]
    who += [(one, partial(one.regimes, trained={})) for one in others]
    stated = ((one.__name__.removeprefix("shardwise."), name) for one, says in who for name in says(spec, plan))
    return {name: (one, found.get(name)) for one, name in stated}


STATED = """## Paths at some sizes only

Code takes another path where heads are fewer than ranks, where something does not divide, where a tensor is larger than
a bucket. Each technique states those of its own code (`regimes` in its file), asking the functions that run, and
[`shardwise prove`](prove.md) looks for small sizes that take them too, or says which it could not keep. **Rows**: tests
of numbers whose own rows take the path. **Fault**: one that shows on this path alone is planted, and a certificate sees
it (`tests/prove/test_regimes.py`).
"""
ONE = "## Of these a plan has one, or none"
HEAD = """# What has been proved together

For every two techniques, whether a plan may have both, and which tests show that it then does what it says.
**Numbers**: trained on CPU ranks, gradients, losses and weights are those of one process. **Bytes**: what its ranks
send, hold and save is what the plan says, and no row of the tests compares numbers. **Refused**: a plan that has both
is refused before anything starts, with this [code](errors.md). Of each test `make test` runs a sample, `make prove`
more and `make prove-big` the rest; [`shardwise prove`](prove.md) proves your own plan, whatever is in it.

Generated from the tests' own rows and from the planner's checks: `python -m tests.compositions > docs/compositions.md`.
"""


def page() -> str:
    """The page, in Markdown."""
    used: dict[int, int] = {}

    def cited(place: int) -> str:
        return f"[{used.setdefault(place, len(used) + 1)}]"

    rows = []
    for name in FEATURES:
        cells: list[list[str]] = [[], [], []]
        for both, pair in pairs().items():
            if name not in both:
                continue
            other = both[1] if both[0] == name else both[0]
            if pair.numbers is not None:
                cells[0].append(f"{other} {cited(pair.numbers)}")
            elif pair.bytes is not None:
                cells[1].append(f"{other} {cited(pair.bytes)}")
            else:
                cells[2].append(f"{other} ({', '.join(pair.refused)})")
        rows.append(f"| **{name}** | " + " | ".join(", ".join(cell) for cell in cells) + " |")
    heads = "| | numbers with | bytes with | refused with |\n|---|---|---|---|"
    words = [f"* **{name}**: {meaning}" for name, meaning in MEANING.items()]
    notes = [f"{number}. `{sources()[place].file}`" for place, number in used.items()]
    one = [f"* {', '.join(group)}" for group in EXCLUSIVE]
    faults = {fault.regime: name for name, fault in FAULTS.items()}
    taken = [
        f"| {name} | {who} | {'' if place is None else f'`{sources()[place].file}`'} | {faults.get(name, '')} |"
        for name, (who, place) in paths().items()
    ]
    stated = ["", STATED, "| where there is | stated by | rows | fault |\n|---|---|---|---|", *taken]
    return "\n".join(
        [HEAD, heads, *rows, "", "## Tests", "", *notes, "", "## Words", "", *words, *stated, "", ONE, "", *one]
    )


if __name__ == "__main__":
    print(page())
