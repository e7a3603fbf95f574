"""``shardwise generate``: continue a text with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from shardwise.cli.options import recipe_file
from shardwise.cli.show import print_json, say
from shardwise.data.tokens import Tokenizer, open_directory
from shardwise.models.config import load_spec
from shardwise.models.resolve import data_of, resolve
from shardwise.spec.load import load_recipe
from shardwise.techniques.numbers import torch_type

if TYPE_CHECKING:
    import torch

    from shardwise.models.decoder import Decoder


@dataclass
class Options:
    """Continue a text with a run's model, or with any model directory that transformers can read."""

    path: Annotated[Path, Argument(help="A run's directory (its hf/ is used), or a model's.")]
    prompt: Annotated[str, Option("--prompt", help="The text to continue.")] = ""
    tokens: Annotated[int, Option("--tokens", min=1, help="How many tokens to add at most.")] = 64
    temperature: Annotated[float, Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.0
    seed: Annotated[int, Option("--seed", min=0)] = 0
    json: Annotated[bool, Option("--json", help="One JSON object.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False


def run(options: Options) -> None:
    """Print the continuation."""
    import torch

    from shardwise.runtime.generate import Sampling, continue_text

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = _load(options.path, device)
    sampling = Sampling(options.tokens, options.temperature, options.seed, tokenizer.eot_id)
    text = continue_text([model], tokenizer, options.prompt, sampling, device)
    if options.json:
        print_json({"prompt": options.prompt, "text": text})
    else:
        say(options.prompt + text)


def _load(path: Path, device: torch.device) -> tuple[Decoder, Tokenizer]:
    """The exported model of a run or a directory; of an unfinished run its newest checkpoint."""
    from shardwise.data.prepare import prepare
    from shardwise.runtime.export import load_checkpoint

    model = path / "hf" if (path / "hf" / "config.json").is_file() else path
    if (model / "config.json").is_file():
        return _read(model).to(device), open_directory(model)
    recipe = load_recipe(recipe_file(path))
    tokenizer = open_directory(prepare(data_of(recipe)).tokenizer_directory)
    return load_checkpoint(path, resolve(recipe), torch_type(recipe.precision.weights)).to(device), tokenizer


def _read(directory: Path) -> Decoder:
    """A model directory, whole, in this process."""
    import torch

    from shardwise.models.decoder import Decoder
    from shardwise.models.hf import read_weights

    spec = load_spec(str(directory))
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device="cpu")
    if spec.tie_word_embeddings:
        model.head.weight = model.embed.weight
    parameters = dict(model.named_parameters())
    wanted = {name: tuple(slice(0, size) for size in parameter.shape) for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, value in read_weights(directory, wanted, spec):
            parameters[name].copy_(value)
    return model
