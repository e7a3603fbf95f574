"""The name of a traced unit: which model's, and what acted inside it. No torch.

A unit (embedding, block, head) is traced after techniques were applied to it, with a prime in the place of every number
that only sizes something, so that each size that is seen can be read as a product of symbols (planner/symbols.py).
Models and plans whose variant is the same share the unit; each binds its own numbers to the symbols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.spec.plan import Plan

ODD_ROWS = 1_061
"""The prime that stands for the rows of a micro-batch where ranks have unlike shares of its tokens: each rank's,
rounded up, are then a prime too."""

What = Literal["embedding", "block", "head"]


@dataclass(frozen=True)
class Variant:
    """``model`` has the features of the unit's, and ``plan`` what acts inside it; where a number only sizes something,
    both have a prime, of which ``atoms`` are the symbols. ``sums``: symbols of sizes that are no products of others,
    each with the parameter whose dim 0 it is. ``rules``: symbols that together are another. ``block``: which of the
    model's it is. ``input_trained``: whether what enters it has a gradient. ``gathered``: its weights come in the
    dtypes of their modules. ``spread``: over how many ranks the tokens of the stream are split where it enters.
    ``code``: the files of the techniques that acted."""

    what: What
    model: ModelSpec
    plan: Plan = Plan()
    atoms: tuple[tuple[str, int], ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    rules: tuple[tuple[tuple[str, ...], str], ...] = ()
    block: int = 0
    input_trained: bool = True
    gathered: bool = False
    spread: int = 1
    code: tuple[str, ...] = ()

    @property
    def concrete(self) -> bool:
        """True where sizes are the model's own: of transformers' modules only batch and sequence are symbols."""
        return self.model.hf_model is not None


@dataclass(frozen=True)
class Traced:
    """A unit of a model as a plan makes it: its variant, the ``numbers`` of the variant's symbols, and the dtypes for
    which others stand in it. ``unit``: ``embedding``, ``head`` or a block's number."""

    variant: Variant
    unit: int | str
    numbers: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def applied(self, **settings: Any) -> Traced:
        """Return the unit with these settings of the plan that acts inside it."""
        return self.told(plan=replace(self.variant.plan, **settings))

    def told(self, **fields: Any) -> Traced:
        """Return the unit with these fields of its variant."""
        return replace(self, variant=replace(self.variant, **fields))

    def bound(self, **numbers: int) -> Traced:
        """Return the unit with these numbers of symbols added."""
        return replace(self, numbers={**self.numbers, **numbers})

    def spread(self, tokens: int, ranks: int, prime: int) -> Traced:
        """Return the unit with the ``tokens`` of a micro-batch split over the ``ranks`` of an axis, for which ``prime``
        and the symbol ``t`` stand already: between units a rank has its own ``n`` of the stream, as many as others or
        rounded up."""
        atoms = dict(self.variant.atoms)
        rules = self.variant.rules
        batch = self.variant.plan.batch
        if tokens % ranks:
            batch = replace(batch, micro_batch_size=ODD_ROWS)
            atoms |= {"b": ODD_ROWS, "n": -(-ODD_ROWS * batch.seq_len // prime)}
        else:
            batch = replace(batch, micro_batch_size=prime * atoms["b"])
            rules = (*rules, (("b over t", "t"), "b"), (("b over t", "s"), "n"))
            atoms["b over t"] = atoms.pop("b")
        made = self.told(atoms=tuple(atoms.items()), rules=rules, spread=prime)
        return made.applied(batch=batch).bound(n=-(-tokens // ranks))

    def names(self, spec: ModelSpec) -> dict[str, str]:
        """The parameters of the unit: their names in the model ``spec``, and in the variant's."""
        own = f"layers.{self.unit}." if isinstance(self.unit, int) else ""
        found = parameters(spec, own or str(self.unit))
        return {name: f"layers.{self.variant.block}.{name.removeprefix(own)}" if own else name for name in found}


@lru_cache(maxsize=4096)
def parameters(spec: ModelSpec, unit: str) -> tuple[str, ...]:
    """The names of a unit's own parameters: of ``embedding``, ``head``, or with a prefix such as ``layers.3.``."""
    names = list(parameter_shapes(spec))
    middle = [i for i, name in enumerate(names) if name.startswith("layers.")]
    if unit in ("embedding", "head"):
        return tuple(names[: middle[0]] if unit == "embedding" else names[middle[-1] + 1 :])
    return tuple(name for name in names if name.startswith(unit))
