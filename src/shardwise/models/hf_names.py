"""The names of weights in Hugging Face files, and which tensor there holds which rows of which parameter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from shardwise.models.config import ModelSpec, flat, parameter_shapes
from shardwise.models.families import FAMILIES
from shardwise.models.family import ByHead, Names, Stack

PACKED = 32
"""Values of MXFP4 that have a scale in common."""


@dataclass(frozen=True)
class Location:
    """The place in the files of the rows ``start`` to ``stop`` of a parameter: in the tensor of this name and shape,
    from its row ``first`` on each ``step``. expert: the tensor is a stack of matrices, and they are in this one.
    transposed: rows are its columns. packed: it is MXFP4, and ``shape`` is that of its values."""

    start: int
    stop: int
    tensor: str
    shape: tuple[int, ...]
    first: int = 0
    step: int = 1
    expert: int | None = None
    transposed: bool = False
    packed: bool = False

    @property
    def places(self) -> range:
        """Return which rows they are of the tensor, or of the expert's matrix in it."""
        return range(self.first, self.first + (self.stop - self.start) * self.step, self.step)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return these rows, of the tensor or of the expert's matrix in it: a view."""
        return (tensor.T if self.transposed else tensor)[self.places.start : self.places.stop : self.step]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor of the files that is needed."""
        if not self.packed:
            yield self.tensor, self.shape
            return
        scales = (*self.shape[:-1], -(-self.shape[-1] // PACKED))
        yield f"{self.tensor}_blocks", (*scales, PACKED // 2)
        yield f"{self.tensor}_scales", scales


def to_hf_name(name: str, family: str = "llama") -> str:
    """``layers.3.attention.q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; what a family's files stack has
    one name, and what they have expert by expert a name with ``*``. Raises KeyError."""
    found = _in_table(name, FAMILIES[family].names)
    if found is None:
        raise KeyError(f"no counterpart for parameter {name!r}")
    return found.replace("{}", "*") if isinstance(found, str) else found.name


def _in_table(name: str, table: Names) -> str | Stack | ByHead | None:
    """Return what a family's table says of a parameter, with the number of the layer filled in. Parameters keep their
    last word (weight, bias) unless the table has them by their whole name."""
    number = re.match(r"layers\.(\d+)\.", name)
    pattern = name if number is None else f"layers.{{}}.{name[number.end() :]}"
    module, _, last = pattern.rpartition(".")
    found = table.get(pattern)
    if found is None and module in table and last in ("weight", "bias"):
        whole = table[module]
        found = replace(whole, name=f"{whole.name}.{last}") if isinstance(whole, ByHead) else f"{whole}.{last}"
    layer = number[1] if number else ""
    if isinstance(found, Stack | ByHead):
        return replace(found, name=found.name.replace("{}", layer, 1))
    return None if found is None else found.replace("{}", layer, 1)


def name_in_model(name: str, spec: ModelSpec) -> str:
    """The name in transformers' model of the parameter with this canonical name."""
    if spec.hf_model is None:
        return to_hf_name(name, spec.family)
    part, _, rest = name.partition(".")
    return f"{dict(spec.hf_model.places)[part]}.{rest}"


def name_in_files(name: str, spec: ModelSpec) -> str:
    """Return a parameter's name in the files: for some models transformers has renamed parameters, but the files keep
    the old names."""
    named = {} if spec.hf_model is None else {ours: theirs for ours, theirs, *_ in spec.hf_model.parameters}
    number = re.match(r"layers\.(\d+)\.", name)
    pattern = name if number is None else f"layers.{{}}.{name[number.end() :]}"
    return named[pattern].format(number and number[1]) if pattern in named else name_in_model(name, spec)


def transposed(spec: ModelSpec) -> set[str]:
    """The canonical names of the matrices that the files store as [in, out], as GPT-2's do."""
    names = () if spec.hf_model is None else spec.hf_model.transposed
    return {name.format(layer) for name in names for layer in range(spec.num_hidden_layers)}


def locations(spec: ModelSpec, found: Collection[str] = ()) -> dict[str, tuple[Location, ...]]:
    """Return where the files have each parameter of ``spec``, in the order of its rows; every element of a tensor is
    one of a parameter. ``found``: the tensors that there are, of a family with more than one form; as it is written if
    none."""
    shapes, there = parameter_shapes(spec), transposed(spec)
    forms = {name: _form(name, spec, found) for name in shapes}
    heights: Counter[str] = Counter()
    for name, form in forms.items():
        if isinstance(form, str | ByHead):
            heights[form if isinstance(form, str) else form.name] += shapes[name][0]
    located: dict[str, tuple[Location, ...]] = {}
    above: Counter[str] = Counter()
    for name, form in forms.items():
        rows, *columns = shapes[name]
        if isinstance(form, Stack):
            located[name] = tuple(_in_stack(form, shapes[name], spec.experts.num_experts))
        elif isinstance(form, ByHead):
            heads, height = int(flat(spec)[form.heads]), heights[form.name]
            each, first = rows // heads, above[form.name] // heads
            located[name] = tuple(
                Location(each * i, each * (i + 1), form.name, (height, *columns), first + height // heads * i)
                for i in range(heads)
            )
            above[form.name] += rows
        elif "{}" in form:
            each = rows // spec.experts.num_experts
            located[name] = tuple(
                Location(each * e, each * (e + 1), form.format(e), (each, *columns))
                for e in range(spec.experts.num_experts)
            )
        else:
            shape = (heights[form], *columns)
            shape = shape[::-1] if name in there else shape
            located[name] = (Location(0, rows, form, shape, above[form], transposed=name in there),)
            above[form] += rows
    return located


def _in_stack(form: Stack, shape: tuple[int, ...], experts: int) -> Iterator[Location]:
    each = shape[0] // experts
    matrix = (each * form.count, *shape[1:])
    whole = (experts, *(matrix[::-1] if form.transposed else matrix))
    first, step = (form.index, form.count) if form.interleaved else (form.index * each, 1)
    for e in range(experts):
        yield Location(each * e, each * (e + 1), form.name, whole, first, step, e, form.transposed, form.packed)


def _form(name: str, spec: ModelSpec, found: Collection[str]) -> str | Stack | ByHead:
    """Return the form in which the files have a parameter: the usual one, unless there is nothing of that but of
    another."""
    if spec.hf_model is not None:
        return name_in_files(name, spec)
    family = FAMILIES[spec.family]
    if own := _of_predictor(name, spec):
        return own
    forms = [form for table in (family.names, *family.read_too) if (form := _in_table(name, table)) is not None]
    if name.startswith(f"layers.{spec.num_hidden_layers - spec.predictors}."):
        forms = [_named(form, *_blocks_of(spec)) for form in forms]
    if not forms:
        raise KeyError(f"no counterpart for parameter {name!r}")
    return next((form for form in forms if _is_there(form, spec, found)), forms[0])


def _of_predictor(name: str, spec: ModelSpec) -> str:
    """The name in the files of what a layer that predicts a further token has besides a block's; else empty."""
    number = str(spec.num_hidden_layers - spec.predictors)
    table = FAMILIES[spec.family].predictor if spec.predictors else {}
    filled: Names = {ours: theirs.replace("{}", number) for ours, theirs in table.items() if isinstance(theirs, str)}
    form = _in_table(name, filled) if name == "norm.weight" or name.startswith(f"layers.{number}.") else None
    return form if isinstance(form, str) else ""


def _blocks_of(spec: ModelSpec) -> tuple[str, str]:
    """The prefixes of the last block's names: as that of any other block, and as the files have it."""
    number = str(spec.num_hidden_layers - 1)
    own = FAMILIES[spec.family].predictor_block if spec.predictors else "model.layers.{}"
    return f"model.layers.{number}.", f"{own.replace('{}', number)}."


def _named(form: str | Stack | ByHead, usual: str, own: str) -> str | Stack | ByHead:
    """Return the form with another prefix."""
    if isinstance(form, str):
        return form.replace(usual, own, 1)
    return replace(form, name=form.name.replace(usual, own, 1))


def predictor_names(spec: ModelSpec) -> list[str]:
    """The canonical parameters that only the layer has which predicts a further token."""
    block = f"layers.{spec.num_hidden_layers - spec.predictors}."
    own = [name for name in parameter_shapes(spec) if name.startswith(block) and ".main_norm." not in name]
    return [*own, "norm.weight"] if spec.predictors else []


def copies(spec: ModelSpec) -> dict[str, str]:
    """Return the parameter by the name of each tensor of the files that is a copy of it."""
    number = str(spec.num_hidden_layers - spec.predictors)
    found = FAMILIES[spec.family].copies if spec.predictors else {}
    return {name.replace("{}", number): parameter for name, parameter in found.items()}


def _is_there(form: str | Stack | ByHead, spec: ModelSpec, found: Collection[str]) -> bool:
    """Return whether there is any tensor of this form."""
    if isinstance(form, ByHead):
        return form.name in found
    if isinstance(form, Stack):
        return any(form.name + word in found for word in (("_blocks", "_scales") if form.packed else ("",)))
    return any(form.format(e) in found for e in range(spec.experts.num_experts)) if "{}" in form else form in found


def tensors(located: Mapping[str, tuple[Location, ...]]) -> dict[str, list[tuple[str, Location]]]:
    """Return, by the name of a tensor of the files, the parameters in it and where they are. The order is that of the
    parameters, so that all tensors with rows of one parameter alone follow each other."""
    held: dict[str, list[tuple[str, Location]]] = {}
    for name, parts in located.items():
        for location in parts:
            held.setdefault(location.tensor, []).append((name, location))
    return held


def written(spec: ModelSpec) -> dict[str, list[tuple[str, Location]]]:
    """As :func:`tensors`, of the files that are written: copies of a parameter behind it."""
    found: dict[str, list[tuple[str, Location]]] = {}
    again = copies(spec)
    for tensor, parts in tensors(locations(spec)).items():
        found[tensor] = parts
        found |= {copy: parts for copy, parameter in again.items() if parts[0][0] == parameter}
    return found
