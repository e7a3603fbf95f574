"""``shardwise generate``: continue a text, or answer a question, with a trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from shardwise.cli.options import Common, misused, recipe_file
from shardwise.cli.show import print_json, say
from shardwise.data.tokens import Tokenizer, open_directory
from shardwise.errors import MissingInputError, Problem
from shardwise.models.load import load_spec
from shardwise.models.resolve import resolve
from shardwise.runtime.checkpoint.locate import is_own, locate_best, newest
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from shardwise.models.hf_model import Model


@dataclass
class Options(Common):
    """Continue a text with a run's model, or with any model directory that transformers can read; --chat answers."""

    path: Annotated[Path, Argument(help="A run's directory (its hf/ is used), or a model's.")]
    words: Annotated[list[str], Argument(metavar="[PROMPT]", help="The text to continue.")] = field(
        default_factory=list
    )
    prompt: Annotated[str, Option("--prompt", help="The text to continue, as an option.")] = ""
    chat: Annotated[bool, Option("--chat", help="Treat the prompt as a user message and print only the answer.")] = (
        False
    )
    best: Annotated[
        bool, Option("--best", help="Use the run's checkpoint with the lowest validation loss, not its hf/.")
    ] = False
    tokens: Annotated[
        int | None, Option("--tokens", min=1, help="The most tokens to generate (default: 64; 256 with --chat).")
    ] = None
    temperature: Annotated[
        float, Option("--temperature", min=0.0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.0
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the sampling.")] = 0


def run(options: Options) -> None:
    """Print the continuation, or the answer."""
    import torch

    from shardwise.runtime.generate import Sampling, answer, ask, continue_text

    prompt = options.prompt or " ".join(options.words)
    if options.prompt and options.words:
        what = f"two prompts: `{options.prompt}` and `{' '.join(options.words)}`"
        raise misused(what, "leave --prompt out")
    if options.chat and not prompt:
        raise misused("--chat without a question", 'shardwise generate RUN --chat "What is ...?"')
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = _load(options.path, device, options.best)
    length = options.tokens or (256 if options.chat else 64)
    sampling = Sampling(length, options.temperature, options.seed, tokenizer.eot_id)
    if options.chat:
        text = answer([model], tokenizer, ask(tokenizer.directory, prompt), sampling, device)
    else:
        text = continue_text([model], tokenizer, prompt, sampling, device)
    if options.json:
        print_json({"prompt": prompt, "text": text})
    else:
        say(text if options.chat else prompt + text)


def _load(path: Path, device: torch.device, best: bool) -> tuple[Model, Tokenizer]:
    """The exported model of a run, or any model directory. If the run has a checkpoint newer than its export, the
    newest checkpoint; with ``best`` the best one."""
    from shardwise.runtime.export import load_run

    model = path / "hf" if (path / "hf" / "config.json").is_file() else path
    if is_own(path) and (best or model == path):
        fix = f"`shardwise export {path}{' --best' * best}`, then generate" + " without --best" * best
        raise MissingInputError(Problem("CKPT001", "the model of an own loop is read from its hf/", str(path), fix))
    last, config = newest(path / "checkpoints"), model / "config.json"
    stale = last is not None and config.is_file() and last.stat().st_mtime > config.stat().st_mtime
    if config.is_file() and not best and not stale:
        return _read(model).to(device), open_directory(model)
    recipe = load_recipe(recipe_file(path))
    loaded = load_run(locate_best(path) if best else path, recipe, resolve(recipe))
    return loaded.to(device), open_directory(path / "tokenizer")


def _read(directory: Path) -> Model:
    """The model in a directory, whole, in this process."""
    import torch

    from shardwise.models.hf_model import model_of
    from shardwise.runtime.build import allocate, fill

    spec = load_spec(str(directory))
    with torch.device("meta"):
        model = model_of(spec)
    allocate([model], spec, torch.device("cpu"))
    fill([model], spec, Recipe.model_validate({"model": {"path": str(directory)}}), Plan())
    return model
