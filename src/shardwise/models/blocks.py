"""The pieces of a model: its blocks, each gathered, recomputed and compiled as one, and its two ends.

A model may be a list of parts, the stages of a pipeline. A part has some of the blocks, under the names and numbers of
the whole model; the embedding, and the last norm with the output layer, are in one part each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from shardwise.models.config import ModelSpec


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of any model, in order: the members of each outermost list of modules of one class that have
    parameters. A decoder's are its ``layers``; a model without such a list has none. A ModuleList of torch's own
    single layers (heads of several tasks, embedding tables) is none: they are small, and often not all of them run."""
    from torch import nn

    from shardwise.models.layers import Part

    if isinstance(module, Part):  # the last of which may be of another class
        return [*module.get_submodule("layers").children()]
    members = list(module.children())
    alike = len({type(member) for member in members}) == 1
    single = all(type(member).__module__.startswith("torch.nn.") and not [*member.children()] for member in members)
    chained = isinstance(module, nn.Sequential) and len(members) > 1
    listed = chained or (isinstance(module, nn.ModuleList) and not single)
    if listed and alike and all(next(member.parameters(), None) is not None for member in members):
        return members
    return [block for member in members for block in blocks(member)]


def numbered(part: nn.Module) -> list[tuple[int, nn.Module]]:
    """The blocks of a part with their numbers in the whole model, which are their names. One of another name has that
    of its place."""
    names = {module: name.rpartition(".")[2] for name, module in part.named_modules()}
    found = enumerate(blocks(part))
    return [(int(names[block]) if names[block].isdigit() else place, block) for place, block in found]


def surround(block: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have the block compute what ``wrap`` makes of its forward: what recomputes it, compiles it, lets its input wait
    or its weights' gradients come later. Who comes last is outermost."""
    block.forward = wrap(block.forward)


def spec_of(parts: Sequence[nn.Module]) -> ModelSpec:
    """The spec of the whole model, which every part of it has."""
    spec: ModelSpec = parts[0].spec  # type: ignore[assignment]
    return spec


def named(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Every parameter of the parts by canonical name, in the model's order; one that is in two places once, by the name
    of the first: a tied one is the embedding's, and so is a copy of it."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in each_named(parts):
        found.setdefault(name, parameter)
    return found


def each_named(parts: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter of the parts with its canonical name, as :func:`named` does; but where one part has the
    embedding and another a copy of it, return both, under one name."""
    names: dict[nn.Parameter, str] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            names.setdefault(parameter, canonical(part, name))
    return [(name, parameter) for parameter, name in names.items()]


def canonical(part: nn.Module, name: str) -> str:
    """The canonical name of a parameter of a part: of an output layer that is tied to an embedding in another part, and
    has a copy of its weight, the embedding's."""
    return "embed.weight" if name == "head.weight" and copies_embedding(part) else name


def copies_embedding(part: nn.Module) -> bool:
    """Return whether the part's output layer is tied to an embedding that the part does not have."""
    from shardwise.models.layers import Part

    if not isinstance(part, Part) or not part.spec.tie_word_embeddings:
        return False
    children = dict(part.named_children())
    return "head" in children and "embed" not in children


def tied_copy(parts: Sequence[nn.Module]) -> nn.Parameter | None:
    """The weight of the output layer, where it is a copy of the embedding's and no part has the two as one."""
    copies = [part.get_parameter("head.weight") for part in parts if copies_embedding(part)]
    others = {parameter for part in parts for name, parameter in part.named_parameters() if name == "embed.weight"}
    return next((copy for copy in copies if copy not in others), None)


def tie(parts: Iterable[nn.Module]) -> None:
    """Make the output layer's weight the embedding's, where these parts have both."""
    found = {name: child for part in parts for name, child in part.named_children()}
    if "embed" in found and "head" in found:
        found["head"].weight = found["embed"].weight


def ends(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules with parameters that a decoder, or a part of one, has before its blocks (embedding) and after
    them (last norm, output layer), in the order in which they run, each in every pass. There are none of any other
    model, nor where the two ends share a weight, or what is before the blocks is more than tables, so that backward
    reads it."""
    from torch import nn

    from shardwise.models.layers import Part

    if not isinstance(module, Part):
        return [], []
    names = [name for name, _ in module.named_children()]
    held = [child if next(child.parameters(), None) is not None else None for child in module.children()]
    middle = names.index("layers")
    embedding, head = ([child for child in each if child is not None] for each in (held[:middle], held[middle + 1 :]))
    tables = all(isinstance(module, nn.Embedding) for module in embedding)
    shared = {p for one in embedding for p in one.parameters()} & {p for one in head for p in one.parameters()}
    return (embedding, head) if tables and not shared else ([], [])
