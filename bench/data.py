"""What preparing text and reading batches cost, against the tokenizer alone.

    python bench/data.py [--pairs 7] [--mib 48]

The text is Python's own sources, cut into as many MiB as asked, as files and as conversations of one question and one
answer. ``tokenizers`` encodes the same strings with ``encode_batch`` and its own threads on all cores (``alone``);
``prepare`` reads, encodes and writes windows to the disk with as many processes. Both in turn, the cache thrown away
each time; the tokenizer is there before either begins. ``ratio`` is prepare's rate over the tokenizer's (1: reading,
masks, packing and writing cost nothing). ``a batch`` is what the training loop waits for the next two windows of 256
tokens, beside the 0.2 s that the quickstart's step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.data.order import Order
from shardwise.data.pack import open_windows
from shardwise.data.prepare import prepare
from shardwise.data.stream import Share, stream
from shardwise.spec.host import cores
from shardwise.spec.recipe import Data, TokenizerSection

STEP_S = 0.2


def texts(mib: int) -> list[str]:
    """Whole sources, again and again, until there is enough."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    found: list[str] = []
    size = 0
    while size < mib * 2**20:
        source = sources[len(found) % len(sources)]
        found.append(source)
        size += len(source.encode())
    return found


def write(directory: Path, sources: list[str]) -> tuple[Path, Path]:
    """The sources as text files, and as conversations whose answers are their pieces of 2,000 characters."""
    plain, chats = directory / "text", directory / "chats.jsonl"
    plain.mkdir()
    for number, source in enumerate(sources):
        (plain / f"{number:05}.txt").write_text(source, encoding="utf-8")
    with chats.open("w", encoding="utf-8") as file:
        for piece in pieces(sources):
            turns = [{"role": "user", "content": "Write some code."}, {"role": "assistant", "content": piece}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return plain, chats


def pieces(sources: list[str]) -> list[str]:
    return [source[at : at + 2000] for source in sources for at in range(0, len(source), 2000)]


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--mib", type=int, default=48)
    chosen = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as where:
        directory = Path(where)
        sources = texts(chosen.mib)
        plain, chats = write(directory, sources)
        made = prepare(
            Data(path=str(plain), cache=str(directory / "first"), tokenizer=TokenizerSection(vocab_size=4096))
        )
        from tokenizers import Tokenizer as Bare

        bare = Bare.from_file(str(made.tokenizer_directory / "tokenizer.json"))
        size = sum(len(source.encode()) for source in sources)
        print(f"{size / 2**20:.0f} MiB of text, {cores()} cores, {chosen.pairs} pairs")
        for name, path, strings in (("text", plain, sources), ("conversations", chats, pieces(sources))):
            ratios, rates = [], []
            for number in range(chosen.pairs):
                cache = directory / f"{name}-{number}"
                data = Data(
                    path=str(path),
                    cache=str(cache),
                    tokenizer=TokenizerSection(path=str(made.tokenizer_directory)),
                    num_proc=cores(),
                    chat_template=TEMPLATE if name == "conversations" else None,
                )
                tokens = 2048 if name == "conversations" else None
                ours = seconds(lambda data=data, tokens=tokens: prepare(data, sample_tokens=tokens))
                alone = seconds(lambda strings=strings: bare.encode_batch(strings, add_special_tokens=False))
                ratios.append(alone / ours)
                rates.append(size / ours / 1e6)
            low, middle, high = statistics.quantiles(ratios, n=4)
            rate = statistics.median(rates)
            print(f"{name:<14} ratio {middle:.2f}, quartiles {low:.2f} to {high:.2f}; {rate:.1f} MB/s")
        windows = open_windows(made.train, 256, True)
        batches = stream(windows, Order(len(windows), 0), Share(0, 2, 2))
        waits = []
        for _ in range(300):
            time.sleep(STEP_S / 10)  # in place of a step, a tenth as long
            waits.append(seconds(lambda: next(batches)))
        mean, worst = statistics.mean(waits), sorted(waits)[-3]
        share = mean / STEP_S
        print(f"a batch        {mean * 1e3:.2f} ms ({share:.2%} of a step), the slowest hundredth {worst * 1e3:.2f} ms")


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"

if __name__ == "__main__":
    main()
