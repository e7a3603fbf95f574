"""The rows of the tables: a method's, an optimizer's, a launcher's and a schedule's of the learning rate. Other
packages import them from here, for rows of their own (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TOKEN_ACCURACY, ENTROPY = "mean_token_accuracy", "entropy"
TOKEN_FIGURES = (TOKEN_ACCURACY, ENTROPY)
"""What training on tokens reports of each step beside its loss, by the names that TRL gives it; entropy if asked."""
FURTHER = "mtp_loss"
"""What the mean loss of a layer that predicts a further token is reported as, beside the loss, which it is not in."""
PREFERENCE_FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "tokens/chosen",
    "tokens/rejected",
)
"""What methods of pairs report of each step beside their loss, by the names that TRL gives it, and how many tokens of
an answer are trained on."""


@dataclass(frozen=True)
class MethodSpec:
    """A method, and by ``loss`` what plans call its loss, which methods may share. ``records``: it reads records, not
    plain text; ``pairs``: of two answers each, whose tokens are scored before a gradient is known. ``counted``: its
    loss asks how many tokens an answer has; ``averaged``: rewards are of means over these, not of sums. ``reference``:
    it asks what the initial model says of each pair. ``options``: the keys of the recipe's section ``method`` that it
    reads, beside its name. ``learning_rates`` are the usual ones, of all weights and of adapters, and ``warmup`` a
    share of the steps. ``module``: of another package, where its program is."""

    name: str
    loss: str
    records: bool = False
    pairs: bool = False
    counted: bool = False
    averaged: bool = False
    reference: bool = False
    options: tuple[str, ...] = ()
    learning_rates: tuple[float, float] = (0.0, 0.0)
    warmup: float = 0.0
    module: str = ""

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what the loss always reports of each step beside itself."""
        return PREFERENCE_FIGURES if self.pairs else (TOKEN_ACCURACY,)

    @property
    def row_sums(self) -> int:
        """The fp64 numbers of a pair that are summed over ranks which have some tokens each of the same rows."""
        return self.pairs * (4 if self.counted else 2)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer, ``title`` in words; ``file`` is the module that makes it, with dots one of another package.
    ``options``: the keys of the recipe's
    section ``optim`` that it reads and others may not. ``kept``: numbers that it keeps of each trained one; ``packed``:
    of large matrices in 8 bits (techniques/quantised.py). ``streamed``: it can go through files, block by block
    (offload/streamed.py). ``factored``: of a matrix it keeps a number a row and one a column, for whose means it asks
    ranks that hold other rows; columns are not cut, nor does the host update. ``passes``: how often it reads or writes
    a number of the weights' dtype where it is no ``fused`` kernel, which does so once, clipping included. ``smaller``:
    one whose updates are nearly the same and which keeps less. ``exact``: the one whose updates it rounds; None: it
    rounds nothing. ``rest``: it multiplies matrices of linear layers, whole (techniques/optim/dealt.py), and the one of
    this name updates everything else."""

    name: str
    title: str
    file: str
    options: tuple[str, ...]
    kept: int
    passes: int
    fused: bool = False
    packed: bool = False
    streamed: bool = False
    factored: bool = False
    smaller: str | None = None
    exact: str | None = None
    rest: str | None = None


@dataclass(frozen=True)
class LauncherSpec:
    """A launcher; ``title``: what it does. ``here``: it starts ranks on this machine alone, waits for them and says how
    they ended; any other tells how they are to be started, of which it may have written a file. ``module``: of another
    package, where its program is."""

    name: str
    title: str
    here: bool = False
    module: str = ""


Span = Callable[[float | None, float, int], tuple[float, float]]
"""First step and length, in steps, of ``optim.decay_steps``, the warm-up's steps and the run's."""
WSD_DECAY_SHARE = 0.1
"""The last part of the run that decays when ``decay_steps`` is not given (Hu et al., arXiv 2404.06395)."""
TIMESCALE = 10_000
"""The steps after which an inverse square root has fallen to 0.71 where neither ``decay_steps`` nor a warm-up says."""


def over_the_rest(decay: float | None, warmup: float, total: int) -> tuple[float, float]:
    """The fall begins after the warm-up and lasts ``decay`` steps, or all that are left."""
    return warmup, decay or total - warmup


def to_the_last(decay: float | None, warmup: float, total: int) -> tuple[float, float]:
    """The fall begins a step earlier: the last step of the run has the lowest rate, not the step after it."""
    start, length = over_the_rest(decay, warmup, total)
    return start - 1, length


def over_the_end(decay: float | None, warmup: float, total: int) -> tuple[float, float]:
    """The fall is the last ``decay`` steps of the run, or the last tenth of it."""
    length = decay or max(1, round(total * WSD_DECAY_SHARE))
    return max(warmup, total - length), length


def without_end(decay: float | None, warmup: float, total: int) -> tuple[float, float]:
    """The fall begins after the warm-up and never ends; its length is a timescale."""
    return warmup, decay or warmup or TIMESCALE


@dataclass(frozen=True)
class Fall:
    """A schedule of the learning rate. ``says``: what it does; ``reads``: the keys of ``optim`` that it reads beside
    those of the warm-up; ``left``: the share of the fall that is left, of the share of it that is done (0 before it
    begins) and ``optim.power``; ``floor``: ``min_learning_rate`` bounds the rate instead of being where the fall
    ends."""

    says: str
    reads: tuple[str, ...]
    span: Span
    left: Callable[[float, float], float]
    floor: bool = False
