"""The pictures of the README: what `shardwise plan` and `shardwise train` print on a terminal, as SVG.

python bench/pictures.py [plan] [train]     # runs both (the quickstart takes minutes) and writes docs/pictures/

tests/bench/test_pictures.py compares them with what is printed today.
"""

from __future__ import annotations

import os
import pty
import re
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parents[1] / "docs" / "pictures"
COLUMNS = 160
PLAN = "shardwise plan --model meta-llama/Llama-3.1-70B --cluster 2x8xH100+400Gb/node --lora 16 --seq-len 8192"
TRAIN = "shardwise train"


def screen(command: str) -> list[str]:
    """The lines that ``command`` prints on a terminal. A line that is drawn again and again is there once."""
    printed = bytearray()

    def read(descriptor: int) -> bytes:
        found = os.read(descriptor, 65536)
        printed.extend(found)
        return found

    words = [sys.executable, "-m", *command.split()]
    os.environ["COLUMNS"] = str(COLUMNS)
    if pty.spawn(words, read):
        raise SystemExit(f"`{command}` failed")
    return lasting(printed.decode().replace("\r\n", "\n").split("\n"))


def lasting(lines: list[str]) -> list[str]:
    """What stays of lines that were drawn again and again: of each bar its last state, and what was wiped away is not
    there."""
    kept: list[str] = []
    for line in lines:
        if (line := line.rpartition("\r\x1b[K")[2]) == "" and kept and kept[-1] == "":
            continue  # nothing but what was wiped
        states = {state.split()[0]: state for state in re.sub(r"\x1b\[\d*[AK]", "", line).split("\r") if state.strip()}
        kept += states.values() or [""]
    return [line for number, line in enumerate(kept) if not number or line != kept[number - 1] or not line]


def draw(name: str, command: str, lines: list[str]) -> None:
    """Write docs/pictures/``name``.svg."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ {command}"))
        for line in lines:
            console.print(Text.from_ansi(line))
        console.save_svg(str(TARGET / f"{name}.svg"), title="shardwise")


def text_of(picture: Path) -> str:
    """The lines of a picture, as text."""
    lines: dict[int, list[tuple[float, str]]] = {}
    for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        if found := re.search(r"-line-(\d+)\)$", element.get("clip-path", "")):
            lines.setdefault(int(found[1]), []).append((float(element.get("x", "0")), element.text or ""))
    return "\n".join("".join(text for _, text in sorted(lines[number])).rstrip() for number in sorted(lines))


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    commands = {"plan": PLAN, "train": TRAIN}
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for name in sys.argv[1:] or commands:
            draw(name, commands[name], screen(commands[name]))


if __name__ == "__main__":
    main()
