"""What a model writes next, against transformers."""

from __future__ import annotations

import pytest
import torch

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
    assert relative(last_logits(ours, ids[0].tolist(), CPU), reference) < 2e-5
    assert generate([ours], ids[0].tolist(), Sampling(max_new_tokens=1), CPU) == [int(reference.argmax())]
