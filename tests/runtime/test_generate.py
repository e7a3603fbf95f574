"""What a model writes next, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shardwise.runtime import generate as generating
from shardwise.runtime.generate import Sampling, generate, generate_batch, last_logits, probabilities
from tests.models.families import pair
from tests.models.llama import relative, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_the_next_token_is_that_of_transformers(family: str) -> None:
    """Of models whose logits are capped, or divided: that changes what a temperature means."""
    ours, theirs = pair(family)
    ids, _ = tokens(ours.spec.vocab_size, rows=1, length=20)
    reference = theirs(ids, use_cache=False).logits[0, -1].detach()
    assert relative(last_logits([ours], [ids[0].tolist()], CPU)[0], reference) < 2e-5
    assert generate([ours], ids[0].tolist(), Sampling(max_new_tokens=1), CPU) == [int(reference.argmax())]


def test_a_text_is_filled_up_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """To few lengths, each of which kernels are compiled for, and the model sees nothing of it."""
    ours, _ = pair("gemma2")
    ids = tokens(ours.spec.vocab_size, rows=1, length=45)[0][0].tolist()
    seen: list[int] = []
    ours.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    found = [last_logits([ours], [ids[:length]], CPU)[0] for length in (1, 31, 32, 33, 45)]
    assert seen == [32, 32, 32, 64, 64]
    monkeypatch.setattr(generating, "LENGTHS", 1)
    for length, logits in zip((1, 31, 32, 33, 45), found, strict=True):
        assert relative(logits, last_logits([ours], [ids[:length]], CPU)[0]) < 1e-5


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.prove) for name in ("phi3", "qwen3_moe"))]
)
def test_each_prompt_of_a_batch_is_answered_as_if_alone(family: str) -> None:
    """Prompts of lengths that differ, greedy and drawn: windows, lengths that change how positions turn, experts. Some
    end earlier than others."""
    ours, _ = pair(family)
    prompts = [tokens(ours.spec.vocab_size, rows=1, length=length)[0][0].tolist() for length in (3, 45, 1, 31)]

    def over(row: int, ids: list[int]) -> bool:
        return len(ids) == 1 + row

    for sampling in (Sampling(5), Sampling(5, temperature=1.5, seed=2, top_k=20, top_p=0.9)):
        found = generate_batch([ours], prompts, sampling, CPU, over)
        assert [len(ids) for ids in found] == [1, 2, 3, 4]
        assert found == [
            generate_batch([ours], [prompt], sampling, CPU)[0][: 1 + row] for row, prompt in enumerate(prompts)
        ]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (7, 0.5), (1, 0.9), (0, 1e-6)])
def test_tokens_are_drawn_from_what_transformers_draws_from(top_k: int, top_p: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(top_k))
    scores = TemperatureLogitsWarper(0.8)(None, logits[None])
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    found = probabilities(logits, Sampling(temperature=0.8, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(found, torch.softmax(scores[0], 0))
