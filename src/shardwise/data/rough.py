"""The size of data that are not prepared yet: records are counted, and tokens told by bytes. Writes and fetches
nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardwise.data import remote, source
from shardwise.data.read import counted
from shardwise.data.source import Source
from shardwise.errors import ShardwiseError
from shardwise.spec.recipe import Recipe

TOKEN_BYTES = 4
"""So many bytes of text are a token, about."""
SAMPLE_BYTES = 64 * 2**20
"""Of a larger file the records in its first bytes are counted."""


@dataclass(frozen=True)
class Rough:
    """About how many ``records`` (or documents) are trained on, and how many ``windows`` they fill."""

    records: int
    windows: int


def roughly(recipe: Recipe) -> Rough | None:
    """Count what the recipe trains on; None where it names no data, or that cannot be told without reading tables,
    fetching or decoding."""
    data, samples = recipe.data, recipe.sample_tokens is not None
    names = [data.path] if isinstance(data.path, str) else data.path
    if (
        "path" not in data.model_fields_set
        or data.streaming
        or data.mixture_weights
        or any(map(remote.is_remote, names))
    ):
        return None
    with suppress(ShardwiseError, OSError):  # `train` says what is wrong with the data
        found = source.find(names, samples)
        if any(one.kind not in ("text", "jsonl") for one in found):
            return None
        share = 1 - data.validation_share * (data.validation_path is None)
        records = max(round(share * sum(map(_records, found))), 1)
        tokens = share * sum(one.stop for one in found) / TOKEN_BYTES
        windows = records if samples and not data.packing else max(round(tokens / recipe.train.seq_len), 1)
        return Rough(records, windows)
    return None


def _records(found: Source) -> int:
    """The records of a file, of a large one by its first ones."""
    if found.kind == "text":
        return 1
    records = sum(1 for _ in counted(found, SAMPLE_BYTES))
    return records if found.stop <= SAMPLE_BYTES else round(records * found.stop / SAMPLE_BYTES)
