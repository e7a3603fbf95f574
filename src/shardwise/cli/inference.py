"""The commands that let a model write have this in common: how it chooses, and which model a path means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from shardwise.cli.options import Common, recipe_file
from shardwise.data.tokens import Tokenizer, open_directory
from shardwise.errors import MissingInputError, Problem
from shardwise.models.resolve import data_of, resolve, with_adapter
from shardwise.runtime.checkpoint.locate import is_own, locate_best, newest
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import LoraSection, Model, Recipe

if TYPE_CHECKING:
    import torch

    from shardwise.data.conversations import Prompt
    from shardwise.models.hf_model import Model as Network
    from shardwise.runtime.generate import Sampling


@dataclass(kw_only=True)
class Writing(Common):
    """The options that say which model writes, and how it chooses its words."""

    best: Annotated[bool, Option("--best", help="Use the run's checkpoint with the lowest validation loss.")] = False
    tokens: Annotated[
        int | None, Option("--tokens", "--max-new-tokens", min=1, help="The most tokens (64; of an answer 256).")
    ] = None
    temperature: Annotated[float, Option("--temperature", min=0.0, help="0 takes always the most likely token.")] = 0.0
    top_k: Annotated[int, Option("--top-k", min=0, help="Draw among so many of the most likely tokens; 0: all.")] = 0
    top_p: Annotated[float, Option("--top-p", min=1e-9, max=1, help="Draw among the fewest of this probability.")] = 1.0
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the sampling.")] = 0

    def writer(self, path: Path, gpu: int = 0, *, answers: bool) -> Writer:
        """Open the model that ``path`` means, on this GPU if there is one; answers to questions are longer, unless
        ``--tokens`` says."""
        import torch

        from shardwise.runtime.generate import Sampling

        model, tokenizer = load(path, self.best)
        length = self.tokens or (256 if answers else 64)
        sampling = Sampling(length, self.temperature, self.seed, tokenizer.eot_id, self.top_k, self.top_p)
        device = torch.device(f"cuda:{gpu % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
        return Writer(model.to(device), tokenizer, sampling, device)


@dataclass(frozen=True)
class Writer:
    """A model that is ready to write."""

    model: Network
    tokenizer: Tokenizer
    sampling: Sampling
    device: torch.device

    def write(self, asked: Sequence[Prompt], tell: Callable[[int, str], None] = lambda row, text: None) -> list[str]:
        """Return what follows each prompt, as ``write_batch`` of the runtime."""
        from shardwise.runtime.generate import write_batch

        return write_batch([self.model], self.tokenizer, asked, self.sampling, self.device, tell)


def load(path: Path, best: bool) -> tuple[Network, Tokenizer]:
    """The exported model of a run, any model directory, or an adapter on the model that it belongs to. If the run has a
    checkpoint newer than its export, the newest checkpoint, whatever layout wrote it; with ``best`` the best one."""
    from shardwise.runtime.export import load_model, load_run

    model = path / "hf" if (path / "hf" / "config.json").is_file() else path
    if is_own(path) and (best or model == path):
        fix = f"`shardwise export {path}{' --best' * best}`, then this" + " without --best" * best
        raise MissingInputError(Problem("CKPT001", "the model of an own loop is read from its hf/", str(path), fix))
    last, config = newest(path / "checkpoints"), model / "config.json"
    stale = last is not None and config.is_file() and last.stat().st_mtime > config.stat().st_mtime
    adapter = (path / "adapter_config.json").is_file()
    if adapter or (config.is_file() and not best and not stale):
        recipe = _as_recipe(path) if adapter else Recipe(model=Model(path=str(model)))
        return load_model(recipe, resolve(recipe)), _tokenizer_of(model, recipe)
    recipe = load_recipe(recipe_file(path))
    loaded = load_run(locate_best(path) if best else path, recipe, resolve(recipe))
    return loaded, open_directory(path / "tokenizer")


def _as_recipe(adapter: Path) -> Recipe:
    """The adapter as the recipe of a model that begins with it."""
    from shardwise.models.peft import model_of_adapter

    model = model_of_adapter(adapter) or str(adapter)  # of which is said that it is none
    return with_adapter(Recipe(model=Model(path=model), lora=LoraSection(path=str(adapter))))


def _tokenizer_of(directory: Path, recipe: Recipe) -> Tokenizer:
    """The tokenizer beside a model or an adapter, else its run's, else the one of the model that it belongs to."""
    from shardwise.data.prepare import open_tokenizer

    at = directory if (directory / "tokenizer.json").is_file() else directory.parent / "tokenizer"
    found = None if at.is_dir() else open_tokenizer(data_of(recipe))
    return found or open_directory(at)
