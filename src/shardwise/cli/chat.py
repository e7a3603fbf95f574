"""``shardwise chat``: a conversation with a trained model, turn by turn."""

from __future__ import annotations

import readline  # noqa: F401  # lines can be edited, and earlier ones called back
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from shardwise.cli.inference import Writer, Writing
from shardwise.cli.options import misused
from shardwise.cli.show import note, print_error, print_json, say, visible, working
from shardwise.data.formats import Conversation
from shardwise.errors import DataError, Problem, ShardwiseError
from shardwise.spec import document

if TYPE_CHECKING:
    from shardwise.data.conversations import Chat

COMMANDS = "/prompt shows what the model read, /tool TEXT gives the result of a tool, /reset begins anew, /exit ends"


@dataclass
class Options(Writing):
    """Talk with a run's model, any model directory, or an adapter. Each line is a turn of yours.

    /prompt shows the text that the model read last, as the chat template writes it; /tool TEXT gives the result of a
    tool that it called; /reset begins anew; /exit or Ctrl-D ends.
    """

    path: Annotated[Path, Argument(help="A run's directory, a model's, or an adapter's.")]
    system: Annotated[str, Option("--system", help="A system prompt.")] = ""
    tools: Annotated[Path | None, Option("--tools", help="A JSON file: the list of tools that it may call.")] = None


@dataclass
class Talk:
    """The turns so far. ``prompt`` is what the model read last."""

    writer: Writer
    chat: Chat
    tools: list[Any] | None
    turns: list[dict[str, Any]] = field(default_factory=list)
    prompt: str = ""

    def say(self, turn: dict[str, Any], *, streamed: bool) -> str:
        """Add a turn and its answer, which is printed as it is written where it is ``streamed``. Raises DataError for a
        turn that the template refuses, and CHAT004 where the model has no room for an answer."""
        from shardwise.runtime.generate import ask_turns

        asked, shown = ask_turns(self.chat, Conversation([*self.turns, turn], None, self.tools), "the conversation"), 0
        if len(asked.ids) >= (most := self.writer.model.spec.max_position_embeddings):
            what = f"the conversation has {len(asked.ids):,} tokens, and the model reads {most:,}"
            raise DataError(Problem("CHAT004", what, "the conversation", "/reset, or shorter turns"))
        self.prompt = self.writer.tokenizer.backend.decode(asked.ids, skip_special_tokens=False)

        def tell(row: int, text: str) -> None:
            nonlocal shown
            if streamed and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character
                print(visible(text.lstrip()[shown:].expandtabs(4)), end="", flush=True)
                shown = len(text.lstrip())

        seed = self.writer.sampling.seed + len(self.turns)
        text = replace(self.writer, sampling=replace(self.writer.sampling, seed=seed)).write([asked], tell)[0].strip()
        self.turns = [*self.turns, turn, {"role": "assistant", "content": text}]
        return text


def run(options: Options) -> None:
    """Answer each line of the input."""
    by_hand = sys.stdin.isatty()
    with working(f"reading {options.path}"):
        talk = _begin(options)
    first, streamed = talk.turns, sys.stdout.isatty() and not options.json
    note(COMMANDS, as_json=options.json)
    with suppress(EOFError):
        while (line := input("> " if by_hand and not options.json else "")) != "/exit":
            word, _, rest = line.partition(" ")
            if word == "/reset":
                talk.turns = first
            elif word == "/prompt":
                say(visible(talk.prompt))
            elif line.strip():
                turn = {"role": "tool", "content": rest} if word == "/tool" else {"role": "user", "content": line}
                try:
                    text = talk.say(turn, streamed=streamed)
                    say(*[] if options.json else [text[:0] if streamed else text])
                except ShardwiseError as error:
                    if not by_hand:
                        raise
                    print_error(error, as_json=options.json)
    if options.json:
        print_json({"messages": talk.turns})


def _begin(options: Options) -> Talk:
    """A conversation with the model. Raises DataError (CHAT001) without a chat template."""
    from shardwise.runtime.generate import chat_of

    tools = None if options.tools is None else document.read(options.tools).data
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        what = f"{options.tools} holds no list of tools"
        raise misused(what, '[{"type": "function", "function": {...}}]', "--tools")
    writer = options.writer(options.path, answers=True)
    turns = [{"role": "system", "content": options.system}] * bool(options.system)
    return Talk(writer, chat_of(writer.tokenizer.directory), tools, turns)
