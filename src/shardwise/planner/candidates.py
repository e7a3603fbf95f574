"""The plans that there are for a recipe: every legal combination of the settings that it leaves open. Nothing here is
priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise import techniques
from shardwise.errors import ConfigError, Problem
from shardwise.models.config import ModelSpec
from shardwise.spec.batch import TOKENS_PER_MICRO_BATCH, batch, batch_reasons
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.spec.recipe import Recipe, Train
from shardwise.spec.units import show_bytes
from shardwise.techniques import cp, ep, pp, shard, tp
from shardwise.techniques.offload.legal import leave_each, leave_early
from shardwise.techniques.shard.degrees import grouped

CHUNK_NUMBERS = {"cuda": 2**26, "cpu": 2**22}
"""At most so many logits at a time: 256 MiB in fp32 on a GPU, which wants large products; on a CPU 16 MiB, which is as
fast as more and takes less memory (docs/benchmarks.md)."""
MOST_CHUNKS = 2**11
"""Of the loss: each sends by itself where the output layer is divided."""
LARGER_CHUNKS = (2**28, 2**27)
"""What a GPU takes instead where memory allows: every chunk reads and writes the fp32 gradient of the output weight
once more. For Llama 3.1 8B on an H100 that is 2.5 % of a step with 2^26 logits and 0.6 % with 2^28."""


def candidates(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, *, pinned: bool = True
) -> tuple[list[Plan], list[Problem]]:
    """Every legal plan, and what is wrong with others that is the recipe's to mend; with ``pinned`` false whatever the
    recipe says of the split of the ranks. Raises ConfigError with what makes the recipe's pins illegal, where that
    leaves none."""
    found: list[Plan] = []
    refused: list[Problem] = []
    unsuited: list[Problem] = []
    whole: int | None = None
    begun = pp.choices(recipe, spec, cluster, _open(recipe, spec, cluster), pinned=pinned)
    for degree in (each for staged in begun for each in _spread(recipe, spec, cluster, staged, pinned=pinned)):
        own = degree.layout.tp * degree.layout.cp  # devices that read the same rows
        pairs = ((degree.layout.degree(axis), vars(recipe.parallel)[axis]) for axis in ("tp", "cp", "ep"))
        asked = pinned and all(size in (1, wanted) for size, wanted in pairs)
        try:
            dp = grouped(cluster, degree).world
            legal, problems = _legal(recipe, spec, cluster, degree, pinned=pinned)
        except ConfigError as error:
            if asked:
                raise
            problems, legal, dp = list(error.problems), [], 0
        refused += problems if asked or not pinned else []
        try:
            whole = whole or (batch(recipe.train, dp, own)[2] if legal else None)
        except ConfigError as error:  # another degree may suit the batch
            unsuited += error.problems
            continue
        for plan in legal:
            made, problem = _with_batches(plan, recipe.train, spec, cluster, whole or 0)
            found += made
            unsuited += [problem] if problem else []
    if not found and (problems := refused + unsuited):
        raise ConfigError(*dict.fromkeys(problems))
    return found, refused


def _spread(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan, *, pinned: bool) -> Iterator[Plan]:
    """The plan with all degrees of tensor, context and expert parallelism."""
    for cut in tp.choices(recipe, spec, cluster, plan, pinned=pinned):
        for rows in cp.choices(recipe, spec, cluster, cut, pinned=pinned):
            yield from ep.choices(recipe, spec, cluster, rows, pinned=pinned)


@dataclass(frozen=True)
class StagedDegrees:
    """The degrees of a pipeline and of tensor parallelism, with a schedule. ``ends``: for each mode of recomputation,
    from the fastest, a plan with the largest micro-batches, and the one that holds least."""

    staged: Plan
    ends: tuple[tuple[Plan, Plan], ...]


@dataclass
class Pipelines:
    """The pipelines that are tried where a recipe pins none, for steps of ``whole`` sequences."""

    recipe: Recipe
    spec: ModelSpec
    cluster: Cluster
    whole: int
    pinned: bool = True

    def degrees(self) -> Iterator[StagedDegrees]:
        """All that the devices and the batch allow; none where inputs of blocks wait outside the device."""
        recipe, spec, cluster = self.recipe, self.spec, self.cluster
        if (recipe.parallel.pp and self.pinned) or recipe.offload.activations != "none":
            return
        others = [technique for technique in techniques.ORDER if technique not in (pp, tp, cp, ep, shard)]
        for cut in _spread(recipe, spec, cluster, _open(recipe, spec, cluster), pinned=self.pinned):
            rows = replace(cut, batch=Batch(1, 1, recipe.train.seq_len))
            if tp.check(spec, cut, cluster) or cp.check(spec, rows, cluster):
                continue
            whole = 1.0, recipe.offload.optimizer_fraction  # others are tried without stages alone
            tried = techniques.choices(others, recipe, spec, cluster, cut)
            ends = [end for end in tried if end.offload.optimizer_fraction in whole]
            for staged in pp.pipelines(recipe, spec, cluster, cut):
                layout = staged.layout
                own_devices = layout.tp * layout.cp
                dp, rest = divmod(cluster.world, layout.pp * own_devices)
                least = staged.pipeline.spec.least_micro_batches(layout.pp)
                sizes = [] if rest else splits(recipe.train, self.whole, dp, own_devices)
                if sizes := [each for each in sizes if each[1] >= least]:
                    degrees = replace(layout, dp_shard=dp, ranks_per_node=cluster.devices_per_node)
                    if ep.check(spec, replace(cut, layout=degrees), cluster):
                        continue
                    split = Shard("zero3" if dp > 1 else "ddp")
                    own = [replace(end, layout=degrees, pipeline=staged.pipeline, shard=split) for end in ends]
                    most, fewest = (self._batch(each) for each in (sizes[0], sizes[-1]))
                    both = [(replace(end, batch=most), replace(end, batch=fewest)) for end in own]
                    yield StagedDegrees(staged, tuple(both))

    def _batch(self, size: tuple[int, int]) -> Batch:
        """Micro-batches with the largest chunks of the loss, which are the fastest."""
        seq_len = self.recipe.train.seq_len
        return Batch(*size, seq_len, chunk_of(self.spec, LARGER_CHUNKS[0], size[0] * seq_len)[0])

    def plans(self, degrees: StagedDegrees) -> list[Plan]:
        """The legal ones of these degrees. Where the dial is open, of what is cut it has zero1, which reduces once, and
        zero3, which holds least, over all ranks of a stage: stages have made weights small, and lie on few nodes."""
        try:
            legal, _ = _legal(self.recipe, self.spec, self.cluster, degrees.staged, pinned=self.pinned)
        except ConfigError:
            return []
        train, dial = self.recipe.train, self.recipe.parallel.strategy
        if dial == "hsdp":
            legal = [plan for plan in legal if plan.layout.dp_replicate > 1]
        if dial == "auto":
            whole = [plan for plan in legal if 1 in (plan.layout.dp_shard, plan.layout.dp_replicate)]
            legal = [plan for plan in whole if plan.shard.strategy != "zero2"]
        return [each for plan in legal for each in _with_batches(plan, train, self.spec, self.cluster, self.whole)[0]]


def _open(recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    """The plan before any technique has been set: what is the recipe's alone to say."""
    why = batch_reasons(recipe.train)
    if recipe.attention != "auto":
        why["attention"] = "pinned where it serves; see docs/techniques/attention.md"
    return Plan(
        deterministic=recipe.run.deterministic,
        attention=recipe.attention,
        loss=recipe.method.spec.loss,
        entropy=recipe.method.entropy,
        why=why,
        model=spec.name,
        cluster=str(cluster),
    )


def _legal(
    recipe: Recipe, spec: ModelSpec, cluster: Cluster, degree: Plan, *, pinned: bool
) -> tuple[list[Plan], list[Problem]]:
    """The legal plans at one degree of tensor parallelism, without a batch, and what is wrong with the others."""
    found: list[Plan] = []
    refused: list[Problem] = []
    others = [technique for technique in techniques.ORDER if technique not in (pp, tp, cp, ep, shard)]
    enough = degree.pipeline.spec.least_micro_batches(degree.layout.pp)
    for other in techniques.choices(others, recipe, spec, cluster, degree):
        if other.compile and recipe.compile == "auto" and degree.pipeline.spec.splits_backward:
            why = "derived: off: the schedule makes gradients of weights apart, which compiled blocks cannot do"
            other = replace(other, compile=False, why={**other.why, "compile": why})
        for split in shard.choices(recipe, spec, cluster, other, pinned=pinned):
            whole = replace(split, batch=Batch(1, enough, recipe.train.seq_len, 128))
            problems = techniques.check(spec, whole, cluster)
            refused += problems
            found += [whole] * (not problems)
    # What cannot be beside something outside the device would hold more than what can.
    return found, [problem for problem in refused if not (found and problem.code == "PLAN028")]


def _with_batches(
    plan: Plan, train: Train, spec: ModelSpec, cluster: Cluster, whole: int
) -> tuple[list[Plan], Problem | None]:
    """The plan with every way to cut the step's ``whole`` sequences into micro-batches; and where a pipeline needs more
    of them than any way has, what is wrong. The last stage of a pipeline has larger chunks of the loss from the start,
    since all others wait for it."""
    layout, seq_len, found, problem = plan.layout, train.seq_len, [], None
    most = LARGER_CHUNKS[-1] if layout.pp > 1 and cluster.kind == "cuda" else CHUNK_NUMBERS[cluster.kind]
    undivided = leave_early(plan)  # gradients of several micro-batches stay on the device, or are copied more
    for micro, accumulation in splits(train, whole, layout.dp, layout.tp * layout.cp, undivided=undivided):
        chunk, reasons = chunk_of(spec, most, micro * seq_len // layout.cp)
        made = replace(plan, batch=Batch(micro, accumulation, seq_len, chunk), why={**plan.why, **reasons})
        if problems := pp.check(spec, made, cluster):
            problem = problems[0]
            continue
        found.append(made)
        if accumulation > 1 and leave_each(made):
            why = {**made.why, "offload.sums": "searched"}
            found.append(replace(made, offload=replace(made.offload, sums="host"), why=why))
    return found, None if found else problem


def splits(train: Train, whole: int, dp: int, devices: int, *, undivided: bool = False) -> list[tuple[int, int]]:
    """Micro-batch and accumulation, in sequences, of a rank's share of a step, where so many ``devices`` read the same;
    the largest micro-batches first, and ``undivided`` the whole share, however large. None where ``dp`` ranks cannot
    share the step as the recipe pins it."""
    share, rest = divmod(whole, dp)
    if rest or share == 0:
        return []
    micro, accumulation = train.micro_batch_size, train.gradient_accumulation_steps
    if micro is not None or accumulation is not None:
        micro = micro or share // (accumulation or 1)
        accumulation = accumulation or share // max(1, micro)
        return [(micro, accumulation)] if micro * accumulation == share else []
    most = max(1, devices * TOKENS_PER_MICRO_BATCH // train.seq_len)
    sizes = [size for size in range(min(most, share), 0, -1) if share % size == 0]
    sizes = [share, *sizes] if undivided and share not in sizes else sizes
    return [(size, share // size) for size in sizes]


def chunk_of(spec: ModelSpec, most: int, tokens: int) -> tuple[int, dict[str, str]]:
    """Tokens in a chunk of the loss, of at most ``most`` logits, and why."""
    chunk = max(128, most // spec.vocab_size // 128 * 128, -(-tokens // MOST_CHUNKS // 128) * 128)
    if chunk >= tokens:
        return tokens, {"batch.loss_chunk_tokens": "derived: all tokens of a micro-batch, since their logits are few"}
    size = show_bytes(4 * chunk * spec.vocab_size)
    return chunk, {"batch.loss_chunk_tokens": f"derived: {chunk:,} x {spec.vocab_size:,} logits at a time, {size}"}
