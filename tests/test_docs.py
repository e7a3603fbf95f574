"""What the pages tell a reader to type does what they say.

Every indented block of Python and every command line of README.md and docs/ is found here. `make test` checks that
blocks use names that exist, and that commands are understood: their options, their recipe's keys and their machines.
`make prove` runs the blocks and the commands that need no Hub, no GPU and no minutes.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.core import TyperGroup

from shardwise.cli import app
from shardwise.cli.options import recipe_or_quickstart, sort_words
from shardwise.interop.imports import foreign
from shardwise.spec.cluster_file import machines
from shardwise.spec.load import load_recipe
from shardwise.spec.shipped import recipes_directory
from tests.interop.test_imports import ACCELERATE, AXOLOTL, TRL
from tests.interop.test_scripts import MEGATRON

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(page for page in sorted(ROOT.glob("docs/**/*.md")) if page.parent.name != "decisions")]
PAGES.remove(ROOT / "docs" / "log.md")  # measurements of the past, with the commands of then
FILES = ("recipe.yaml", "mine.yaml", "runs/x/recipe.yaml", "RECIPE")
"""Recipes that pages speak of as the reader's own: here the quickstart's."""

SPLIT = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}'
THEIRS = {
    "axolotl.yaml": AXOLOTL,
    "train.sh": MEGATRON,
    "trl.yaml": TRL,
    "accelerate.yaml": ACCELERATE,
    "train.yaml": TRL,
    "zero3.json": SPLIT,
}
"""Files of other systems that pages speak of."""


class Text(NamedTuple):
    """A block or a command, and where it stands."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Text]:
    """Every indented block, with its first line's number."""
    found = []
    for page in PAGES:
        lines, block = [*page.read_text(encoding="utf-8").splitlines(), "end"], list[str]()
        for number, line in enumerate(lines, 1):
            if line.startswith("    ") or (block and not line.strip()):
                block.append(line)
            elif block:
                text = textwrap.dedent("\n".join(block)).strip()
                found.append(Text(str(page.relative_to(ROOT)), number - len(block), text))
                block = []
    return found


PYTHON = [block for block in blocks() if re.search(r"^(import|from) \w", block.text, re.MULTILINE)]
RUNNABLE = [block for block in PYTHON if "meta-llama/" not in block.text]
"""Those that fetch no weights."""


def commands() -> list[Text]:
    """Every line of a block, or text between backticks, that is a command; several joined by && are several."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            told = [line] if re.match(r" {4,}(shardwise|torchrun|pip|make|python) ", line) else []
            told += re.findall(r"`((?:shardwise (?:data )?[^`\s]+|python) [^`]*)`", line)  # more than a command's name
            for each in told:
                words = re.sub(r"(\s+#|\s{3,}\w|\s+> ).*", "", each.strip())  # what is said of it, and where it goes
                found += [Text(name, number, part.strip()) for part in words.split("&&")]
    return [one for one in found if "..." not in one.text]


OURS = [
    one._replace(text=m[1]) for one in commands() if (m := re.match(r"(?:torchrun .* -m )?shardwise (.*)", one.text))
]
OTHERS = [one for one in commands() if "shardwise " not in one.text]
NEEDS = r"cluster\.yaml|Qwen/|long-8b|8b-long|mixtral|RUN/profile"
"""What a reader has and this directory has not (machines, a profiled run), the Hub's, and plans of which each takes
some ten seconds."""
QUICK = {
    one.text: one
    for one in OURS
    if re.match(r"plan |plan$|launch |schema|.*--(dry-run|print-config)", one.text) and not re.search(NEEDS, one.text)
}
"""Commands that print and are done, by their text: pages repeat one another."""


def test_the_pages_have_blocks_and_commands() -> None:
    """So that a change of their form does not leave the other tests without a case."""
    assert len(RUNNABLE) >= 3 and len(PYTHON) >= 5 and len(OURS) > 70 and len(OTHERS) > 10


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_block_uses_names_that_exist(block: Text) -> None:
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--isolated", "--select", "F821,F822,E9", "-"]
    checked = subprocess.run(ruff, input=block.text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "shardwise":
            assert hasattr(import_module("shardwise"), node.attr), ast.unparse(node)


@pytest.mark.prove
@pytest.mark.rare(1)
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_a_block_runs_as_printed(block: Text, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block.text)
    ran = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that pages speak of."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((recipes_directory() / "quickstart.yaml").read_text())
    for name, text in THEIRS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def understood(words: str) -> tuple[str, dict[str, Any]]:
    """The command and its options. It is not run."""
    rest, command = shlex.split(words), typer.main.get_command(app.app)
    names = []
    while isinstance(command, TyperGroup) and rest:
        names.append(rest.pop(0))
        command = command.get_command(typer.Context(command), names[-1])
        assert command is not None, f"there is no command {' '.join(names)}"
    return " ".join(names), {} if isinstance(command, TyperGroup) else command.make_context(names[-1], rest).params


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_command_is_understood(command: Text, place: Path) -> None:
    """Its options, the keys and values of its recipe, its machines."""
    name, options = understood(command.text)
    if name not in ("generate", "schema", "export", "runs", "board", "compare"):
        words = sort_words(options.get("arguments", options.get("words", [])), several="system" in options)
        if words.more or str(words.path) in THEIRS:
            assert all(foreign(path) for path in words.files if path.exists())
            return
        if name == "train" and options["resume"]:
            words.path = place / "runs/x"
        path = recipe_or_quickstart(
            words.path and Path(str(words.path).replace("RECIPE", "recipe.yaml")), words.overrides
        )
        load_recipe(path, words.overrides)
    if options.get("cluster") not in (None, "cluster.yaml"):
        machines(options["cluster"])


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_what_else_is_typed_is_there(command: Text) -> None:
    """A target of the Makefile, a script or module of this repository, an extra of the package."""
    program, *words = shlex.split(command.text)
    if program == "make":
        assert all(re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert all(extra in extras for extra in re.findall(r"(?:shardwise|\.)\[(.*?)\]", command.text))
    elif words[0] == "-m":
        assert all(find_spec(module) for module in words[1:2])
    elif "/" in words[0]:
        assert (ROOT / words[0]).is_file()


@pytest.mark.prove
@pytest.mark.rare(1)
@pytest.mark.parametrize("command", QUICK.values(), ids=str)
def test_a_command_does_what_its_page_says(command: Text, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # What is submitted is only printed here: there is no scheduler.
    words = [word for word in shlex.split(command.text) if not re.match("--(submit|with)", word)]
    assert app.main(words) == 0, capsys.readouterr().err
