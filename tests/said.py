"""What an error or a page says, without its wording: codes, fields and values.

``raises(..., match=refusal("DATA005", "a.jsonl:2", where="data.paths"))`` is an error with this code, which names these
values, in this order, and this place. ``refuses`` asks the same of a text, such as what a command writes on stderr, and
``shows`` of a page, or of an error without a code, whether one line of it has these values. A value is whole:
``shows("step 12", 2)`` is false.
"""

from __future__ import annotations

import re

SAME = r"(?:(?!\n\n|(?:error|warning)\[)[\s\S])*?"
"""What stands between two parts of one problem."""


def refusal(code: str, *values: object, where: str = "", fix: str = "", as_warning: bool = False) -> str:
    """Return the pattern of an error: ``values`` are what is wrong, ``where`` and ``fix`` stand in its other lines."""
    pattern = rf"{'warning' if as_warning else 'error'}\[{code}\]: " + "".join(rf".*?{whole(each)}" for each in values)
    for label, value in (("where", where), ("fix", fix)):
        if value:
            pattern += rf"{SAME}\n{label}: .*?{whole(value)}"
    return pattern


def refuses(text: object, code: str, *values: object, where: str = "", fix: str = "", as_warning: bool = False) -> bool:
    """Whether a text, or an error or a problem by its text, has this :func:`refusal` in it."""
    return re.search(refusal(code, *values, where=where, fix=fix, as_warning=as_warning), str(text)) is not None


def shows(text: object, *values: object) -> bool:
    """Whether these values stand, whole and in this order, in one line of a text."""
    return re.search(".*?".join(map(whole, values)), str(text)) is not None


def whole(value: object) -> str:
    """Return the pattern of a value with no letter, digit or point of a longer one beside it."""
    text = str(value)
    before = r"(?<![\w.,])" if text[:1].isalnum() else ""
    after = r"(?!\w|[.,]\d)" if text[-1:].isalnum() else ""
    return before + re.escape(text) + after
