"""Preference optimisation on ranks against one process, in float64: a loop that takes pairs one at a time out of the
store, with a second model as the reference, whole logits, torch's AdamW and clipping. The tolerance is that of
tests/parity/test_fp64.py.
"""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.data import tokens
from shardwise.data.pack import Packs
from shardwise.data.prepare import prepare
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec
from shardwise.models.decoder import Decoder
from shardwise.models.roles import is_adapter
from shardwise.prove import parity, workload
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from shardwise.spec.recipe import Data, TokenizerSection
from tests.parity import dpo_ranks
from tests.parity.cases import FP64, UNTIED, layout
from tests.parity.dpo_ranks import METHOD, SEQ_LEN

SPEC = replace(UNTIED, vocab_size=301)
TOLERANCE = 1e-9
ROWS, STEPS = 4, 4


def prepared(directory: Path) -> Path:
    """Some pairs in a window, of unequal number, and more windows than a step reads."""
    records = [
        {"prompt": f"say {i} ", "chosen": "word " * (1 + i * 5 % 7), "rejected": f"{i} " * (1 + i * 3 % 4) + "."}
        for i in range(40)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "tokenizer").mkdir()
    tokens.train_tokenizer(["say word 1234567890 . " * 50], 300, directory / "tokenizer")
    data = Data(
        path=str(directory / "pairs.jsonl"),
        tokenizer=TokenizerSection(path=str(directory / "tokenizer")),
        cache=str(directory / "cache"),
        validation_share=0.2,
        format="preference",
        num_proc=1,
    )
    prepare(data, out=directory / "pairs", sample_tokens=SEQ_LEN)
    return directory


def plan(strategy: str, world: int, remat: str, accumulation: int, lora: Lora | None = None) -> Plan:
    """Four windows a step however they are split, tokens in several chunks."""
    of = layout(strategy, world)
    batch = Batch(ROWS // accumulation // of.dp, accumulation, SEQ_LEN, loss_chunk_tokens=23)
    shard = Shard("zero3" if strategy == "hsdp" else strategy, bucket_bytes=4096)  # type: ignore[arg-type]
    return Plan(of, batch, shard, FP64, Remat(remat), lora=lora, loss="dpo")  # type: ignore[arg-type]


def log_probability(model: Decoder, weights: dict[str, Tensor], ids: Tensor, learnt: Tensor) -> Tensor:
    given = (ids[None], torch.arange(len(ids))[None], MaskSpec())
    logits = torch.func.functional_call(model, weights, given)[0, :-1]
    return -F.cross_entropy(logits, ids[1:], reduction="none")[learnt[1:]].sum()


@cache
def plain(
    directory: Path, lora: Lora | None, spec: ModelSpec = SPEC, rows: int = ROWS, steps: int = STEPS
) -> tuple[parity.Trace, dict[int, tuple[float, float]], list[dict[str, float]]]:
    """The training by a loop that anyone can check, the reference's log-probabilities of each pair that it met, and
    TRL's metrics of every step."""
    run = dpo_ranks.job_of(directory, spec, plan("ddp", 1, "none", 1, lora), steps)
    windows, order = run.windows, run.order
    assert isinstance(windows, Packs)
    job = parity.Workload(spec, rows, SEQ_LEN, "fp64", "fp64", steps, lora=lora)
    parameters, model = parity.plain_parameters(job), Decoder(spec).double()
    first = {name: value.detach().clone() for name, value in parameters.items() if not is_adapter(name)}
    matrices = [p for p in parameters.values() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": workload.OPTIM.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(workload.OPTIM.beta1, workload.OPTIM.beta2), eps=workload.OPTIM.eps)
    losses, norms, gradients, scores, metrics = [], [], {}, {}, []
    for number in range(steps):
        terms, logps, whole = [], [], parity.merged(parameters, job)
        for pair in [n for k in order.samples(number * rows, rows).tolist() for n in windows.pairs(k)]:
            spans = [windows.store.sample(index)[:2] for index in (2 * pair, 2 * pair + 1)]
            sides = [
                (torch.from_numpy(windows.store.read(*span)), torch.from_numpy(windows.store.read_mask(*span)).bool())
                for span in spans
            ]
            with torch.no_grad():
                scores[pair] = tuple(float(log_probability(model, first, *side)) for side in sides)
            chosen, rejected = (log_probability(model, whole, *side) for side in sides)
            rewards = METHOD.beta * (chosen - scores[pair][0]), METHOD.beta * (rejected - scores[pair][1])
            lengths = [float(learnt[1:].sum()) for _, learnt in sides]
            logps.append([*(value.item() for value in (*rewards, chosen, rejected)), *lengths])
            reward = rewards[0] - rewards[1]
            wrong = METHOD.label_smoothing
            terms.append(-(1 - wrong) * torch.sigmoid(reward).log() - wrong * torch.sigmoid(-reward).log())
        optimizer.zero_grad()
        loss = torch.stack(terms).mean()
        loss.backward()
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        assert workload.OPTIM.max_grad_norm is not None
        norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), workload.OPTIM.max_grad_norm)))
        warm = workload.OPTIM.warmup_steps
        rate = min((number + 1) / warm, 1.0 - max(0.0, (number - warm) / (parity.MAX_STEPS - warm)))
        for group in optimizer.param_groups:
            group["lr"] = workload.OPTIM.learning_rate * rate
        optimizer.step()
        losses.append(loss.item())
        metrics.append(trl_metrics(logps))
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return parity.Trace(tuple(losses), tuple(norms), gradients, weights), scores, metrics


def trl_metrics(logps: list[list[float]]) -> dict[str, float]:
    """As DPOTrainer.get_batch_loss_metrics names and defines them, of a step's pairs: rewards and log-probabilities of
    the chosen and the rejected answer; and how many tokens each has."""
    chosen_rewards, rejected_rewards, chosen_logps, rejected_logps, chosen, rejected = np.array(logps).T
    return {
        "rewards/chosen": chosen_rewards.mean(),
        "rewards/rejected": rejected_rewards.mean(),
        "rewards/margins": (chosen_rewards - rejected_rewards).mean(),
        "rewards/accuracies": (chosen_rewards > rejected_rewards).mean(),
        "logps/chosen": chosen_logps.mean(),
        "logps/rejected": rejected_logps.mean(),
        "tokens/chosen": chosen.mean(),
        "tokens/rejected": rejected.mean(),
    }


def holds(ranks: RankPool, directory: Path, plans: list[Plan], spec: ModelSpec = SPEC, steps: int = STEPS) -> None:
    """All plans have one size."""
    world = plans[0].layout.world
    answers = ranks.run(dpo_ranks.train, str(directory), spec, plans, steps, world=world)
    for place, of in enumerate(plans):
        right, scores, metrics = plain(directory, of.lora, spec, of.batch.global_batch_size(of.layout.dp), steps)
        assert abs(right.losses[0] - np.log(2)) < 1e-12 < 0.05 < abs(right.losses[-1] - np.log(2))
        found = parity.compare(right, [mine[place][0] for mine in answers], staged=of.layout.pp > 1)
        errors = [found.norm, found.gradient, found.weight, found.loss]
        assert all(error.error <= TOLERANCE for error in errors), f"{found}\nunder {of}"
        for _, references, figures in (mine[place] for mine in answers):
            known = references["train"]
            assert set(np.flatnonzero(~np.isnan(known[:, 0]))) == set(scores)
            assert max(abs(known[pair] - score).max() for pair, score in scores.items()) < 1e-9
            figures[0]["rewards/accuracies"] = 0.0  # margins are zero but for rounding
            assert figures == [pytest.approx(each, rel=1e-6, abs=1e-9) for each in metrics]
            assert not np.isnan(references["validation"]).any()


SETTINGS = (
    ("ddp", "none", 2),
    ("ddp", "full", 1),
    ("zero1", "none", 2),
    ("zero2", "selective", 1),
    ("zero3", "full", 2),
)


@pytest.mark.prove
def test_every_strategy(ranks: RankPool, pairs: Path) -> None:
    holds(ranks, pairs, [plan(strategy, 2, remat, m) for strategy, remat, m in SETTINGS])


@pytest.mark.prove
def test_one_process_and_four(ranks: RankPool, pairs: Path) -> None:
    holds(ranks, pairs, [plan("ddp", 1, "none", 1), plan("ddp", 1, "none", 4)])
    holds(ranks, pairs, [plan("hsdp", 4, "none", 1), plan("zero3", 4, "selective", 1)])


ADAPTERS = Lora(3, 6.0, frozen="fp64")


@pytest.mark.prove
def test_metrics_under_every_kind_of_layout(ranks: RankPool, pairs: Path) -> None:
    """Rows cut along the sequence, and stages of which only the last knows the answers."""
    rows = plan("ddp", 1, "none", 2)
    stages = Pipeline("1f1b", split=(1, SPEC.num_hidden_layers - 1))
    holds(ranks, pairs, [replace(rows, layout=replace(rows.layout, cp=2))])
    holds(ranks, pairs, [replace(rows, layout=replace(rows.layout, pp=2), pipeline=stages)])


@pytest.mark.prove
def test_adapters(ranks: RankPool, pairs: Path) -> None:
    """They begin as nothing, so the reference is the model without them."""
    holds(ranks, pairs, [plan(s, 2, remat, m, ADAPTERS) for s, remat, m in SETTINGS[::2]])


EVEN = replace(SPEC, intermediate_size=28)
"""What two ranks divide."""


@pytest.mark.prove
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_tensor_parallelism(ranks: RankPool, pairs: Path, sequence: bool) -> None:
    """The reference is cut as the model is; with adapters too."""

    def cut(of: Plan) -> Plan:
        return replace(of, layout=replace(of.layout, tp=2), sequence_parallel=sequence)

    holds(ranks, pairs, [cut(plan("ddp", 1, "selective", 2)), cut(plan("ddp", 1, "none", 1, ADAPTERS))], EVEN)
    holds(ranks, pairs, [cut(plan("zero3", 2, "full", 2)), cut(plan("zero1", 2, "none", 1, ADAPTERS))], EVEN)


@pytest.mark.prove
def test_validation_under_tensor_parallelism(ranks: RankPool, pairs: Path) -> None:
    """Of texts and of held-out pairs: as one process finds, the same bits on every rank."""
    one = replace(plan("ddp", 1, "none", 1, ADAPTERS), batch=Batch(1, 4, SEQ_LEN, loss_chunk_tokens=23))
    [alone] = ranks.run(dpo_ranks.evaluated, str(pairs), EVEN, one, world=1)
    texts, preference = alone
    assert texts.tokens > 0 and preference.pairs > 0 and abs(preference.reward_margin) > 0.01
    for cut, strategy, sequence in (
        (Layout(tp=2), "ddp", False),
        (Layout(tp=4), "ddp", True),
        (Layout(dp_shard=2, tp=2), "zero3", True),
    ):
        batch = replace(one.batch, accumulation=4 // cut.dp)
        of = replace(one, layout=cut, shard=Shard(strategy), batch=batch, sequence_parallel=sequence)  # type: ignore[arg-type]
        found = ranks.run(dpo_ranks.evaluated, str(pairs), EVEN, of, world=cut.world)
        assert all(other == found[0] for other in found)
        for ours, theirs in zip(found[0], alone, strict=True):
            assert astuple(ours) == pytest.approx(astuple(theirs), rel=1e-11), of


def test_a_longer_run_scores_what_is_new(ranks: RankPool, pairs: Path, tmp_path: Path) -> None:
    """What was known stays to the bit; pairs that no run has read are NaN."""
    (tmp_path / "pairs").symlink_to(pairs / "pairs")
    short, long = ranks.run(dpo_ranks.grown, str(tmp_path), SPEC, plan("zero3", 2, "none", 1), world=2)[1]
    before, after = (~np.isnan(scores["train"]).any(1) for scores in (short, long))
    assert 0 < before.sum() < after.sum() < len(after) and not (before & ~after).any()
    assert np.array_equal(short["train"][before], long["train"][before])
    assert np.array_equal(short["validation"], long["validation"])
