"""The model of a user's own training loop as files: written by the loop, or exported from a checkpoint of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.data.whole import becoming
from shardwise.errors import MissingInputError, OutputError, Problem
from shardwise.models import hf
from shardwise.models.config import to_hf
from shardwise.models.decoder import Decoder
from shardwise.models.lookup import load_spec
from shardwise.models.tensorfile import DTYPES, read_json
from shardwise.runtime.agree import together
from shardwise.runtime.checkpoint import manifest
from shardwise.runtime.checkpoint.locate import locate
from shardwise.runtime.checkpoint.save import read
from shardwise.runtime.export import whole
from shardwise.spec.files import NOTE_BYTES

TOKENIZER = "tokenizer"
"""The directory beside an own loop's checkpoints, where its tokenizer is."""


@runtime_checkable
class Saveable(Protocol):
    """An object that writes itself into a directory, as models and tokenizers of transformers and peft do."""

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> Any:
        """Write the directory."""


def save_pretrained(module: nn.Module, directory: str | Path, tokenizer: Saveable | None = None) -> None:
    """Write a parallelized module into ``directory``, where transformers' ``from_pretrained`` finds it, with
    ``tokenizer`` beside it; of a peft model the adapter alone, for peft's ``from_pretrained``. A module of another kind
    becomes one file, model.safetensors, for safetensors' ``load_model``. Every rank calls this at the same point: the
    weights are gathered one after another, and the first rank, which needs host memory for all of them, writes. Raises
    OutputError OUT002 on every rank if the disk fails."""
    first = _first()
    state = dict[str, Tensor]()
    seen = dict[int, Tensor]()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            gathered = whole(value)
            seen[id(value)] = gathered if first else torch.empty(0)
        state[name] = seen[id(value)]  # a weight that two names share is one tensor here too
    _by_first(Path(directory), lambda: _write(module, Path(directory), state, tokenizer))


def _write(module: nn.Module, directory: Path, state: dict[str, Tensor], tokenizer: Saveable | None) -> None:
    if isinstance(module, Saveable):
        module.save_pretrained(directory, state_dict=state)
    elif isinstance(module, Decoder):
        hf.write_weights(directory, module.spec, state.__getitem__, state["embed.weight"].dtype)
    else:
        once = {id(value): (name, value.contiguous()) for name, value in reversed(state.items())}
        save_file(dict(once.values()), directory / hf.SINGLE)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def describe(module: nn.Module, directory: Path, tokenizer: Saveable | None) -> None:
    """Write beside an own loop's checkpoints what :func:`export_own` needs of a model of transformers or Shardwise's
    decoder: its config, and the tokenizer. Every rank calls this at the same point."""

    def write() -> None:
        if isinstance(module, Decoder):
            (directory / "config.json").write_text(json.dumps(to_hf(module.spec), indent=2), encoding="utf-8")
        elif isinstance(module, Saveable) and isinstance(config := copy(vars(module).get("config")), Saveable):
            config.architectures = [type(module).__name__.removeprefix("FSDP")]  # type: ignore[attr-defined]
            config.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory / TOKENIZER)

    _by_first(directory, write)


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _by_first(directory: Path, write: Callable[[], None]) -> None:
    """Let the first rank make ``directory`` and write into it. If the disk fails, every rank raises OUT002."""

    def work() -> None:
        try:
            if _first():
                directory.mkdir(parents=True, exist_ok=True)
                write()
        except OSError as error:
            what, fix = f"cannot write the model: {error}", "another directory, or more space on the disk"
            raise OutputError(Problem("OUT002", what, str(directory), fix)) from error

    together(work) if dist.is_initialized() else work()


def export_own(run: Path, source: Path, target: Path) -> None:
    """Write the model of ``source``, an own loop's checkpoint or the directory ``run`` of them, into ``target``, in one
    process. Raises MissingInputError CKPT001 if what :func:`describe` wrote there names no model that can be built."""
    stored = manifest.read(locate(source)[0][1]).tensors
    with torch.device("meta"):
        model = _built(run, decoder="model.embed.weight" in stored)
    wanted = {name: stored[f"model.{name}"] for name in model.state_dict() if f"model.{name}" in stored}
    state = {name: torch.empty(held.shape, dtype=DTYPES[held.dtype]) for name, held in wanted.items()}
    read(source, {f"model.{name}": value for name, value in state.items()})
    if not isinstance(model, Decoder):
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()  # type: ignore[operator]
        state = model.state_dict()
    with becoming(target, synced=False) as draft:
        _write(model, draft, state, None)
        if (run / TOKENIZER).is_dir():
            shutil.copytree(run / TOKENIZER, draft, dirs_exist_ok=True)


def _built(run: Path, *, decoder: bool) -> nn.Module:
    import transformers

    if decoder:
        return Decoder(load_spec(str(run)))
    described = (run / "config.json").is_file()
    [name] = read_json(run / "config.json", NOTE_BYTES)["architectures"] if described else [""]
    if name in dir(transformers):
        kind = getattr(transformers, name)  # not in its vars until it is asked for
        return kind(transformers.AutoConfig.from_pretrained(run))
    what = f"these checkpoints are of a {name or 'module'} that transformers does not have, as adapters of peft are"
    fix = "call `shardwise.save_pretrained(model, directory)` at the end of the loop, which writes any module"
    raise MissingInputError(Problem("CKPT001", what, str(run), fix))
