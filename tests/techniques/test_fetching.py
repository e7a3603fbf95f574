"""Weights that wait on the host: when they may, what they hold and take by hand, what is said of them, and how
those of small blocks come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import kept, put
from shardwise.models.lookup import load_spec
from shardwise.planner.bounds import LowerBounds
from shardwise.planner.comparison import fits, seconds
from shardwise.planner.price import price
from shardwise.planner.remedy import remedies
from shardwise.planner.search import Search, choose
from shardwise.planner.seconds import step_seconds
from shardwise.planner.seconds.step_seconds import timed
from shardwise.prove.parity import CPU
from shardwise.runtime import begin
from shardwise.runtime.build import build_parts
from shardwise.runtime.loop import train
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.explain import execution
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe, read_recipe
from shardwise.spec.plan import Batch, Lora, Offload, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.offload import check
from shardwise.techniques.offload.host_copies import HostWeights
from shardwise.techniques.offload.sizes import BUFFER_BYTES
from shardwise.techniques.offload.weights import WaitingWeights
from tests.parity.fetching import DENSE
from tests.runtime import small_run

EIGHT_B, SEVENTY_B = load_spec("meta-llama/Llama-3.1-8B"), load_spec("meta-llama/Llama-3.1-70B")
H100, TWO_4090 = parse_cluster("1xH100"), parse_cluster("2xRTX-4090")
BLOCK = 2 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096)
"""Bytes of a block of an 8B in bf16: queries and outputs, keys and values, three of its network, two norms."""
ONE = Plan(
    Layout(),
    Batch(1, 1, 8192),
    Shard(),
    Precision("bf16"),
    Remat("full"),
    lora=Lora(frozen="bf16"),
    offload=Offload(weights="host"),
)


def test_what_waits_by_hand() -> None:
    """All 32 blocks; on the device are a block and the next."""
    there, here = (price(EIGHT_B, replace(ONE, offload=each), H100).estimate for each in (ONE.offload, Offload()))
    assert there.host == {"weights": 32 * BLOCK} and not here.host
    assert there.memory["weights"] == here.memory["weights"] - 32 * BLOCK
    assert there.memory["gathered"] == here.memory["gathered"] + 2 * BLOCK
    shards = replace(ONE, layout=Layout(dp_shard=8), shard=Shard("zero3"))
    eight = parse_cluster("8xH100")
    sharded = price(EIGHT_B, shards, eight).estimate
    assert sharded.host == {"weights": 4 * BLOCK} and sharded.host_bytes == 32 * BLOCK
    in_file = price(EIGHT_B, replace(ONE, offload=Offload(weights="nvme")), H100).estimate
    assert in_file.memory == there.memory and in_file.host == {"buffers": 2 * (BLOCK + 4096)}, "whole pages, and one"
    assert in_file.disk_bytes == 32 * BLOCK and in_file.written_bytes == 0
    copies = price(EIGHT_B, replace(ONE, layout=Layout(dp_replicate=8)), eight).estimate
    assert copies.host_bytes == 8 * 32 * BLOCK


@pytest.mark.usefixtures("by_table")
@pytest.mark.parametrize("m", [1, 2, 5])
def test_what_copies_take(m: int) -> None:
    """Each block comes for its forward and, but for the last, for its backward, in every micro-batch. Beside what is
    computed that takes no time but before the first; a bus that is slower is waited for."""
    plan = replace(ONE, batch=Batch(1, m, 8192))
    without = seconds(timed(EIGHT_B, price(EIGHT_B, replace(plan, offload=Offload()), H100), H100))
    for rate in (63e9, 1e9):
        cluster = replace(H100, device=replace(H100.device, host_link_bytes_per_s=rate))
        found = seconds(timed(EIGHT_B, price(EIGHT_B, plan, cluster), cluster))
        assert found.copied_s == pytest.approx(m * 63 * BLOCK / (0.8 * rate))
        if rate == 63e9:  # the first block of each micro-batch comes while nothing else computes
            assert found.offload_s == pytest.approx(m * BLOCK / (0.8 * rate), rel=0.3)
        else:
            assert 0.5 * found.copied_s < found.offload_s < found.copied_s
        assert found.step_s == pytest.approx(without.step_s + found.offload_s, rel=0.01)


@pytest.mark.usefixtures("by_table")
@pytest.mark.parametrize("m", [1, 5])
def test_what_reading_takes(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is computed no time, but for the first block of a micro-batch, which is read and then copied. From a
    disk that is slower than the computation, block after block is read without a pause."""
    plan, known, bus = replace(ONE, batch=Batch(1, m, 8192)), step_seconds.rates_of, 0.8 * 63e9
    plan = replace(plan, offload=Offload(weights="nvme"))
    cluster = replace(H100, device=replace(H100.device, host_link_bytes_per_s=63e9))
    found, computed = price(EIGHT_B, plan, cluster), seconds(timed(EIGHT_B, replace(plan, offload=Offload()), cluster))
    for rate in (63e9, 1e9):
        monkeypatch.setattr(
            step_seconds, "rates_of", lambda *given, rate=rate: replace(known(*given), disk_bytes_per_s=(rate, 1))
        )
        took = seconds(timed(EIGHT_B, found, cluster))
        assert took.copied_s == pytest.approx(m * 63 * BLOCK * (1 / bus + 1 / rate))
        if rate == 63e9:
            assert took.offload_s == pytest.approx(m * BLOCK * (1 / bus + 1 / rate), rel=0.3)
        else:
            assert took.step_s == pytest.approx(m * 63 * BLOCK / rate, rel=0.02)
        assert took.step_s == pytest.approx(computed.step_s + took.offload_s, rel=0.01)


def test_what_has_no_backward_comes_once() -> None:
    """The first eight blocks, frozen whole below all that is trained."""
    plan = replace(ONE, lora=None, frozen=("embed.*", "layers.[0-7].*"))
    found = price(EIGHT_B, plan, H100)
    assert found.estimate.host == {"weights": 8 * 2 * BLOCK}, "in fp32"
    assert seconds(timed(EIGHT_B, found, H100)).copied_s == pytest.approx(8 * 2 * BLOCK / (0.8 * 63e9))


STEM, TAIL = 4 * 128_256 * 4096, 4 * (128_256 + 1) * 4096


@pytest.mark.parametrize(("tier", "weights"), [("host", "host"), ("nvme", "host"), ("nvme", "nvme")])
@pytest.mark.parametrize("m", [1, 4])
def test_trained_weights_by_hand(tier: str, weights: str, m: int) -> None:
    """In fp32. On the host the optimizer's copies are what waits there; on NVMe they are in the file, and so is, if it
    is to be, what waits: once. Of the device's
    weights the ends stay, which alone are copied back after the step; gradients of each micro-batch leave, and those
    after the first go through two buffers to their sums."""
    plan = replace(ONE, lora=None, batch=Batch(1, m, 8192), remat=Remat("full"))
    where = Offload(tier, weights=weights, sums="host" if m > 1 else "device")  # type: ignore[arg-type]
    found = price(EIGHT_B, replace(plan, offload=where), H100)
    blocks, whole, memory = 32 * 2 * BLOCK, 32 * 2 * BLOCK + STEM + TAIL, found.estimate.memory
    assert memory["weights"] == STEM + TAIL and memory["gathered"] == 2 * BLOCK + 2 * 4096, "a block, and a norm"
    assert memory["gradients"] == (STEM if m > 1 else 0), "what left last of the micro-batch before"
    assert not memory["moments"]
    buffers = 2 * STEM if m > 1 else 0
    counts = 4 * (32 * 9 + 3)
    if tier == "host":
        right = {"weights": whole, "gradients": whole, "moments": 2 * whole + counts}
        assert found.estimate.host == right | ({"buffers": buffers} if buffers else {})
    else:
        right = {"weights": blocks, "gradients": whole, "moments": counts, "buffers": buffers + BUFFER_BYTES}
        if weights == "nvme":
            right["buffers"] += 2 * (right.pop("weights") // 32 + 4096)
        assert found.estimate.host == right
        assert found.estimate.disk_bytes == found.estimate.written_bytes == 3 * whole
    cluster = replace(H100, device=replace(H100.device, host_link_bytes_per_s=63e9))
    bus = 0.8 * 63e9
    copied = (m * (63 * 2 * BLOCK + whole) + STEM + TAIL) / bus
    copied += m * 63 * 2 * BLOCK / 5e9 if weights == "nvme" else 0.0
    assert seconds(timed(EIGHT_B, found, cluster)).copied_s == pytest.approx(copied)


def test_sums_that_are_made_slowly_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all micro-batches but the first, two reads and a write a number; quick ones are hidden."""
    plan = replace(ONE, lora=None, batch=Batch(1, 4, 8192), offload=Offload("host", weights="host", sums="host"))
    found, known, waited = price(EIGHT_B, plan, H100), step_seconds.rates_of, []
    for rate in (1e12, 1e9):
        monkeypatch.setattr(
            step_seconds, "rates_of", lambda *given, rate=rate: replace(known(*given), host_bytes_per_s=rate)
        )
        waited.append(seconds(timed(EIGHT_B, found, H100)).offload_s)
    added = 3 * 3 * (32 * 2 * BLOCK + STEM + TAIL) / 1e9
    assert waited[0] < added / 100 and waited[1] - waited[0] == pytest.approx(added, rel=0.1)


@pytest.mark.parametrize("rate", [63e9, 1e9])
def test_what_copies_of_stages_take(rate: float) -> None:
    """Of the slower stage's blocks twice for each micro-batch; a slow bus is waited for, and along no axis."""
    plan = replace(ONE, layout=Layout(pp=2), pipeline=Pipeline("1f1b", 1, (16, 16)), batch=Batch(1, 4, 8192))
    two = parse_cluster("2xH100")
    cluster = replace(two, device=replace(two.device, host_link_bytes_per_s=rate))
    found = seconds(timed(EIGHT_B, price(EIGHT_B, plan, cluster), cluster))
    copied = 4 * 2 * 16 * BLOCK / (0.8 * rate)
    assert found.copied_s == pytest.approx(copied) and "" not in found.exposed_s
    assert found.offload_s > 0.5 * copied if rate == 1e9 else 0 < found.offload_s < 0.2 * copied


@pytest.mark.usefixtures("by_table")
def test_where_sums_are_made_is_searched() -> None:
    """Gradients of a 13B are more than a GPU of 24 GB has; of a 1B they stay on an H100: copies take time."""
    asked = ["train.seq_len=4096", "train.global_batch_size=16", "offload.optimizer=host", "offload.weights=host"]
    for model, machines, where in (
        ("Llama-2-13b-hf", "1xRTX-4090,host=512GB", "host"),
        ("Llama-3.2-1B", "1xH100", "device"),
    ):
        words = [*asked, "train.micro_batch_size=2", "precision=bf16"]
        found = choose(load_recipe(None, words), load_spec(f"meta-llama/{model}"), parse_cluster(machines))
        assert fits(found) and (found.offload.sums, found.batch.accumulation) == (where, 8)
        assert ("offload.sums" in found.why) is (where == "host")


@pytest.mark.parametrize("asked", [["offload.weights=host", "offload.optimizer=host"], ["offload.activations=host"]])
def test_where_nothing_fits_the_smallest_plan_is_told(asked: list[str]) -> None:
    """And not that what waits is refused beside other settings, all of which would hold more."""
    found = choose(load_recipe(None, ["train.seq_len=4096", *asked]), load_spec("Llama-3.1-405B"), TWO_4090)
    assert not fits(found) and "the smallest" in found.why["shard.strategy"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing frozen": ({"lora": None}, "here the device updates all", "offload.optimizer=host"),
    "on NVMe": ({"lora": None, "offload": Offload(weights="nvme")}, "wait on NVMe if they", "offload.optimizer=nvme"),
    "updated in memory": (
        {"offload": Offload("host", weights="nvme")},
        "what the host updates in its memory does not wait on NVMe",
        "offload.optimizer=none",
    ),
    "zero1": ({"layout": Layout(dp_shard=2), "shard": Shard("zero1")}, "`strategy: zero1`", "parallel.strategy=zero3"),
    "zero2": ({"layout": Layout(dp_shard=2), "shard": Shard("zero2")}, "`strategy: zero2`", "parallel.strategy=zero3"),
    "kept": (
        {"layout": Layout(dp_shard=2), "shard": Shard("zero3", reshard_after_forward=False)},
        "`reshard_after_forward: false` keeps them gathered",
        "reshard_after_forward=true",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    more, what, fix = REFUSED[name]
    assert check(EIGHT_B, ONE, H100) == []
    [problem] = check(EIGHT_B, replace(ONE, **more), H100)
    assert (problem.code, problem.where) == ("PLAN028", "offload.weights")
    assert what in problem.what and f"none, or `{fix}`" == problem.fix
    assert check(EIGHT_B, replace(ONE, **(more | {"offload": Offload()})), H100) == []


ASKED = ["lora.rank=16", "lora.frozen=nf4", "train.seq_len=4096", "train.global_batch_size=2"]


def test_a_70b_in_4_bits_on_two_gpus_of_24_gb() -> None:
    """Without, nothing fits, and what would make it fit is named; with it no pipelines are tried."""
    there, here = (
        choose(load_recipe(None, [*ASKED, f"offload.weights={where}"]), SEVENTY_B, TWO_4090)
        for where in ("host", "none")
    )
    assert fits(there) and not fits(here)
    assert there.offload == Offload(weights="host") and there.why["offload.weights"] == "pinned"
    assert techniques.pins(load_recipe(None, ASKED), there)["offload.weights"] == ("host", "none")
    assert "weights of blocks" in execution(there)
    found = {each.change: each for each in remedies(load_recipe(None, ASKED), SEVENTY_B, TWO_4090, here)}
    assert fits(found["offload.weights=host"].plan)


def test_bounds_leave_out_what_waits() -> None:
    """Where the recipe says so; of a 70B in 4 bits, frozen weights alone are more than the memory. Stages are tried."""
    for asked in ("none", "host"):
        recipe = load_recipe(None, [*ASKED, f"offload.weights={asked}"])
        assert Search(recipe, SEVENTY_B, TWO_4090).pipelines
        plan = replace(ONE, layout=Layout(dp_replicate=2), lora=Lora(nf4=True, frozen="bf16"))
        plan = replace(plan, offload=Offload(weights=asked))  # type: ignore[arg-type]
        assert LowerBounds(SEVENTY_B, TWO_4090).may_fit(plan, 1.0) is (asked == "host")


NAMES = {"offload: {weights: TIER}", "offload_param_device: TIER", "zero_optimization: {offload_param: {device: TIER}}"}


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("line", sorted(NAMES))
def test_it_is_read_by_the_names_that_others_give_it(line: str, tier: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(line.replace("TIER", "cpu" if tier == "host" and "param" in line else tier))
    assert read_recipe(tmp_path / "r.yaml", ()).recipe.offload.weights == tier


def test_the_optimizer_that_is_searched_beside_weights_on_nvme_is_there_too() -> None:
    words = ["train.seq_len=4096", "train.global_batch_size=1", "offload.optimizer=auto", "offload.weights=nvme"]
    found = choose(load_recipe(None, words), EIGHT_B, H100)
    assert fits(found) and (found.offload.optimizer, found.offload.weights) == ("nvme", "nvme")
    assert [words.rpartition(" on ")[2] for words in found.offload.words] == ["NVMe"] * 2
    assert found.offload.without_files == Offload("host", weights="host", sums=found.offload.sums)


class Scaled(nn.Linear):
    """A frozen matrix, and a number that is trained."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * super().forward(x).tanh()


def waiting(count: int, *, plain: bool = False) -> tuple[nn.Sequential, WaitingWeights, list[list[int]]]:
    """Blocks; and, as one computes forward or its backward begins, the numbers of those that are on the device."""
    torch.manual_seed(0)
    model, waits, seen = (
        nn.Sequential(*(Scaled() for _ in range(count))),
        WaitingWeights(trained=False),
        list[list[int]](),
    )

    def look(*given: object) -> None:
        seen.append([i for i, block in enumerate(model) if block.weight.untyped_storage().nbytes()])

    for block in () if plain else model:
        values = block.weight.detach().clone()
        waits.add(block)
        put(block.weight, values)
    for block in model:
        block.register_forward_pre_hook(look)
        block.scale.register_hook(look)
    return model, waits, seen


def test_two_blocks_are_here_at_a_time() -> None:
    """Those of the last stay from forward to backward; what backward read last goes when it is over."""
    model, waits, seen = waiting(4)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert seen[:4] == [[0, 1], [1, 2], [2, 3], [3]]
    assert seen[4:] == [[2, 3], [1, 2], [0, 1], [0]]
    assert waits.copied == {("host", "device"): 7 * 64} and len(waits.rooms) == 4
    waits.rest()
    assert not any(block.weight.untyped_storage().nbytes() for block in model)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_updated_elsewhere_reaches_what_waits(on_disk: bool, tmp_path: Path) -> None:
    """Whichever optimizer has updated it; of what does not wait, the device."""
    model, waits = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), WaitingWeights(trained=True)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    waits.add(model[0])
    for parameter, value in zip(model.parameters(), values, strict=True):
        put(parameter, value)
    host = HostWeights(model.parameters(), early=False, cut=False, directory=tmp_path if on_disk else None)
    for parameter in model.parameters():
        host.of(parameter).data.add_(1.0)
    host.give_back()
    assert all(torch.equal(kept(p), value + 1.0) for p, value in zip(model.parameters(), values, strict=True))
    assert host.copied == {("host", "device"): 80}, "those of the second alone"


def test_forwards_alone_leave_nothing_here() -> None:
    """Also between a forward and its backward."""
    model, _, seen = waiting(3)
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert seen == [[0, 1], [1, 2], [2]] and not any(block.weight.untyped_storage().nbytes() for block in model)
    x = torch.randn(2, 4)
    loss = model(x).sum()
    with torch.no_grad():
        model(x)
    loss.backward()
    right, *_ = waiting(3, plain=True)
    right(x).sum().backward()
    assert all(torch.equal(a.scale.grad, b.scale.grad) for a, b in zip(model, right, strict=True))


def test_what_backward_does_not_reach_does_not_come_again() -> None:
    model, waits, seen = waiting(4)
    model[0].scale.requires_grad_(False)
    model[1].scale.requires_grad_(False)
    model(torch.randn(2, 4)).sum().backward()
    assert waits.copied == {("host", "device"): (4 + 1) * 64} and seen[4:] == [[2, 3], [2]]


def test_of_a_model_no_more_than_a_block_is_here_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each block is given to the host, those before it have no memory here, and those after it none yet."""
    add, found = WaitingWeights.add, list[tuple[int, int]]()
    plan = Plan(batch=Batch(1, 1, 8), lora=Lora(4, 8.0, nf4=True), offload=Offload(weights="host"))

    def watched(self: WaitingWeights, block: nn.Module) -> None:
        frozen = [p for p in block.parameters() if not p.requires_grad]
        before = [each[0] for one in self._blocks for each in one]
        found.append((sum(t.untyped_storage().nbytes() for t in before), sum(p.nbytes for p in frozen)))
        add(self, block)

    monkeypatch.setattr(WaitingWeights, "add", watched)
    [model] = build_parts(DENSE, plan, Meshes(), CPU)
    assert len(found) == DENSE.num_hidden_layers and all(before == 0 < own for before, own in found)
    for name, parameter in model.named_parameters():
        there = parameter.requires_grad or not name.startswith("layers.")
        assert (parameter.untyped_storage().nbytes() > 0) is there and kept(parameter).untyped_storage().nbytes()


@pytest.mark.prove
def test_a_run_that_goes_on_and_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and the model have what is frozen too; validations between steps change nothing. Where weights are on
    a disk, a save's copy is made there too."""
    frozen, found = ("layers.0.*", "layers.1.mlp.*"), {}
    on_disk: set[tuple[str, bool]] = set()

    class Told(begin.RunCheckpoints):
        def __init__(self, *given: Any, staged_on_disk: bool) -> None:
            super().__init__(*given, staged_on_disk=staged_on_disk)
            on_disk.add((where, staged_on_disk))

    monkeypatch.setattr(begin, "RunCheckpoints", Told)

    def fail(state: TrainState, stats: StepStats) -> None:
        if state.step == 4:
            raise KeyboardInterrupt

    for where in ("none", "host", "nvme"):
        given = {"model": {"frozen": [*frozen]}, "offload": {"weights": where}, "evaluate": {"eval_steps": 2}}
        made, plan = small_run.recipe(tmp_path, where, **given), replace(small_run.plan(), frozen=frozen)
        plan = replace(plan, offload=Offload(weights=where))  # type: ignore[arg-type]
        if where != "none":
            with pytest.raises(KeyboardInterrupt):
                train(made, plan, (fail,))
        train(made, plan)
        run = small_run.directory(made)
        found[where] = small_run.numbers(run), small_run.weights_hash(run)
    assert found["host"] == found["nvme"] == found["none"]
    assert on_disk == {("none", False), ("host", False), ("nvme", True)}
