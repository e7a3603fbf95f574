"""What a run takes, by hand; and what is refused on the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import UsageError
from shardwise.models.lookup import load_spec
from shardwise.planner.length import Length, length_of, read_prices, read_tokens, with_reference
from shardwise.planner.search import choose
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.devices import Device
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Batch, Estimate, Plan, Seconds
from tests.said import refusal, shows

SECONDS = Seconds(step_s=4.5, low_s=4.0, high_s=5.4)
PLAN = Plan(
    layout=Layout(dp_shard=8), batch=Batch(4, 16, 8192), estimate=Estimate(seconds=SECONDS)
)  # 4 x 16 x 8 sequences of 8,192 tokens: 4,194,304 tokens a step
H100 = parse_cluster("8xH100")


def test_so_many_tokens_by_hand() -> None:
    """10^10 / 4,194,304 is 2,384.2 steps; 2,385 x 4.5 s are 10,732.5 s, of 8 GPUs 23.85 GPU-hours."""
    found = length_of(PLAN, H100, "--tokens", None, 10**10, 2.0)
    assert (found.steps, found.tokens) == (2385, 2385 * 4_194_304)
    assert (found.seconds, found.low_s, found.high_s) == pytest.approx((10_732.5, 9_540.0, 12_879.0))
    assert found.gpu_hours == pytest.approx(23.85) and found.dollars == pytest.approx(47.70)
    assert length_of(PLAN, H100, "--tokens", None, 1).steps == 1
    assert length_of(PLAN, H100, "--tokens", None, 2 * 4_194_304).steps == 2
    assert length_of(PLAN, H100, "--tokens", None, 2 * 4_194_304 + 1).steps == 3


def test_what_is_unknown_is_none() -> None:
    no_seconds = replace(PLAN, estimate=Estimate())
    known = {"set_by": "train.max_steps", "steps": 100, "tokens": 419_430_400}
    assert length_of(no_seconds, H100, "train.max_steps", 100) == Length(**known)  # type: ignore[arg-type]
    no_band = replace(PLAN, estimate=Estimate(seconds=Seconds(step_s=4.5)))
    found = length_of(no_band, H100, "train.max_steps", 100)
    assert (found.seconds, found.low_s, found.high_s, found.dollars) == (450.0, None, None, None)
    on_cpus = length_of(PLAN, Cluster(Device("CPU", 2**30), devices_per_node=8, kind="cpu"), "train.max_steps", 100)
    assert (on_cpus.seconds, on_cpus.gpu_hours, on_cpus.dollars) == (450.0, None, None)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("10B", 10**10),
        ("10b", 10**10),
        ("1.5T", 15 * 10**11),
        ("300M", 3 * 10**8),
        ("8k", 8_000),
        ("2e9", 2 * 10**9),
        ("1.2E+3", 1_200),
        ("4096", 4_096),
        ("10_000_000", 10**7),
        ("10,000,000", 10**7),
        (" 10 B ", 10**10),
        ("1.005B", 1_005_000_000),
        ("1000000T", 10**18),
    ],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert read_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "B", "ten", "0", "0B", "-10B", "nan", "inf", "1e99", "1.5", "10BB", "10 B tokens", "1e-3B", "2000000T"]
)
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_tokens(text)
    problem = caught.value.problems[0]
    assert (problem.code, problem.where, problem.fix) == ("CLI001", "--tokens", "write 10B, 1.5T, 300M or 2e9")
    assert f"`{text}`" in problem.what


def test_prices_by_any_name_of_a_gpu() -> None:
    assert read_prices([], H100) == {}
    assert read_prices(["h100=2.5"], H100) == {"H100-SXM-80GB": 2.5}
    assert read_prices(["H100 80GB HBM3=$2"], H100) == {"H100-SXM-80GB": 2.0}
    several = {"H100-SXM-80GB": 2.5, "A100-SXM-80GB": 1.5, "RTX 4090": 0.4}
    assert read_prices(["A100=1.5, H100=2.5", "4090=0.4"], H100) == several
    assert read_prices(["H100=2.5", "H100-SXM=2.5"], H100) == {"H100-SXM-80GB": 2.5}
    pcie = parse_cluster("4xA100-PCIe-40GB")
    assert read_prices(["A100=2"], pcie)["A100-PCIe-40GB"] == 2.0
    assert read_prices(["A100=2", "A100-PCIe-40GB=1"], pcie)["A100-PCIe-40GB"] == 1.0
    unlisted = Cluster(Device("Quadro X", 2**30))
    assert read_prices(["Quadro X=1"], unlisted) == {"Quadro X": 1.0}


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ("A100=2", ["A100-SXM-80GB", "1x8xH100-SXM-80GB"], "H100"),
        ("H100 PCIe=2", ["H100-PCIe", "1x8xH100-SXM-80GB"], "H100"),
        ("H101=2", ["`H101`"], "H100-SXM-80GB?"),
        ("=2", ["``"], "known: "),
        ("2.5", ["`2.5`", "price", "dollars"], "--price H100-SXM-80GB=2.5"),
        ("H100=", ["`H100=`", "price"], "--price H100-SXM-80GB=2.5"),
        ("H100=cheap", ["`H100=cheap`", "price"], "--price H100-SXM-80GB=2.5"),
        ("", ["``", "price"], "--price H100-SXM-80GB=2.5"),
        ("H100=2,5", ["`5`", "price"], "--price H100-SXM-80GB=2.5"),
        ("H100=0", ["`H100=0`", "above 0"], "--price H100-SXM-80GB=2.5"),
        ("H100=-1", ["`H100=-1`", "above 0"], "--price H100-SXM-80GB=2.5"),
        ("H100=nan", ["`H100=nan`", "above 0"], "--price H100-SXM-80GB=2.5"),
        ("H100=inf", ["`H100=inf`", "above 0"], "--price H100-SXM-80GB=2.5"),
        ("H100=2,H100-SXM=3", ["two", "H100-SXM-80GB", "$2", "$3"], "one of them"),
    ],
)
def test_prices_that_are_refused(given: str, what: list[str], fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_prices([given], H100)
    problem = caught.value.problems[0]
    assert (problem.code, problem.where) == ("CLI001", "--price")
    assert shows(problem.what, *what) and fix in problem.fix


def test_a_machine_without_gpus_has_no_price() -> None:
    with pytest.raises(UsageError, match=refusal("CLI001", "`H100=2`", "1x2xCPU")):
        read_prices(["H100=2"], parse_cluster("2xCPU"))


@pytest.mark.parametrize(("words", "share"), [([], (1 / 4, 1 / 3)), (["lora.rank=16"], (0.3, 0.5))])
def test_hours_of_pairs_include_the_pass_of_the_reference(words: list[str], share: tuple[float, float]) -> None:
    """A forward over what is read, once: about a third of a step's operations, of adapters half; of two epochs half as
    much; and nothing of other methods."""
    spec = load_spec("meta-llama/Llama-3.2-1B")
    asked = ["model=meta-llama/Llama-3.2-1B", "method=dpo", "train.seq_len=2048", "train.global_batch_size=8"]
    plan = choose(load_recipe(None, [*asked, *words]), spec, parse_cluster("1xH100"))
    bare = length_of(plan, H100, "train.max_steps", 100, price=2.0)
    found = with_reference(bare, plan, spec, 1.0)
    assert found.reference_s is not None and found.seconds is not None and bare.seconds is not None
    assert share[0] < found.reference_s / bare.seconds < share[1]
    assert found.seconds == pytest.approx(bare.seconds + found.reference_s)
    assert found.dollars == pytest.approx((bare.dollars or 0) * found.seconds / bare.seconds)
    half = with_reference(bare, plan, spec, 0.5)
    assert half.reference_s == pytest.approx(found.reference_s / 2)
    assert with_reference(bare, replace(plan, loss="cross_entropy"), spec, 1.0) == bare
