"""What the bounds on chat templates cost: conversations a second with them and without, in turns.

    python bench/templates.py

Templates of five lines, three turns by the user and three by the assistant, which is some ten renderings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

from shardwise.data import template, tokens
from shardwise.data.conversations import Chat, Encoder
from shardwise.data.formats import Conversation
from shardwise.data.limits import bounded

ROUNDS, EACH = 40, 40
TURNS = [("user", "How do I do this? " * 10), ("assistant", "Like that, and so on. " * 20)] * 3


def main() -> None:
    """Print the best round of each."""
    talk = Conversation(
        [{"role": role, "content": text} for role, text in TURNS], [role != "user" for role, _ in TURNS]
    )
    with tempfile.TemporaryDirectory() as scratch:
        tokens.train_tokenizer(["say it again " * 50], 300, Path(scratch))
        encoder = Encoder(Path(scratch))
    for name, text in template.SHIPPED.items():
        chat = Chat(template.Template(text, {"eos_token": tokens.EOT}), encoder, end_of_turn=True)
        best = {"with": float("inf"), "without": float("inf")}
        for _ in range(ROUNDS):
            best["with"] = min(best["with"], seconds(chat, talk, bounded))
            with mock.patch.object(template, "timed", nullcontext):
                best["without"] = min(best["without"], seconds(chat, talk, nullcontext))
        ratio = best["with"] / best["without"]
        print(f"{name}: {1 / best['with']:,.0f} conversations a second, {ratio:.2f} of the time without bounds")


def seconds(chat: Chat, talk: Conversation, around: Callable[[], AbstractContextManager[None]]) -> float:
    """Per conversation."""
    begun = time.perf_counter()
    for _ in range(EACH):
        with around():
            chat.render(talk)
    return (time.perf_counter() - begun) / EACH


if __name__ == "__main__":
    main()
