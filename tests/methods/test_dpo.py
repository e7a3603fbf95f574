"""Direct preference optimisation against the loss written plainly: transformers' model, a deep copy of it as the
reference, pairs one at a time and without padding, in float64."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from shardwise.data import tokens
from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.pack import Packs, open_windows
from shardwise.data.prepare import prepare
from shardwise.data.stream import Share, evaluation
from shardwise.distributed.meshes import Meshes
from shardwise.methods import pairs
from shardwise.methods.loss import Output, linear_cross_entropy, score
from shardwise.models.config import ModelSpec, from_hf
from shardwise.models.decoder import Decoder
from shardwise.models.hf_names import to_hf_name
from shardwise.prove.pool import RankPool
from shardwise.runtime import passes
from shardwise.runtime.evaluate import evaluate_pairs
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Data, Method, Recipe, TokenizerSection
from tests.methods import dpo_ranks
from tests.methods.test_loss import inputs, reference
from tests.models.llama import pair, random_config

SEQ_LEN, PAIRS = 64, 11
Side = tuple[Tensor, Tensor]
"""Ids, and which of them are learnt."""
METHODS = [Method(name="dpo"), Method(name="dpo", beta=0.7, label_smoothing=0.2)]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    """Pairs of unequal answers, several in a window."""
    directory = tmp_path_factory.mktemp("pairs")
    records = [
        {"prompt": f"say {i} ", "chosen": "word " * (1 + i * 5 % 7) + "!", "rejected": f"{i} " * (1 + i * 3 % 4)}
        for i in range(PAIRS)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "tokenizer").mkdir()
    tokens.train_tokenizer(["say word 1234567890 ! " * 50], 300, directory / "tokenizer")
    data = Data(
        path=str(directory / "pairs.jsonl"),
        cache=str(directory / "cache"),
        tokenizer=TokenizerSection(path=str(directory / "tokenizer")),
        validation_share=0.0,
        format="preference",
        num_proc=1,
    )
    found = open_windows(prepare(data, sample_tokens=SEQ_LEN).train, SEQ_LEN, True)
    assert isinstance(found, Packs) and 1 < len(found) < PAIRS
    return found


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes norms and rotation in fp32 whatever the model is in, which would be seen at 1e-8."""

    def norm(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def rotation(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        dim, theta = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        turned = position_ids[..., None].double() * theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        both = torch.cat([turned, turned], -1)
        return both.cos(), both.sin()

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", rotation)


def models(seed: int) -> tuple[Decoder, nn.Module, nn.Module]:
    """Ours, and transformers' with the same weights, both moved away from the third, which is the reference."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    ours, theirs = pair({**random_config(seed), "vocab_size": 300, "rope_parameters": rope}, seed)
    ours, theirs = ours.double(), theirs.double()
    first = deepcopy(theirs)
    torch.manual_seed(seed)
    state = {name: value + 0.05 * torch.randn_like(value) for name, value in ours.state_dict().items()}
    ours.load_state_dict(state)
    theirs.load_state_dict({to_hf_name(name): value for name, value in state.items()})
    return ours, theirs, first


def sides(packs: Packs) -> list[tuple[Side, Side]]:
    """The pairs as they stand in the store, window by window."""
    store = packs.store

    def side(index: int) -> Side:
        begin, end, _ = store.sample(index)
        return torch.from_numpy(store.read(begin, end)), torch.from_numpy(store.read_mask(begin, end)).bool()

    return [(side(2 * n), side(2 * n + 1)) for k in range(len(packs)) for n in packs.pairs(k)]


def log_probability(model: nn.Module, side: Side) -> Tensor:
    ids, learnt = side
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][learnt[1:]].sum()


def gradients_are_alike(ours: Decoder, theirs: nn.Module) -> None:
    """1e-10: sums in another order in float64."""
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        right = named[to_hf_name(name)].grad
        assert parameter.grad is not None and right is not None
        assert float((parameter.grad - right).norm()) <= 1e-10 * float(right.norm()), name


def plain_margins(model: nn.Module, first: nn.Module, pairs: list[tuple[Side, Side]]) -> list[Tensor]:
    """As equation 7 of the paper has them, beta left out."""
    margins = []
    for chosen, rejected in pairs:
        with torch.no_grad():
            known = log_probability(first, chosen) - log_probability(first, rejected)
        margins.append(log_probability(model, chosen) - log_probability(model, rejected) - known)
    return margins


def plain_losses(margins: list[Tensor], method: Method) -> list[Tensor]:
    wrong = method.label_smoothing
    terms = [(torch.sigmoid(method.beta * m), torch.sigmoid(-method.beta * m)) for m in margins]
    return [-(1 - wrong) * right.log() - wrong * left.log() for right, left in terms]


def loss_of(model: nn.Module, batch: MicroBatch, chunk_tokens: int, count: float, method: Method) -> Tensor:
    finish = partial(pairs.finish, denominator=count, chunk_tokens=chunk_tokens, method=method)
    return passes.forward([model], batch, finish).value


def scored(packs: Packs, first: nn.Module) -> Packs:
    """With what the reference says of each pair, found by our own pass: one window after another, packed."""
    ours = Decoder(pair_spec(first)).double()
    state = first.state_dict()
    ours.load_state_dict({name: state[to_hf_name(name)] for name in ours.state_dict()})
    known = np.full((PAIRS, 2), np.nan)
    with torch.no_grad():
        for k in range(len(packs)):
            batch = collate([packs[k]])
            losses = passes.infer([ours], batch, partial(score, chunk_tokens=40))
            known[packs.pairs(k)] = pairs.answers_of(losses, batch, Method(name="dpo")).logps.numpy()
    assert not np.isnan(known).any()
    return Packs(packs.store, SEQ_LEN, known)


def pair_spec(model: nn.Module) -> ModelSpec:
    return from_hf(model.config.to_dict(), "test")


@pytest.mark.parametrize("method", METHODS, ids=["dpo", "cdpo"])
@pytest.mark.parametrize("chunk_tokens", [17, 1000])
@pytest.mark.parametrize("seed", [0, 3])
def test_loss_and_gradients(packs: Packs, seed: int, chunk_tokens: int, method: Method) -> None:
    """Two micro-batches of one step, over the pairs of both. 1e-10: sums in another order in float64, through a model
    whose margins are several units."""
    ours, theirs, first = models(seed)
    known = scored(packs, first)
    cut = len(known) // 2
    batches = [collate([known[k] for k in numbers]) for numbers in (range(cut), range(cut, len(known)))]
    assert sum(batch.terms() for batch in batches) == PAIRS
    total = 0.0
    for batch in batches:
        loss = loss_of(ours, batch, chunk_tokens, float(PAIRS), method)
        loss.backward()
        total += loss.item()
    margins = plain_margins(theirs, first, sides(known))
    assert max(abs(margin.item()) for margin in margins) > 1.0
    expected = torch.stack(plain_losses(margins, method)).mean()
    expected.backward()
    assert abs(total - expected.item()) <= 1e-10 * expected.item()
    gradients_are_alike(ours, theirs)


@pytest.mark.parametrize("method", METHODS, ids=["dpo", "cdpo"])
def test_figures_are_those_of_trl(packs: Packs, method: Method) -> None:
    """Their sum over two micro-batches of a step is the mean over all its pairs, as DPOTrainer's get_batch_loss_metrics
    has it, written out."""
    ours, theirs, first = models(5)
    known = scored(packs, first)
    found: Counter[str] = Counter()
    for numbers in (range(1), range(1, len(known))):
        batch = collate([known[k] for k in numbers])
        finish = partial(pairs.finish, denominator=float(PAIRS), chunk_tokens=17, method=method)
        found.update({name: float(value) for name, value in passes.forward([ours], batch, finish).figures.items()})
    both = sides(known)
    with torch.no_grad():
        chosen_logps, ref_chosen_logps = (
            torch.stack([log_probability(m, c) for c, _ in both]) for m in (theirs, first)
        )
        rejected_logps, ref_rejected_logps = (
            torch.stack([log_probability(m, r) for _, r in both]) for m in (theirs, first)
        )
    chosen_rewards = method.beta * (chosen_logps - ref_chosen_logps)
    rejected_rewards = method.beta * (rejected_logps - ref_rejected_logps)
    expected = {
        "rewards/chosen": chosen_rewards.mean(),
        "rewards/rejected": rejected_rewards.mean(),
        "rewards/margins": (chosen_rewards - rejected_rewards).mean(),
        "rewards/accuracies": (chosen_rewards > rejected_rewards).double().mean(),
        "logps/chosen": chosen_logps.mean(),
        "logps/rejected": rejected_logps.mean(),
        "tokens/chosen": sum(int(learnt[1:].sum()) for (_, learnt), _ in both) / PAIRS,
        "tokens/rejected": sum(int(learnt[1:].sum()) for _, (_, learnt) in both) / PAIRS,
    }
    assert list(found) == list(expected) and 0 < found["rewards/accuracies"] < 1
    assert found["tokens/chosen"] != found["tokens/rejected"]
    assert dict(found) == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-9)


def test_at_the_reference_itself(packs: Packs) -> None:
    """Margins are 0 and the loss ln 2; the gradient is not nothing."""
    _, _, first = models(1)
    known = scored(packs, first)
    ours = Decoder(pair_spec(first)).double()
    ours.load_state_dict({name: first.state_dict()[to_hf_name(name)] for name in ours.state_dict()})
    loss = loss_of(ours, collate([known[0]]), 32, float(len(known.pairs(0))), METHODS[0])
    assert abs(loss.item() - float(np.log(2))) < 1e-12
    loss.backward()
    assert float(ours.head.weight.grad.norm()) > 1e-3


def test_validation(packs: Packs) -> None:
    """Loss, accuracy and margin of the rewards over windows with padding among them."""
    ours, theirs, first = models(2)
    known, method = scored(packs, first), METHODS[1]
    plan, recipe = Plan(batch=Batch(loss_chunk_tokens=50)), Recipe(method=method)
    job: Any = SimpleNamespace(plan=plan, recipe=recipe, device=torch.device("cpu"), meshes=Meshes())
    found = evaluate_pairs(job, [ours], evaluation(known, Share(0, 1, 3)))
    with torch.no_grad():
        margins = plain_margins(theirs, first, sides(known))
        losses = plain_losses(margins, method)
    assert found.pairs == PAIRS
    assert abs(found.loss - float(torch.stack(losses).mean())) < 1e-10
    assert found.accuracy == sum(float(margin) > 0 for margin in margins) / PAIRS and 0 < found.accuracy < 1
    assert abs(found.reward_margin - method.beta * float(torch.stack(margins).mean())) < 1e-10
    beyond = list(evaluation(known, Share(1, 2, len(known))))  # the first rank has all there is
    none = evaluate_pairs(job, [ours], beyond)
    assert len(beyond) == 1 and none.pairs == 0 and np.isnan(none.loss)
    others = [
        replace(one, micro_batch=replace(one.micro_batch, counts=False)) for one in evaluation(known, Share(0, 1, 3))
    ]
    assert evaluate_pairs(job, [ours], others).pairs == 0, "another rank that shares the rows counts them"
    assert str(found).startswith(f"loss {found.loss:.4f}, accuracy ") and str(found).endswith(f"({PAIRS} pairs)")


def test_rows_may_be_cut_over_ranks(ranks: RankPool) -> None:
    """Each has some tokens of every row: losses and gradients of the weight are parts of a sum, and those of hidden
    states are the rank's own. 1e-12: sums in another order in float64."""
    [(loss, hidden, weight)] = ranks.run(dpo_ranks.preferred, world=1)
    assert float(hidden.norm()) > 1e-3
    found = ranks.run(dpo_ranks.preferred, world=3)
    torch.testing.assert_close(sum(each[0] for each in found), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([each[1] for each in found], 1), hidden, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(each[2] for each in found), weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk_tokens", [4, 1000])
def test_a_factor_for_each_token(chunk_tokens: int, cap: float | None) -> None:
    """The weighed sum and its gradients against torch's cross-entropy a token at a time."""
    hidden, weight, labels = inputs()
    factors = torch.randn(labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = hidden @ weight.mT
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    expected = (each * factors).sum()
    loss = linear_cross_entropy(hidden, Output(weight, cap), labels, chunk_tokens, factors)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))
    for ours, theirs in zip(grads, torch.autograd.grad(expected * 0.37, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        again = linear_cross_entropy(hidden, Output(weight, cap), labels, chunk_tokens, factors)
    torch.testing.assert_close(again, expected.detach(), rtol=1e-12, atol=0)
    ones = linear_cross_entropy(hidden, Output(weight), labels, chunk_tokens, torch.ones_like(factors))
    torch.testing.assert_close(ones, reference(hidden, weight, labels), rtol=1e-12, atol=0)


def test_bf16(packs: Packs) -> None:
    """In bf16 the loss is the one in float64 within 2 %, and the gradient of each matrix points the same way: cosine
    above 0.99. Log-probabilities are summed in fp64 and carry the rounding of bf16 logits, 2^-9 each."""
    ours, _, first = models(4)
    known = scored(packs, first)
    batch: MicroBatch = collate([known[k] for k in range(len(known))])
    narrow = deepcopy(ours).bfloat16()
    losses = [loss_of(model, batch, 50, float(PAIRS), METHODS[0]) for model in (ours, narrow)]
    for loss in losses:
        loss.backward()
    assert losses[1].dtype == torch.float32
    assert abs(losses[1].item() / losses[0].item() - 1) < 0.02
    for one, two in zip(ours.parameters(), narrow.parameters(), strict=True):
        if one.ndim == 2 and one.grad is not None and two.grad is not None:
            assert float(F.cosine_similarity(one.grad.flatten(), two.grad.double().flatten(), dim=0)) > 0.99
