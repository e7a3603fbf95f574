"""Every code that an error may bear is explained in docs/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CODE = re.compile(r"[A-Z]{2,5}\d{3}")


def told_codes() -> set[str]:
    """The codes that the tables of docs/ explain."""
    told: set[str] = set()
    for page in ("errors", "checkpoints", "data"):
        for line in (ROOT / f"docs/{page}.md").read_text().splitlines():
            cells = line.split("|")
            if len(cells) > 2 and _CODE.search(cells[1]):
                prefix = ""
                for word in re.findall(r"[A-Z]{2,5}\d{3}|\d{3}", cells[1]):
                    prefix = word[:-3] or prefix
                    told.add(prefix + word[-3:])
    return told


def test_every_code_of_the_source_stands_in_the_docs_and_the_other_way_round() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    raised = set(re.findall(r'"([A-Z]{2,5}\d{3})"', source)) | set(re.findall(r"\[([A-Z]{2,5}\d{3})\]", source))
    told = told_codes()
    assert raised - told == set(), "raised, and on no page of docs/"
    assert told - raised == set(), "in docs/, and never raised"
