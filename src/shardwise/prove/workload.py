"""The training of a proof, whatever the layout: the model, the method, the rows of each step, and the first weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data import epochs
from shardwise.data.pack import IGNORE, Packs, Sample, Windows, open_windows
from shardwise.data.prepare import already_prepared, prepare
from shardwise.data.store import Prepared
from shardwise.errors import ShardwiseError, first_line
from shardwise.models import init
from shardwise.models.config import ModelSpec
from shardwise.models.init import Draw
from shardwise.models.odd_sizes import can_idle
from shardwise.models.resolve import data_of
from shardwise.models.roles import role
from shardwise.prove.reading import Read
from shardwise.spec import finetune
from shardwise.spec.plan import Dtype, Lora, Optim, Plan
from shardwise.spec.recipe import Method, OptimSection, Recipe
from shardwise.techniques import float8
from shardwise.techniques.quantised import FLOAT8_BLOCKS

STEPS = 5
MAX_STEPS = 10
OPTIM = OptimSection(learning_rate=1e-2, schedule="linear", warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5)
"""Every part of the update is at work: warm-up, decay of the rate, weight decay on matrices only, clipping (the first
gradients of the tiny models have norms above 0.5)."""
LEAST_EPS = 1e-8
"""What AdamW divides rounding by where a gradient is zero but for it: with less, that would be an update."""
DEVIATION = 0.2
"""Of what begins at one value for all elements, where it is drawn at random instead."""
LEAST_TOKENS = 3
"""Of a document in an excerpt."""
PREPARED_BYTES = 32 * 2**20
"""A file of records up to this size is prepared for a proof, as a run would."""
ROWS = 64
"""Real rows of which pieces are taken."""


@dataclass(frozen=True)
class Setting:
    """The settings that a plan leaves open. ``rows``: those of one step. ``draw``: the first weights, or None: as a run
    draws them. ``optim``: rates and the optimizer's numbers. ``sgd``: after the optimizer's steps one of plain gradient
    descent, without clipping: AdamW's steps hardly depend on a factor of all gradients. ``packed``: rows hold documents
    that do not see each other."""

    method: Method = field(default_factory=Method)
    rows: Callable[[Workload, int], list[Sample]] = field(default_factory=lambda: texts)
    draw: Draw | None = None
    optim: OptimSection = OPTIM
    sgd: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Workload:
    """``rows`` sequences of ``seq_len`` tokens a step, computed in ``compute`` from master weights in ``weights``;
    parameters whose names match ``frozen`` stay as they are. ``optim`` rounds nothing. ``figures``: what is reported of
    the tokens of each step beside the loss. ``narrow``: the linear layers that multiply in float8, with a scale for so
    many columns (0: all), and of a weight for as many rows."""

    spec: ModelSpec
    rows: int
    seq_len: int
    compute: Dtype
    weights: Dtype
    steps: int = STEPS
    seed: int = 0
    frozen: tuple[str, ...] = ()
    lora: Lora | None = None
    optim: Optim = Optim()
    figures: tuple[str, ...] = ()
    narrow: tuple[tuple[str, ...], int] = ((), 0)
    setting: Setting = field(default_factory=Setting, hash=False)

    def first(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole of a parameter before the first step, in fp32."""
        whole = tuple(slice(0, size) for size in shape)
        return (self.setting.draw or init.fill)(name, shape, whole, self.seed, self.spec)

    @property
    def updates(self) -> int:
        """The number of times that the weights change."""
        return self.steps + self.setting.sgd

    def batch(self, number: int) -> list[Sample]:
        """The rows of step ``number``."""
        return self.setting.rows(self, number)


def job_of(spec: ModelSpec, plan: Plan, steps: int, setting: Setting | None = None) -> Workload:
    """Return what ``plan`` trains, with everything about its layout left out."""
    rows = plan.batch.global_batch_size(plan.layout.dp)
    length, precision = plan.batch.seq_len, plan.precision
    sizes = (spec, rows, length, precision.compute, precision.weights, steps)
    told: dict[str, Any] = {"figures": () if plan.method.pairs else plan.loss_figures, "setting": setting or Setting()}
    told["narrow"] = (*float8.layers(spec, precision),), FLOAT8_BLOCKS.get(precision.scales, 0)
    return Workload(*sizes, frozen=plan.frozen, lora=plan.lora, optim=plan.optim.exact, **told)


def texts(job: Workload, number: int) -> list[Sample]:
    """Rows drawn at random. Each holds two documents, cut at another place, and another number of supervised tokens:
    row 0 has one, the last row all, and so does a single row: one token at the start of a document sees no other, and
    gradients of queries and keys would be rounding alone."""
    draw = torch.Generator().manual_seed(1_000 * job.seed + number)
    rows = []
    for index in range(job.rows):
        tokens = torch.randint(job.spec.vocab_size, (job.seq_len + 1,), generator=draw)
        border = int(torch.randint(1, job.seq_len, (), generator=draw))
        labels = tokens[1:].clone()
        learnt = 1 + index * (job.seq_len - 1) // (job.rows - 1) if job.rows > 1 else job.seq_len
        labels[torch.randperm(job.seq_len, generator=draw)[learnt:]] = IGNORE
        segments = (border, job.seq_len - border)
        positions = torch.cat([torch.arange(length) for length in segments])
        rows.append(Sample(tokens[:-1].numpy(), labels.numpy(), positions.numpy(), segments, masked=True))
    return rows


def pairs(job: Workload, number: int) -> list[Sample]:
    """Rows of one pair of answers or two, drawn at random, of which each answer but its first token or two is
    supervised; what the initial model says of the pairs is drawn too."""
    draw = np.random.default_rng([job.seed, number])
    rows = []
    for index in range(job.rows):
        count = 1 + index % 2
        lengths = draw.integers(LEAST_TOKENS, job.seq_len // (2 * count), 2 * count, endpoint=True).tolist()
        sample = _empty(job.seq_len, lengths, masked=True)
        sample.ids[:] = draw.integers(job.spec.vocab_size, size=job.seq_len)
        for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            learnt = slice(begin + int(draw.integers(2)), begin + length - 1)
            sample.labels[learnt] = np.roll(sample.ids, -1)[learnt]
        rows.append(replace(sample, references=draw.normal(size=(count, 2))))
    return rows


def setting_of(recipe: Recipe, spec: ModelSpec, seq_len: int) -> tuple[Setting, str]:
    """Return what ``recipe`` trains, with pieces of its own records where they are prepared or small, else rows like
    them that are drawn; and, in words, which and why."""
    drawn = pairs if recipe.pairs else texts
    packed = recipe.method.spec.records or recipe.data.mask_documents
    setting = Setting(recipe.method, drawn, random_everywhere, optim_of(recipe.optim), sgd=True, packed=packed)
    try:
        prepared = prepared_of(recipe)
    except ShardwiseError as error:
        return setting, f"drawn at random, since the recipe's cannot be read ({error.problems[0].what})"
    if prepared is None:
        return setting, "drawn at random, since the recipe's are not prepared (`shardwise data prepare`)"
    found = excerpts(_windows(recipe, prepared), ROWS, seq_len, spec.vocab_size)
    if not found:
        return setting, "drawn at random, since the recipe's have no labels"
    whose = "pieces of the recipe's own records, token ids modulo the small vocabulary, and between them drawn ones"
    scores = "; what the initial model says of the pairs is drawn" if recipe.method.spec.reference else ""
    return replace(setting, rows=Excerpts(found, drawn)), whose + scores


def optim_of(asked: OptimSection) -> OptimSection:
    """Return what is asked for, with rates that are large and rise and fall within a few steps, all parts at work."""
    scale = OPTIM.learning_rate / asked.learning_rate
    groups = [g.model_copy(update={"learning_rate": g.learning_rate and scale * g.learning_rate}) for g in asked.groups]
    numbers = {"beta1": asked.beta1, "beta2": asked.beta2, "eps": max(LEAST_EPS, asked.eps), "groups": groups}
    return OPTIM.model_copy(update=numbers | {"weight_decay": asked.weight_decay or OPTIM.weight_decay})


def read_of(recipe: Recipe, plan: Plan) -> Read | str:
    """Return what a run of ``recipe`` reads, where its data are prepared or small; else why that is not known."""
    if recipe.data.streaming:
        return "the data are streamed"
    try:
        prepared = prepared_of(recipe)
        if prepared is None:
            return "the recipe's data are not prepared (`shardwise data prepare`)"
        windows, size = _windows(recipe, prepared), plan.batch.global_batch_size(plan.layout.dp)
        epochs.check_size(windows, size, recipe.data)
        recipe = epochs.settled(recipe, windows)
        end = epochs.samples_of_epochs(windows, recipe.train.num_epochs)
        return Read(windows, recipe.run.seed, end, epochs.max_steps(recipe, windows, size))
    except ShardwiseError as error:
        return error.problems[0].what
    except (OSError, ValueError) as error:
        return first_line(error)


def steps_of(recipe: Recipe, read: Read | str) -> int:
    """Return the steps of a run, or where its data are not prepared as many as the recipe names."""
    return read.steps if isinstance(read, Read) else recipe.train.max_steps or finetune.DEFAULT_STEPS


def _windows(recipe: Recipe, prepared: Prepared) -> Windows | Packs:
    return open_windows(prepared.train, recipe.train.seq_len, recipe.data.mask_documents)


def prepared_of(recipe: Recipe) -> Prepared | None:
    """The recipe's data, where they are prepared or so small that they are now. Raises what is wrong with them."""
    data = data_of(recipe)
    path = Path(data.path).expanduser() if isinstance(data.path, str) else None
    prepared = already_prepared(data, recipe.sample_tokens)
    if prepared is None and path is not None and path.is_file() and path.stat().st_size <= PREPARED_BYTES:
        return prepare(data, sample_tokens=recipe.sample_tokens)
    return prepared


@dataclass(frozen=True, eq=False)
class Excerpts:
    """Short pieces of real rows, again and again in their order, and between them rows that are drawn: of documents cut
    elsewhere, and with other numbers of supervised tokens, whatever the real ones have."""

    samples: tuple[Sample, ...]
    drawn: Callable[[Workload, int], list[Sample]]

    def __call__(self, job: Workload, number: int) -> list[Sample]:
        rows, masked = self.drawn(job, number), self.samples[0].masked
        for index in range(min(1, job.rows - 1), job.rows, 2):
            rows[index] = self.samples[(number * job.rows + index) // 2 % len(self.samples)]
        return [row if row.masked == masked else as_one(row) for row in rows]


def as_one(sample: Sample) -> Sample:
    """The row as one document, as where documents see each other."""
    length = len(sample.ids)
    return replace(sample, positions=np.arange(length, dtype=np.int64), segments=(length,), masked=False)


def excerpts(windows: Windows | Packs, count: int, seq_len: int, vocab_size: int) -> tuple[Sample, ...]:
    """Return at most ``count`` rows of prepared data that have labels, each cut to ``seq_len`` tokens."""
    short = (excerpt(windows[number], seq_len, vocab_size) for number in range(len(windows)))
    return tuple(islice((row for row in short if (row.labels != IGNORE).any()), count))


def excerpt(sample: Sample, seq_len: int, vocab_size: int) -> Sample:
    """Return a short row: of each of the first documents as many tokens as there is room for, those around the first
    that is supervised; ids modulo ``vocab_size``. Of pairs both answers stay, and their references are made up."""
    kept = min(len(sample.segments), max(1, seq_len // (2 * LEAST_TOKENS)))
    if sample.references is not None:
        kept = 2 * min(len(sample.references), max(1, kept // 2))
    lengths = [min(length, seq_len // max(1, kept)) for length in sample.segments[:kept]]
    short = _empty(seq_len, lengths, sample.masked)
    at = 0
    begin = 0
    for length, whole in zip(lengths, sample.segments, strict=False):
        learnt = np.flatnonzero(sample.labels[begin : begin + whole] != IGNORE)
        first = int(learnt[0]) - length // 2 if len(learnt) else 0
        source = begin + min(max(0, first), whole - length)
        short.ids[at : at + length] = sample.ids[source : source + length] % vocab_size
        labels = sample.labels[source : source + length]
        short.labels[at : at + length] = np.where(labels == IGNORE, IGNORE, labels % vocab_size)
        at, begin = at + length, begin + whole
    return short if sample.references is None else replace(short, references=np.linspace(-1, 1, kept).reshape(-1, 2))


def _empty(seq_len: int, lengths: list[int], masked: bool) -> Sample:
    """A row of documents of such lengths, and padding; nothing is supervised yet."""
    rest = seq_len - sum(lengths)
    segments = (*lengths, *[rest] * (rest > 0)) if masked else (seq_len,)
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in segments])
    labels = np.full(seq_len, IGNORE, dtype=np.int64)
    return Sample(np.zeros(seq_len, dtype=np.int64), labels, positions, segments, masked)


SLOWER = 6.0
"""By which the logarithms of what heads forget are less than at first."""


def random_everywhere(name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
    """First weights of which none is zero and no norm one, as biases, an adapter's B and norms are drawn: a bias that
    every rank adds, a sum that the gradient of A lacks, or the wrong slice of a norm would not be seen in the first
    step."""
    begun = init.fill(name, shape, part, seed, spec)
    if ".router." in name and can_idle(spec):
        return idle(_drawn(name, shape, seed, spec), spec.experts.experts_per_token)[tuple(part)]
    if role(name) in ("bias", "lora_b", "norm", "correction"):
        begun += init.normal(name, shape, part, seed).mul_(DEVIATION)
    if role(name) == "decay_log":  # or heads forget within a token, and no state would be missed
        begun = begun.sub_(SLOWER)
    return begun


def _drawn(name: str, shape: Sequence[int], seed: int, spec: ModelSpec) -> Tensor:
    """The whole of a router's weight or bias, which is small."""
    whole = [slice(0, size) for size in shape]
    drawn = init.fill(name, shape, whole, seed, spec)
    return drawn + init.normal(name, shape, whole, seed).mul_(DEVIATION) if role(name) == "bias" else drawn


def idle(drawn: Tensor, chosen: int) -> Tensor:
    """Weights [E,d], or biases [E], of a router of which no token chooses the second expert, though others stand behind
    it: for each choice there are two others of whose logits its own is the mean, so that one of these is larger."""
    others = [0, *range(2, 2 * chosen + 1)]
    for first, second in zip(others[::2], others[1::2], strict=True):
        drawn[second] = 2 * drawn[1] - drawn[first]
    return drawn
