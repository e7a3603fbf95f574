"""The record of a mixer (:class:`Mixer`), the part of a block in which tokens meet. Its row is read without torch; its
program is an ``nn.Module`` beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.models.config import ModelSpec

Matrices = dict[str, tuple[tuple[int, int], bool]]
"""The shape [out, in] of each linear layer, and whether it has a bias."""
Numbers = dict[str, int]
"""What symbols stand for."""


@dataclass(frozen=True)
class Mixer:
    """One way in which blocks mix tokens, as a config names it for all layers or, in ``layer_types``, for some.

    module: its program, ``package.module:Class``: made of a ModelSpec, called with x [b,s,d], the tables of rotation
    (None: nothing is rotated) and a MaskSpec, it returns [b,s,d]; which of its results selective recomputation makes
    again it says itself (``made_again`` in layers.py). matrices: its linear layers; norms: the size of each norm;
    others: the shape of each other parameter, all by their names in the program.

    columns, rows, whole: the names of layers whose outputs, a number of heads, are shared by tensor-parallel ranks;
    whose inputs are; and that every rank has, to use with its own heads. Without any the mixer cannot be shared so.
    narrow: the names of layers that, where ``narrows`` says so of a model, make each token narrow before its heads are
    computed: every rank has them, to use with its own tokens, and what they make is gathered in the tokens' place; they
    are like ``whole`` in other models.
    cut: the names of other parameters, of which each rank has the rows of its heads; heads: the sizes that ranks must
    divide beside those of attention, by the fields that say them, and ``share`` the symbol of the first.
    rotated: whether it uses the tables of rotation. sequence: whether the seam ``inner(q, k, v, mask)``, or those of a
    gated delta net, are all in which its tokens meet, so that context parallelism can take their place. scores: how
    many numbers a token multiplies for each position that it sees; state: however many it sees. wrong: what it cannot
    be made of, and what to write instead. small: its own fields in a proof's small model of these sizes
    (prove/shrink.py).

    template: the fields of a spec that change its program, in the numbers of a template (planner/variants.py), and
    ``symbols`` those that it uses besides d, f, K, G, e and p, with the model's own ``sizes``; ``ones`` are always 1,
    ``sums`` are what it computes with that is no product of symbols.
    """

    name: str
    module: str
    matrices: Callable[[ModelSpec], Matrices]
    norms: Callable[[ModelSpec], dict[str, int]] = lambda spec: {}
    others: Callable[[ModelSpec], dict[str, tuple[int, ...]]] = lambda spec: {}
    columns: str = ""
    rows: str = ""
    whole: str = ""
    narrow: str = ""
    narrows: Callable[[ModelSpec], bool] = lambda spec: False
    cut: str = ""
    heads: str = ""
    share: str = ""
    rotated: bool = False
    sequence: bool = False
    scores: Callable[[ModelSpec], int] = lambda spec: 0
    state: Callable[[ModelSpec], int] = lambda spec: 0
    template: Callable[[ModelSpec, Numbers], dict[str, Any]] = lambda spec, numbers: {}
    wrong: Callable[[ModelSpec], list[tuple[str, str]]] = lambda spec: []
    small: Callable[[ModelSpec, Numbers], dict[str, Any]] = lambda spec, sizes: {}
    symbols: str = ""
    sizes: Callable[[ModelSpec], Numbers] = lambda spec: {}
    ones: str = ""
    sums: Callable[[Numbers], Numbers] = lambda numbers: {}
