"""What a model writes next, against transformers."""

from __future__ import annotations

import pytest
import torch

from shardwise.runtime import generate as generating
from shardwise.runtime.generate import Sampling, generate, last_logits
from tests.models.families import pair
from tests.models.llama import relative, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_the_next_token_is_that_of_transformers(family: str) -> None:
    """Of models whose logits are capped, or divided: that changes what a temperature means."""
    ours, theirs = pair(family)
    ids, _ = tokens(ours.spec.vocab_size, rows=1, length=20)
    reference = theirs(ids, use_cache=False).logits[0, -1].detach()
    assert relative(last_logits([ours], ids[0].tolist(), CPU), reference) < 2e-5
    assert generate([ours], ids[0].tolist(), Sampling(max_new_tokens=1), CPU) == [int(reference.argmax())]


def test_a_text_is_filled_up_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """To few lengths, each of which kernels are compiled for, and the model sees nothing of it."""
    ours, _ = pair("gemma2")
    ids = tokens(ours.spec.vocab_size, rows=1, length=45)[0][0].tolist()
    seen: list[int] = []
    ours.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    found = [last_logits([ours], ids[:length], CPU) for length in (1, 31, 32, 33, 45)]
    assert seen == [32, 32, 32, 64, 64]
    monkeypatch.setattr(generating, "LENGTHS", 1)
    for length, logits in zip((1, 31, 32, 33, 45), found, strict=True):
        assert relative(logits, last_logits([ours], ids[:length], CPU)) < 1e-5
