"""The model card of an export: on what it was trained, how, and how well; and its way to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.data.remote import shown
from shardwise.errors import Problem, UnavailableError, first_line
from shardwise.runtime.report.run_files import History, read_history
from shardwise.spec.emit import emit

SHOWN = ("method.name", "train.seq_len", "train.global_batch_size", "optim.name", "optim.learning_rate", "lora.rank")
"""Settings of which the card tells, where they have a value."""


def write_card(run: Path, model: Path) -> None:
    """Write ``README.md`` beside an export, with the front matter that the Hub reads, unless somebody wrote one."""
    if not (card := model / "README.md").exists():
        card.write_text(card_of(read_history(run)), encoding="utf-8")


def card_of(history: History) -> str:
    """A run's model card."""
    recipe = history.recipe
    model_path = recipe.get("model.path")
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["shardwise", str(recipe["method.name"])]}
    front |= {"base_model": model_path} if model_path and not Path(str(model_path)).exists() else {}
    paths = recipe["data.path"] if isinstance(recipe["data.path"], list) else [recipe["data.path"]]
    losses, validation = sorted(history.losses.items()), history.validation
    lines = [f"- {key}: {recipe[key]}" for key in SHOWN if recipe.get(key) is not None]
    lines += [f"- data: {', '.join(shown(str(path)) for path in paths)}"]
    ends = [losses[0], losses[-1]] if losses else []
    lines += [f"- loss of step {step:,}: {loss:.4f}" for step, loss in ends]
    lines += [f"- validation ({history.measure.replace('_', ' ')}): {validation[-1][1]:.4f}"] if validation else []
    measured = [f"| {name} | {value} |" for name, value in history.report.items()]
    table = ["", "| measured | |", "|---|---|", *measured] if measured else []
    head = f"# {history.directory.resolve().name}\n\nTrained with [Shardwise](https://pypi.org/project/shardwise)"
    of = f" from {model_path}" if model_path else ""
    return f"---\n{emit(front, lambda path, value: '')}---\n\n{head}{of}.\n\n" + "\n".join([*lines, *table]) + "\n"


def push(model: Path, repository: str) -> str:
    """Upload a model directory to the Hub, into a repository that is made if it is not there, with the login that
    huggingface_hub keeps; its address. Raises UnavailableError (MOD003)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=model, commit_message="Export of a run")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        what, fix = f"{repository} cannot be pushed: {first_line(error)}", "`hf auth login`, and ORG/NAME of your own"
        raise UnavailableError(Problem("MOD003", what, "--push", fix)) from error
    return str(address)
