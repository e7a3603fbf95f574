"""A loop of one's own computes what the plain loop does, whatever the strategy; the plain loops are torch alone."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from examples import transformers_loop, vision_loop
from shardwise.errors import ConfigError, DataError
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.prove.pool import RankFailure, RankPool
from shardwise.runtime import own
from shardwise.runtime.checkpoint import save as checkpoint
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Pipeline, Plan
from tests.models import families
from tests.runtime import own_ranks
from tests.runtime.own_ranks import Model, loss_of, rows
from tests.said import shows

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SETTINGS = [
    ("ddp", {}),
    ("ddp", {"recompute": "full"}),
    ("zero1", {}),
    ("zero2", {"recompute": "selective"}),
    ("zero3", {}),
    ("zero3", {"recompute": "full"}),
    ("zero1", {"units": ["into", "out"]}),
    ("zero3", {"units": ["into", "blocks.0.1", "out"], "recompute": "full"}),
]


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)


def plain_decoder(
    steps: int, bounds: list[int] | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """What ``own_ranks.decoder`` does, in one process and without Shardwise's functions."""
    torch.manual_seed(0)
    model = Decoder(own_ranks.UNTIED).double()
    optimizer, losses, norms = optimizer_of(model, 1e-2), [], []
    for step in range(steps):
        ids = own_ranks.texts(step)
        mask, positions = MaskSpec(), torch.arange(8).expand(4, -1)
        if bounds is not None:
            ends = torch.tensor(bounds, dtype=torch.int32)
            mask = MaskSpec(documents=ends, longest=int(ends.diff().max()))
            starts = torch.repeat_interleave(ends[:-1].long(), ends.diff())
            positions = (torch.arange(32) - starts).view(4, 8)
        loss = own_ranks.next_token_loss(model, ids, positions, mask)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_transformers() -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**transformers_loop.SIZES))
    optimizer = optimizer_of(model, 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    losses = []
    for step in range(6):
        ids = transformers_loop.rows_of_step(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_vision() -> list[float]:
    torch.manual_seed(0)
    model = vision_loop.Classifier()
    optimizer = optimizer_of(model, 3e-3)
    losses = []
    for step in range(6):
        images, labels = vision_loop.batch_of_step(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PLAIN = {"vision": plain_vision, "transformers": plain_transformers}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "strategies"), [("vision", ("zero1", "zero2")), ("transformers", ("ddp", "zero3"))], ids=PLAIN
)
def test_the_examples_train_as_the_plain_loop_does(
    ranks: RankPool, name: str, strategies: tuple[str, ...], tmp_path: Path
) -> None:
    """fp32: sums in another order, and Adam's first steps make a full step of the sign of a gradient near zero. (That
    each strategy computes the same of any model is what the tests in float64 show.)"""
    right = PLAIN[name]()
    for strategy in strategies:
        for losses in ranks.run(own_ranks.example, name, strategy, str(tmp_path / strategy), world=2):
            assert losses == pytest.approx(right, rel=2e-3), strategy
            assert losses[:2] == pytest.approx(right[:2], rel=1e-5), strategy
    first, last = (ranks.run(own_ranks.example, name, "zero3", str(tmp_path / "one"), n, world=1)[0] for n in (3, 6))
    assert [len(first), len(last)] == [3, 3]
    assert first + last == pytest.approx(right, rel=1e-5)


def plain(steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Model().double()
    optimizer = optimizer_of(model, 1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, rows(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def same(found: list[Any], right: Any) -> None:
    """In float64, within 1e-9: the mean of the ranks' losses, the true norm and every weight."""
    losses = [sum(step) / len(found) for step in zip(*(losses for losses, _, _ in found), strict=True)]
    assert losses == pytest.approx(right[0], rel=1e-9)
    for _, norms, weights in found:
        assert norms == pytest.approx(right[1], rel=1e-9)
        for name, value in right[2].items():
            assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(("strategy", "settings"), SETTINGS)
def test_float64(ranks: RankPool, strategy: str, settings: dict[str, Any]) -> None:
    """With accumulation, clipping, a frozen bias, a buffer, a parameter of no dims, and ranks that begin with other
    weights."""
    same(ranks.run(own_ranks.train, strategy, dict(settings), 5, world=2), plain(5))


@pytest.mark.prove
def test_hybrid(ranks: RankPool) -> None:
    same(ranks.run(own_ranks.train, "hsdp", {"nodes": 2}, 5, world=4), plain(5))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("output", "`output`"),
        ("blocks", "`blocks` .*list of modules"),
        ("out", "`out` .*`into`"),
    ],
)
def test_units_that_cannot_be(name: str, said: str) -> None:
    model = Model()
    model.out.bias = model.into.bias
    with pytest.raises(ConfigError, match=f"CFG005.*{said}"):
        shardwise.parallelize(model, shardwise.make_plan(), None, units=[name])


def plain_routed() -> tuple[list[set[str]], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = own_ranks.Routed().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    present = []
    for step in range(len(own_ranks.ROUTES)):
        for part in range(4):
            (own_ranks.routed_step(model, step, part) / 4).backward()
        present.append({name for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return present, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_is_let_go_of_is_freed(ranks: RankPool, strategy: str) -> None:
    assert ranks.run(own_ranks.left, strategy) == [0, 0]


@pytest.mark.matrix
@pytest.mark.parametrize(("strategy", "world"), [*((each, 2) for each in STRATEGIES), ("ddp", 4), ("zero3", 4)])
def test_ranks_that_use_different_parameters(ranks: RankPool, strategy: str, world: int) -> None:
    """Two micro-batches a rank, and one. A parameter used by nobody has no gradient, and AdamW does not decay it."""
    present, weights = plain_routed()
    for found, full in ranks.run(own_ranks.routed, strategy, world=world):
        assert found == present
        for name, value in weights.items():
            assert torch.allclose(full[name], value, rtol=1e-9, atol=1e-12), name
    assert not any("experts.3" in name for step in present for name in step)


def test_different_parameters_under_hybrid(ranks: RankPool) -> None:
    present, weights = plain_routed()
    for found, full in ranks.run(own_ranks.routed, "hsdp", "fp64", 2, world=4):
        assert found == present
        assert all(torch.allclose(full[name], value, rtol=1e-9, atol=1e-12) for name, value in weights.items())


@pytest.mark.parametrize("strategy", ["zero1", "zero3 once"])
def test_different_parameters_in_bf16(ranks: RankPool, strategy: str) -> None:
    """Accumulated gradients are kept in another type than those of the last micro-batch."""
    present, weights = plain_routed()
    for found, full in ranks.run(own_ranks.routed, strategy, "bf16", world=2):
        assert found == present
        assert all(torch.allclose(full[name].double(), value, atol=0.1) for name, value in weights.items())


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_blocks_that_not_all_ranks_run(ranks: RankPool, strategy: str) -> None:
    for (said,) in ranks.run(own_ranks.apart, strategy, world=2):
        assert "OWN001" in said and shows(said, "forward of paths.0", "rank 0", "forward of paths.1", "rank 1")
        assert "parallelize(model, plan, mesh, whole=['paths'])" in said


def test_a_torch_that_cannot_send_zeros(ranks: RankPool) -> None:
    """There, ranks that use different parameters are refused: their gradients were added to one another's."""
    for (said,) in ranks.run(own_ranks.apart, "zero2", ["paths"], False, world=2):
        assert "OWN001" in said and shows(said, "gradient of paths.0.0.bias", "rank 0", "gradient of paths.1.0.bias")
        assert "newer torch (2.13" in said
    assert ranks.run(own_ranks.apart, "zero2", ["paths"], world=2) == [[], []]


def test_weights_of_several_types(ranks: RankPool) -> None:
    """Halves of the same gradients sum to the gradients, to the bit."""
    torch.manual_seed(0)
    model = own_ranks.Mixed()
    model(rows(0)[0].float()).square().mean().backward()
    for found in ranks.run(own_ranks.mixed, world=2):
        assert len(found) == 4
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and torch.equal(found[name], parameter.grad)


def test_float64_is_float64_everywhere() -> None:
    model = shardwise.parallelize(Model(), shardwise.make_plan(compute="fp64"), None)
    assert model(rows(0)[0]).dtype == torch.float64
    assert shardwise.make_plan(compute="fp64").precision.reduce == "fp64"
    assert shardwise.make_plan(compute="bf16").precision.reduce == shardwise.make_plan().precision.reduce == "fp32"


@pytest.mark.parametrize("settings", [{}, {"recompute": "full"}], ids=str)
def test_every_family_of_the_decoder_computes_in_bf16_under_ddp(settings: dict[str, Any]) -> None:
    """Autocast makes what projections compute bf16, beside tables and a residual stream that stay fp32. The gradient
    has the direction of fp32's, but for the roundings of three layers with weights of 0.2, and of 1 before a clamp or
    in the sums of a gated delta net. Tokens go to the same experts: where another is chosen for a rounding, so is
    another gradient."""
    for family in families.CONFIGS if not settings else ("qwen3", "phi3"):
        spec = families.spec_of(family)
        ids = torch.randint(spec.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0))
        gradients = []
        for compute in ("fp32", "bf16"):
            plan = shardwise.make_plan("ddp", compute=compute, **settings)  # type: ignore[arg-type]
            model = shardwise.parallelize(families.random_model(spec), plan, None)
            if compute == "fp32":
                chosen = families.routed(model)
            else:
                families.routed(model, chosen)
            shardwise.backward(model, own_ranks.next_token_loss(model, ids))
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        coarse = spec.activation == "clamped_swiglu" or "linear_attention" in spec.attention.layer_types
        assert torch.cosine_similarity(*gradients, dim=0) > (0.96 if coarse else 0.99), family


def small(directory: Path) -> tuple[nn.Module, own.Checkpoints]:
    model = shardwise.parallelize(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), shardwise.make_plan(), None)
    return model, shardwise.Checkpoints(directory, model, shardwise.optimizer(model))


def test_buffers_are_saved_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward, beside which a save copies, changes them."""
    copy = checkpoint.RunCheckpoints._copy

    def late(self: checkpoint.RunCheckpoints, *given: Any) -> None:
        time.sleep(0.3)
        copy(self, *given)

    monkeypatch.setattr(checkpoint.RunCheckpoints, "_copy", late)
    model, checkpoints = small(tmp_path)
    for step in range(2):
        model(rows(step)[0].float())
        if step == 0:
            checkpoints.save(1)
            right = {name: buffer.clone() for name, buffer in model.named_buffers()}
    checkpoints.close()
    other, again = small(tmp_path)
    again.resume()
    assert all(torch.equal(right[name], buffer) for name, buffer in other.named_buffers())


def test_a_save_that_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(checkpoint.ShardWriter, "begin", full)
    _, checkpoints = small(tmp_path)
    monkeypatch.setattr(checkpoint, "RETRIES_S", ())
    checkpoints.save(1)
    time.sleep(0.5)
    with pytest.warns(UserWarning, match=r"step 1 .*no space"):
        checkpoints.save(2)
    assert [(event.kind, event.step) for event in checkpoints.close()] == [("failed", 1), ("failed", 2)]


def test_a_stop_is_seen_by_all_ranks_at_the_same_step(ranks: RankPool, tmp_path: Path) -> None:
    """And what goes on from there has its schedule, each rank its own sampler."""
    whole = ranks.run(own_ranks.stopped, "zero2", str(tmp_path / "whole"), -1, world=2)
    first = ranks.run(own_ranks.stopped, "zero2", str(tmp_path / "cut"), 2, world=2)
    assert [(step, restored) for step, _, _, restored in first] == [(3, True)] * 2
    again = ranks.run(own_ranks.stopped, "zero3", str(tmp_path / "cut"), -1, world=2)
    for uncut, before, after in zip(whole, first, again, strict=True):
        assert before[1] + after[1] == uncut[1] and len(uncut[1]) == 6
        assert after[2] == uncut[2] > before[2]
    with pytest.raises(RankFailure, match=r"OWN002.*`drawn` .*2 ranks.* 1"):
        ranks.run(own_ranks.stopped, "ddp", str(tmp_path / "cut"), -1, world=1)


@pytest.mark.prove
def test_what_is_being_saved_can_be_resumed_from(ranks: RankPool, tmp_path: Path) -> None:
    """As by a loop that goes back after a loss that exploded: the save in flight talks among the ranks too."""
    assert ranks.run(own_ranks.resumed_at_once, str(tmp_path), world=2, timeout_s=30) == [1, 1]


def test_a_loop_after_one_that_was_stopped_is_not_stopped(tmp_path: Path) -> None:
    """With the same model, as in a notebook; the first still knows that it was."""
    model, first = small(tmp_path)
    second = shardwise.Checkpoints(tmp_path, model, first.optimizer)
    for checkpoints, asked in ((first, True), (second, False)):
        assert not checkpoints.stopping
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
        shardwise.backward(model, model(rows(0)[0].float()).square().mean())
        assert checkpoints.stopping is asked
        checkpoints.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert first.stopping and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=8),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(tmp_path: Path, schedule: str) -> None:
    """Rates and betas of each step, and the weights to the bit."""

    def train(directory: Path, steps: int) -> tuple[list[Any], nn.Module]:
        torch.manual_seed(0)
        model = shardwise.parallelize(Model().double(), shardwise.make_plan(compute="fp64"), None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = SCHEDULES[schedule](optimizer)
        checkpoints = shardwise.Checkpoints(directory, model, optimizer, scheduler=scheduler)
        seen = []
        for number in range((checkpoints.resume() or {"step": 0})["step"], steps):
            shardwise.backward(model, loss_of(model, rows(number)))
            seen.append([optimizer.param_groups[0][key] for key in ("lr", "betas")])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        checkpoints.save(steps)
        checkpoints.close()
        return seen, model

    right, whole = train(tmp_path / "whole", 6)
    seen, _ = train(tmp_path / "cut", 3)
    more, model = train(tmp_path / "cut", 6)
    assert seen + more == right
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_checkpoint_with_other_objects_is_refused(tmp_path: Path) -> None:
    """Without a word, a schedule would begin anew."""
    model, checkpoints = small(tmp_path)
    checkpoints.save(1)
    checkpoints.close()
    optimizer = shardwise.optimizer(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    kept = shardwise.Checkpoints(tmp_path, model, optimizer, scheduler=scheduler)
    with pytest.raises(DataError, match=r"OWN002.*without .*`scheduler`"):
        kept.resume()
    kept.save(2)
    kept.close()
    with pytest.raises(DataError, match=r"OWN002.*with the .*`scheduler`"):
        small(tmp_path)[1].resume()


def test_the_optimizer_is_fused_and_vectors_are_not_decayed() -> None:
    """Every other AdamW of torch asks each parameter's step count of the device."""
    model = shardwise.parallelize(nn.Linear(2, 2), shardwise.make_plan(), None)
    matrices, vectors = shardwise.optimizer(model).param_groups
    assert matrices["fused"] and vectors["fused"]
    assert (matrices["params"], vectors["params"]) == ([model.weight], [model.bias])
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_objects_without_a_state_that_can_be_kept_are_refused_by_name(tmp_path: Path) -> None:
    model = shardwise.parallelize(nn.Linear(2, 2), shardwise.make_plan(), None)
    optimizer = shardwise.optimizer(model)
    odd = own_ranks.Drawn(0)
    odd.last = (object(), 0.0)  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"CKPT020.*`sampler.last.0`.*type object"):
        shardwise.Checkpoints(tmp_path, model, optimizer, sampler=odd)
    with pytest.raises(DataError, match=r"CKPT020.*`loader` is a list"):
        shardwise.Checkpoints(tmp_path, model, optimizer, loader=[1])
    with pytest.raises(ConfigError, match="`sampler`"):
        shardwise.Checkpoints(tmp_path, model, optimizer, per_rank=["sampler"])


def test_buffers_of_the_first_rank_are_saved(ranks: RankPool, tmp_path: Path) -> None:
    """Averages that each rank has of its own rows; all of one rank, or they would not go together."""
    right, _ = ranks.run(own_ranks.averaged, str(tmp_path), world=2)
    found, _ = ranks.run(own_ranks.averaged, str(tmp_path), world=2)
    assert right.keys() == found.keys() and len(right) == 9
    assert all(torch.equal(right[name], value) for name, value in found.items())


@pytest.mark.prove
def test_checkpoints_load_under_another_strategy(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(own_ranks.train, "zero3", {}, 3, str(tmp_path), world=4)
    found = ranks.run(own_ranks.train, "ddp", {}, 6, str(tmp_path), world=2)
    right = plain(6)
    same(found, ([*right[0][3:]], [*right[1][3:]], right[2]))


def test_an_optimizer_that_makes_its_state_late(tmp_path: Path) -> None:
    """One of torch's own: the moments are there to be loaded into, and a fresh start has none."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, own.Checkpoints]:
        torch.manual_seed(0)
        model = shardwise.parallelize(Model().double(), shardwise.make_plan(compute="fp64"), None)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9)
        return model, optimizer, shardwise.Checkpoints(tmp_path, model, optimizer)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            shardwise.backward(model, loss_of(model, rows(number)))
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, checkpoints = make()
    assert checkpoints.resume() is None and not optimizer.state
    steps(model, optimizer, range(2))
    checkpoints.save(2, note="here", validation=torch.tensor(1.5), worst=float("nan"))
    steps(model, optimizer, range(2, 4))
    checkpoints.close()
    other, again, kept = make()
    assert kept.resume() == {"note": "here", "validation": 1.5, "worst": None, "step": 2}
    with pytest.raises(DataError, match="CKPT020"):
        kept.save(3, model=model)
    steps(other, again, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_parameter_that_never_had_a_gradient(tmp_path: Path) -> None:
    """Its optimizer, one of torch's own, keeps nothing of it, and after a resume neither."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, given: Tensor) -> Tensor:
            out: Tensor = self.used(given)
            return out

    def make() -> tuple[nn.Module, torch.optim.Optimizer, own.Checkpoints]:
        torch.manual_seed(0)
        model = shardwise.parallelize(Idle(), shardwise.make_plan(), None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, shardwise.Checkpoints(tmp_path, model, optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        shardwise.backward(model, model(torch.ones(2, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, checkpoints = make()
    step(model, optimizer)
    checkpoints.save(1)
    checkpoints.close()
    other, again, kept = make()
    assert kept.resume() == {"step": 1}
    assert len(again.state) == len(optimizer.state) == 2
    step(model, optimizer)
    step(other, again)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_module_that_is_none_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        shardwise.parallelize(Model(), shardwise.make_plan(), None, whole=["block"])
    assert "`block`" in raised.value.problems[0].what
    assert "`blocks`" in raised.value.problems[0].fix


def test_replicas_must_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=r"4 replicas .*6 processes"):
        shardwise.make_plan("hsdp", replicas=4)
    assert shardwise.make_plan("hsdp", replicas=2).layout.dp_shard == 3


def test_a_pipeline_is_refused_by_name_and_so_is_a_degree_that_nobody_knows() -> None:
    """It would be left out in silence."""
    for asked in (lambda: shardwise.make_plan("zero3", pp=2), lambda: shardwise.parallelize(Model(), staged(), None)):  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match=r"PLAN023.*as a whole"):
            asked()
    with pytest.raises(ConfigError, match=r"unknown degree `replica`(.|\n)*`replicas`"):
        shardwise.make_plan("hsdp", replica=2)  # type: ignore[call-arg]


def staged() -> Plan:
    return Plan(Layout(pp=2), pipeline=Pipeline("1f1b", 1, (1, 1)))


def test_a_word_that_is_none_is_named_with_the_nearest() -> None:
    """A strategy that nobody knows would train, as something else."""
    with pytest.raises(ConfigError) as raised:
        shardwise.make_plan("zero4", compute="fp16", recompute="ful")  # type: ignore[arg-type]
    assert [(problem.where, problem.code) for problem in raised.value.problems] == [
        ("strategy", "CFG005"),
        ("compute", "CFG005"),
        ("recompute", "CFG005"),
    ]
    assert "`zero" in raised.value.problems[0].fix
    assert "`full`" in raised.value.problems[2].fix
