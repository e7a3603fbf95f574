"""``shardwise data preview``: what the model will see and what it is trained on, before a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from shardwise.cli.options import Common, DataWords, recipe_or_quickstart, sort_words
from shardwise.cli.show import coloured, note, print_json, say, visible
from shardwise.data import tokens
from shardwise.data.source import taken_and_left_out
from shardwise.models.resolve import data_of
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import counted

if TYPE_CHECKING:
    from shardwise.data.store import Prepared, TokenStore

_BARS = 8
_BAR_WIDTH = 32
LEFT_OUT = {
    "divided": "extra samples: the template renders earlier messages differently once others follow",
    "truncated": "samples cut off at train.seq_len",
    "cut_tokens": "tokens lost by that",
    "cut_answers": "answers that lost their end, so that the model learns to stop in the middle or not at all",
    "dropped": "samples left out: longer than train.seq_len, or with nothing to train on before it",
    "bad": "bad records left out (data.on_bad_sample: skip)",
    "disarmed": "strings of special tokens in the data, encoded as plain text",
}
BAD = {
    "DATA004": "not valid JSON",
    "DATA005": "with missing or wrong fields",
    "DATA006": "not UTF-8",
    "DATA007": "too long or too deeply nested to be read",
    "DATA009": "with ids that the tokenizer does not have",
    "DATA015": "longer than train.seq_len",
    "CHAT002": "with nothing to train on, or refused by the chat template",
    "CHAT003": "whose answer the chat template does not mark",
}
"""Kinds of bad records, by code."""


@dataclass
class Options(Common):
    """Show samples with the supervised tokens highlighted, their share, lengths, and how full the windows are."""

    words: DataWords = field(default_factory=list)
    samples: Annotated[int, Option("-n", "--samples", help="How many samples to show.", min=0)] = 3
    split: Annotated[Literal["train", "validation"], Option("--split", help="Which samples to show.")] = "train"


def run(options: Options) -> None:
    """Prepare the data if needed, and show samples."""
    from shardwise.data.epochs import check_held_out
    from shardwise.data.prepare import prepare

    words = sort_words(options.words)
    recipe = load_recipe(recipe_or_quickstart(words.path, words.overrides), words.overrides)
    prepared = prepare(data_of(recipe), sample_tokens=recipe.sample_tokens)
    store = prepared.validation if options.split == "validation" else prepared.train
    if unheld := check_held_out(recipe, prepared):
        note(unheld, as_json=options.json)
    if store is None:
        say("nothing is held out")
        return
    facts = measure(prepared, store, recipe)
    tokenizer = tokens.open_directory(prepared.tokenizer_directory)
    wanted = options.samples * (2 if store.split.pairs else 1)
    masked = recipe.data.mask_documents
    shown = [runs(store, tokenizer, index, masked) for index in range(min(wanted, store.split.documents))]
    if options.json:
        named = [[{"text": text, "supervised": learnt} for text, learnt in sample] for sample in shown]
        print_json({**facts, "samples": named})
        return
    for index, sample in enumerate(shown):
        name = f"pair {index // 2}, {('chosen', 'rejected')[index % 2]}" if store.split.pairs else f"sample {index}"
        say(f"{name}, {int(store.lengths()[index]):,} tokens")
        say("".join(mark(visible(text)) if learnt else visible(text) for text, learnt in sample) + "\n")
    files = taken_and_left_out(recipe.data.path, recipe.sample_tokens is not None)
    say("\n".join([*(f"{'files':<11} {line}" for line in files), *table(facts)]))


def mark(text: str) -> str:
    """Mark supervised text: green on a terminal, in « » elsewhere."""
    return coloured(text, "green") if sys.stdout.isatty() else f"«{text}»"


def runs(store: TokenStore, tokenizer: tokens.Tokenizer, index: int, masked: bool) -> list[tuple[str, bool]]:
    """The text of one sample (of a long document its first 400 tokens), cut where supervised text begins and ends.
    ``masked``: it does not see the document before it, from which its first token would be predicted."""
    begin, end, _ = store.sample(index)
    packed = store.split.packs is not None
    ids = store.read(begin, end if packed else min(end, begin + 400))
    learnt = store.read_mask(begin, end).tolist() if packed else [int(begin > 0 and not masked)] + [1] * (len(ids) - 1)
    found = []
    for supervised, group in groupby(zip(ids.tolist(), learnt, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.backend.decode([id_ for id_, _ in group], skip_special_tokens=False)
        found.append((text, bool(supervised)))
    return found


def measure(prepared: Prepared, store: TokenStore, recipe: Recipe) -> dict[str, Any]:
    """The figures: tokens, share supervised, lengths, and how full the windows are."""
    import numpy as np

    from shardwise.data.pack import open_windows

    lengths = store.lengths()
    windows = len(open_windows(store, recipe.train.seq_len, recipe.data.mask_documents))
    packed = store.split.packs is not None
    first = len(lengths) if recipe.data.mask_documents else 1  # what stands there is never predicted
    supervised = store.split.supervised_tokens if packed else max(store.split.tokens - first, 0)
    counts, edges = np.histogram(lengths, bins=_BARS, range=(0, int(lengths.max(initial=1))))
    return {
        "samples_in_all": len(lengths),
        "pairs": len(lengths) // 2 if store.split.pairs else None,
        "tokens": store.split.tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / max(store.split.tokens, 1),
        "lengths": {"least": int(lengths.min()), "median": float(np.median(lengths)), "most": int(lengths.max())},
        "histogram": [[round(float(edge)), int(count)] for edge, count in zip(edges[1:], counts, strict=True)],
        "windows": windows,
        "filled": store.split.tokens / (windows * recipe.train.seq_len) if windows else 0.0,
        "held_out": 0 if prepared.validation is None else prepared.validation.split.records,
        "counts": prepared.manifest.counts,
    }


def table(facts: dict[str, Any]) -> list[str]:
    """The figures as lines."""
    lengths, most = facts["lengths"], max((count for _, count in facts["histogram"]), default=1)
    in_pairs = "" if facts["pairs"] is None else f" answers in {facts['pairs']:,} pairs"
    lines = [
        f"samples     {facts['samples_in_all']:,}{in_pairs}, {facts['tokens']:,} tokens",
        f"supervised  {facts['supervised_tokens']:,} tokens, {facts['supervised_share']:.1%}",
        f"windows     {facts['windows']:,}, {facts['filled']:.1%} filled",
        f"lengths     {lengths['least']:,} to {lengths['most']:,} tokens, median {lengths['median']:,.0f}",
    ]
    lines += [f"held out    {counted(facts['held_out'], 'record')}, for validation"] * bool(facts["held_out"])
    for edge, count in facts["histogram"]:
        lines.append(f"  <= {edge:>8,} {count:>9,} {'#' * round(_BAR_WIDTH * count / max(most, 1))}")
    return lines + report(facts["counts"])


def report(counts: dict[str, int]) -> list[str]:
    """Return what happened to records in preparation, a line each, and a warning about samples that are in both
    splits."""
    lines = [f"{name:<11} {counts[name]:,} {words}" for name, words in LEFT_OUT.items() if counts.get(name)]
    lines += [f"{'':<11} {counts[code]:,} {words} ({code})" for code, words in BAD.items() if counts.get(code)]
    if counts.get("in_both"):
        lines.append(f"warning[DATA011]: {counts['in_both']:,} samples are in both train and validation")
    return lines
