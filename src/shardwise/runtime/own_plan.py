"""The plan of a loop of one's own: words and degrees, for the processes that were started."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Literal, TypedDict, Unpack, get_args

from shardwise.errors import ConfigError, Problem
from shardwise.runtime import world as processes
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan, Precision, Remat, Shard, Strategy

Word = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"]
Compute = Literal["fp64", "fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
CpKind = Literal["ring", "gather", "ulysses"]


class Degrees(TypedDict, total=False):
    """Arguments of :func:`make_plan` besides those with a list of words; any may be left out."""

    replicas: int | None
    tp: int
    cp: int
    cp_kind: CpKind
    processes: int


_WORDS = {"strategy": Word, "compute": Compute, "reduce": Compute, "recompute": Recompute, "cp_kind": CpKind}


def make_plan(
    strategy: Word = "ddp",
    *,
    compute: Compute = "fp32",
    reduce: Compute | None = None,
    recompute: Recompute = "none",
    compile: bool = False,
    **degrees: Unpack[Degrees],
) -> Plan:
    """A plan for the processes that were started, or for as many as ``processes=``. Gradients are reduced in fp32 (in
    fp64 where ``compute`` is fp64) unless ``reduce`` says otherwise. ``replicas=``: the number of replicas of a sharded
    model (hsdp: one per node unless given). ``tp=``: how many neighbouring processes share each layer of Shardwise's
    decoder, and read the same rows. ``cp=``: how many have some tokens each of the same rows (:func:`cut_rows`), and
    ``cp_kind=`` how they exchange what attention needs: ring (by default), gather or ulysses. Raises ConfigError for an
    unknown word, and for degrees that do not multiply to the number of processes. Without a recipe nothing is
    estimated. fp16, which needs its losses scaled, is for ``shardwise train``."""
    processes.show_mistakes_once()
    reduce = reduce or ("fp64" if compute == "fp64" else "fp32")
    kind = degrees.get("cp_kind", "ring")
    _check_words(strategy=strategy, compute=compute, reduce=reduce, recompute=recompute, cp_kind=kind)
    _check_degrees(degrees)
    me = processes.process()
    replicas = degrees.get("replicas")
    tp = degrees.get("tp", 1)
    cp = degrees.get("cp", 1)
    started = degrees.get("processes", me.world_size)
    dp, rest = divmod(started, tp * cp)
    if rest:
        name = f"tp {tp}" if cp == 1 else f"cp {cp}" if tp == 1 else f"cp {cp} x tp {tp}"
        fix = f"{'a divisor' if 1 in (tp, cp) else 'two whose product divides'} {started}"
        problem = Problem("PLAN001", f"{name} does not divide {started} processes", name.split()[0], fix)
        raise ConfigError(problem)
    count = 1 if replicas is None else replicas
    if strategy == "hsdp" and replicas is None:
        count = max(2, me.world_size // me.local_world_size) if dp > 1 else 1
    if dp % count:
        divided = "processes" if tp * cp == 1 else f"groups of {tp * cp} processes"
        what = f"{count} replicas do not divide {dp} {divided}"
        raise ConfigError(Problem("PLAN001", what, "replicas", f"a divisor of {dp}"))
    chosen: Strategy = "zero3" if strategy in ("fsdp", "hsdp") else strategy  # type: ignore[assignment]
    if chosen == "ddp" or dp * cp == count:
        chosen, count = "ddp", dp
    exchanging = cp if kind == "ulysses" else 1
    layout = Layout(count, dp // count, cp=cp, tp=tp, ulysses=exchanging, ranks_per_node=me.local_world_size)
    return Plan(
        layout=layout,
        shard=Shard(chosen),
        precision=Precision(compute=compute, reduce=reduce),
        remat=Remat(recompute),
        compile=compile,
        sequence_parallel=tp > 1,
        cp_kind=kind,
    )


_STAGES = "a pipeline runs the model stage by stage, and a loop of one's own calls it as a whole"
NO_STAGES = Problem("PLAN023", _STAGES, "pp", "leave pp out, or `shardwise train` with parallel.pp")


def _check_degrees(given: Collection[str]) -> None:
    """ConfigError for a degree that there is none of in a loop of one's own."""
    for name in set(given) - Degrees.__annotations__.keys():
        near = get_close_matches(name, Degrees.__annotations__, 1)
        fix = f"did you mean `{near[0]}`?" if near else "replicas, tp, cp, cp_kind and processes are known"
        unknown = Problem("CFG001", f"unknown degree `{name}`", name, fix)
        raise ConfigError(NO_STAGES if name == "pp" else unknown)


def _check_words(**given: object) -> None:
    """ConfigError CFG005 for every argument that is not one of its words."""
    problems = []
    for name, value in given.items():
        allowed = get_args(_WORDS[name])
        if value not in allowed:
            near, one = get_close_matches(str(value), allowed, 1), f"one of {', '.join(allowed)}"
            fix = f"did you mean `{near[0]}`?" if near else one
            problems.append(Problem("CFG005", f"`{name}` must be {one}, got {value!r}", name, fix))
    if problems:
        raise ConfigError(*problems)
