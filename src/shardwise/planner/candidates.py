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
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Recipe, Train
from shardwise.spec.units import show_bytes

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
    whole, begun = 0, _open(recipe, spec, cluster)
    for degree in techniques.choices(techniques.SPLIT, recipe, spec, cluster, begun, pinned=pinned):
        own = degree.layout.tp * degree.layout.cp  # devices that read the same rows
        pairs = ((degree.layout.degree(axis), vars(recipe.parallel)[axis]) for axis in ("tp", "cp", "ep"))
        asked = pinned and all(size in (1, wanted) for size, wanted in pairs)
        try:
            dp = techniques.grouped(cluster, degree).world
            legal, problems = _legal(recipe, spec, cluster, degree, pinned=pinned)
        except ConfigError as error:
            if asked:
                raise
            problems = list(error.problems)
            legal = []
            dp = 0
        refused += problems if asked or not pinned else []
        try:
            whole = whole or (batch(recipe.train, dp, own)[2] if legal else 0)
        except ConfigError as error:  # another degree may suit the batch
            unsuited += error.problems
            continue
        for plan in legal:
            made, problem = _with_batches(plan, recipe.train, spec, cluster, whole)
            found += made
            unsuited += [problem] if problem else []
    if not found and (problems := refused + unsuited):
        raise ConfigError(*dict.fromkeys(problems))
    return found, refused


@dataclass(frozen=True)
class StagedDegrees:
    """A pipeline with degrees of tp, cp and ep, with a schedule. ``ends``: for each mode of recomputation,
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
        """All that the devices and the batch allow."""
        recipe = self.recipe
        spec = self.spec
        cluster = self.cluster
        begun = _open(recipe, spec, cluster)
        for staged, ends in techniques.staged(recipe, spec, cluster, begun, pinned=self.pinned):
            layout, schedule = staged.layout, staged.pipeline.spec
            own_devices = layout.tp * layout.cp
            dp, rest = divmod(cluster.world, layout.pp * own_devices)
            sizes = [] if rest else splits(recipe.train, self.whole, dp, own_devices)
            sizes = [each for each in sizes if each[1] >= schedule.least_micro_batches(layout.pp)]
            if not sizes:
                continue
            degrees = replace(layout, dp_shard=dp, ranks_per_node=cluster.devices_per_node)
            most, fewest = (self._batch(each) for each in (sizes[0], sizes[-1]))
            if techniques.check_split(spec, replace(staged, layout=degrees, batch=fewest), cluster):
                continue
            whole = (replace(end, layout=degrees, pipeline=staged.pipeline) for end in ends)
            own = [techniques.smallest(each) for each in whole]
            yield StagedDegrees(staged, tuple((replace(end, batch=most), replace(end, batch=fewest)) for end in own))

    def _batch(self, size: tuple[int, int]) -> Batch:
        """Micro-batches with the largest chunks of the loss, which are the fastest."""
        seq_len = self.recipe.train.seq_len
        return Batch(*size, seq_len, chunk_of(self.spec, LARGER_CHUNKS[0], size[0] * seq_len)[0])

    def plans(self, degrees: StagedDegrees) -> list[Plan]:
        """The legal ones of these degrees."""
        try:
            legal, _ = _legal(self.recipe, self.spec, self.cluster, degrees.staged, pinned=self.pinned)
        except ConfigError:
            return []
        train, tried = self.recipe.train, techniques.beside_stages(self.recipe.parallel.strategy, legal)
        return [each for plan in tried for each in _with_batches(plan, train, self.spec, self.cluster, self.whole)[0]]


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
    """The legal plans of one split of the ranks, without a batch, and what is wrong with the others."""
    found: list[Plan] = []
    refused: list[Problem] = []
    enough = degree.pipeline.spec.least_micro_batches(degree.layout.pp)
    for plan in techniques.within_split(recipe, spec, cluster, degree, pinned=pinned):
        whole = replace(plan, batch=Batch(1, enough, recipe.train.seq_len, 128))
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
    layout = plan.layout
    seq_len = train.seq_len
    found = []
    problem = None
    most = LARGER_CHUNKS[-1] if layout.pp > 1 and cluster.kind == "cuda" else CHUNK_NUMBERS[cluster.kind]
    # Gradients of several micro-batches stay on the device, or are copied more.
    undivided = techniques.leave_early(plan)
    for micro, accumulation in splits(train, whole, layout.dp, layout.tp * layout.cp, undivided=undivided):
        chunk, reasons = chunk_of(spec, most, micro * seq_len // layout.cp)
        made = replace(plan, batch=Batch(micro, accumulation, seq_len, chunk), why={**plan.why, **reasons})
        plans, problems = techniques.batched(spec, made, cluster)
        found += plans
        problem = problems[0] if problems else problem
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
