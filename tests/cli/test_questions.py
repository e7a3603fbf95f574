"""Questions around a plan are answered as a search by hand answers them."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import combinations, pairwise
from math import exp, hypot, log
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.cli.deadline import Curve
from shardwise.cli.questions import PlanRow
from shardwise.errors import ConfigError
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import seconds
from shardwise.planner.length import Length
from shardwise.planner.search import Search
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.devices import rented
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Plan
from tests.said import refuses, shows

ONE_B, EIGHT_B, MIXTURE = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"
SEVENTY_B, LARGEST = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"
BATCH = ["train.seq_len=4096", "train.global_batch_size=64"]


def by_hand(model: str, words: list[str], cluster: Cluster) -> Plan:
    """The plan that a search finds."""
    recipe = load_recipe(None, [f"model={model}", *words])
    return Search(recipe, load_spec(model), cluster).best


def same(row: dict[str, Any], plan: Plan, cluster: Cluster) -> None:
    """Hold a row of an answer against a plan that was found by hand."""
    assert row["plan"]["cluster"] == str(cluster) and row["plan"]["estimate"]["peak_bytes"] == plan.estimate.peak_bytes
    assert row["plan"]["layout"]["tp"] == plan.layout.tp and row["plan"]["layout"]["pp"] == plan.layout.pp
    found = seconds(plan)
    assert (row["step_s"], row["low_s"], row["high_s"]) == (found.step_s, found.low_s, found.high_s)


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Any:
    """Ask `plan` something: its answer as an object, or the problem and the exit code."""

    def asked(*words: str) -> Any:
        code = main(["plan", *words, "--json"])
        found = json.loads(capfd.readouterr().out)
        return found if code == 0 else (code, found["error"]["problems"][0])

    return asked


COMPARED = [
    (EIGHT_B, ["8xH100", "4xB200", "2x8xA100-80GB+400Gb/node"]),
    (ONE_B, ["1xRTX-4090", "2xL40S,host=64GB", "16x8xH200"]),
    (MIXTURE, ["8xMI300X", "2x8xH100"]),
    (SEVENTY_B, ["8xA100", "8x8xH100", "16x8xH100"]),
    (LARGEST, ["64x8xH100", "128x8xH200"]),
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "machines"), COMPARED)
def test_machines_beside_one_another(model: str, machines: list[str], ask: Any) -> None:
    check_compared(model, machines, 1024, ask)


def test_two_machines_beside_one_another(ask: Any) -> None:
    check_compared(ONE_B, ["2xL40S,host=64GB", "4xA100"], 64, ask)


def check_compared(model: str, machines: list[str], batch: int, ask: Any) -> None:
    """Each row is the plan of its machines, with what 10 B tokens take there by arithmetic, and two rows are a tie
    unless their rates differ by more than both bands together."""
    words, prices = (
        [*BATCH, f"train.global_batch_size={batch}"],
        ["--price", "H100=2,H200=3,A100=1.5,B200=5,L40S=1,MI300X=2,RTX-4090=0.4"],
    )
    found = ask(f"--model={model}", *words, "--compare", ",".join(machines), "--tokens", "10B", *prices)
    assert found["question"] == "compare" and {row["name"] for row in found["rows"]} == set(machines)
    each: dict[str, tuple[Plan, float, float]] = {}
    for row in found["rows"]:
        cluster = parse_cluster(row["name"])
        plan = by_hand(model, words, cluster)
        same(row, plan, cluster)
        run_s = -(-(10**10) // (batch * 4096)) * seconds(plan).step_s
        assert row["length"]["seconds"] == pytest.approx(run_s)
        assert row["length"]["gpu_hours"] == pytest.approx(run_s * cluster.world / 3600)
        dollars = row["length"]["gpu_hours"] * row["length"]["dollars_per_gpu_hour"]
        assert row["length"]["dollars"] == pytest.approx(dollars)
        assert row["fits"] == (
            "fits" if plan.estimate.share <= 0.8 else "tight" if plan.estimate.share <= 1 else "does not fit"
        )
        if plan.estimate.share <= 1:
            each[row["name"]] = plan, row["length"]["seconds"], dollars
    for what, at in (("seconds", 1), ("dollars", 2)):
        assert found["least"][what] == min(each, key=lambda name: each[name][at])
        ties = {frozenset(pair) for pair in found["ties"][what]}
        for one, other in combinations(each, 2):
            (fast, less, slow, more) = (one, each[one][at], other, each[other][at])
            if less > more:
                fast, less, slow, more = slow, more, fast, less
            late = seconds(each[fast][0]).high_s / seconds(each[fast][0]).step_s
            early = seconds(each[slow][0]).step_s / seconds(each[slow][0]).low_s
            told = more / less > exp(hypot(log(late), log(early)))
            assert (frozenset((one, other)) in ties) is not told
    rates = [row["tokens_per_s"] for row in found["rows"] if row["fits"] == "fits"]
    assert rates == sorted(rates, reverse=True)


TUNED = ["method=sft", "data.path=mine.jsonl", "train.seq_len=4096"]
LEAST = [
    (EIGHT_B, TUNED, ["RTX-4090", "V100-16GB"]),
    (SEVENTY_B, [*TUNED, "lora=16", "lora.frozen=nf4"], ["L40S"]),
    (MIXTURE, BATCH, ["A100-80GB"]),
    (LARGEST, [*BATCH, "train.global_batch_size=1024", "offload.optimizer=host"], ["MI300X"]),
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "words", "gpus"), LEAST)
def test_the_least_that_holds_it(model: str, words: list[str], gpus: list[str], ask: Any) -> None:
    found = ask(f"--model={model}", *words, "--smallest")
    assert len(found["rows"]) > 12 and sum(len(row["devices"]) for row in found["rows"]) == len(rented())
    for gpu in gpus:
        check_least(model, words, gpu, found)


def test_the_least_of_one_gpu_that_holds_it(ask: Any) -> None:
    found = ask(f"--model={ONE_B}", *TUNED, "--smallest", "--cluster", "T4")
    assert len(found["rows"]) == 1
    check_least(ONE_B, TUNED, "T4", found)


@pytest.mark.prove
def test_what_one_gpu_refuses_another_may_serve(ask: Any) -> None:
    """A larger GPU without float8 says nothing of a smaller one that has it, and stands in no row with it."""
    found = ask(f"--model={ONE_B}", *BATCH, "precision.products=float8", "--smallest")
    least = {name: row["machines"][""] for row in found["rows"] for name in row["devices"]}
    one = {"nodes": 1, "devices_per_node": 1}
    assert least["H200-SXM"] == least["H100-SXM-80GB"] == least["H100-PCIe"] == one
    assert {name for name, machines in least.items() if machines} == {"H200-SXM", "H100-SXM-80GB", "H100-PCIe"}
    assert set(least) == rented() and sum(len(row["devices"]) for row in found["rows"]) == len(rented())


def test_a_node_of_the_least_is_as_large_as_that_of_the_machines(ask: Any) -> None:
    found = ask(f"--model={SEVENTY_B}", *BATCH, "--smallest", "--cluster", "2x4xA100-80GB")
    each = [machines["devices_per_node"] for machines in found["rows"][0]["machines"].values() if machines]
    assert each and max(each) == 4


def check_least(model: str, words: list[str], gpu: str, found: Any) -> None:
    """Under the keys that the answer names, with offload and without, and of a fine-tune with adapters and without,
    whole searches find a plan that fits on its machines, and none on half or a quarter of them."""
    name = parse_cluster(gpu).device.name
    (row,) = (row for row in found["rows"] if name in row["devices"])
    keys = list(row["machines"])
    assert keys[0] == "" and any("offload" in each for each in keys)
    assert any("lora.rank" in each for each in keys) is (words[: len(TUNED)] == TUNED)
    assert any("=none" in each for each in keys) is any(word.startswith("offload.") for word in words)
    sizes = [(1, 1), (1, 2), (1, 4), *((2**power, 8) for power in range(8))]
    for more, machines in row["machines"].items():
        last = len(sizes) - 1 if machines is None else sizes.index((machines["nodes"], machines["devices_per_node"]))
        for nodes, each in sizes[max(0, last - 2) : last + 1]:
            share = float("inf")
            with suppress(ConfigError):
                share = by_hand(model, [*words, *more.split()], parse_cluster(f"{nodes}x{each}x{gpu}")).estimate.share
            assert (share <= 0.8) is (machines is not None and (nodes, each) == sizes[last]), (gpu, more, nodes, each)


NOT_TAKEN = [
    (EIGHT_B, BATCH, "8xH100", ["parallel.tp=8"]),
    (EIGHT_B, BATCH, "2x8xA100", ["strategy=zero3", "recompute=full"]),
    (EIGHT_B, BATCH, "8xH200", ["train.global_batch_size=256"]),
    (MIXTURE, BATCH, "2x8xH100", ["parallel.ep=4"]),
    (SEVENTY_B, BATCH, "8xH200", ["parallel.pp=2"]),
    (LARGEST, [*BATCH, "train.global_batch_size=1024"], "128x8xH100", ["parallel.tp=8", "parallel.pp=1"]),
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "words", "machines", "pins"), NOT_TAKEN)
def test_what_was_not_taken(model: str, words: list[str], machines: str, pins: list[str], ask: Any) -> None:
    check_not_taken(model, words, machines, pins, ask)


def test_tensor_parallelism_was_not_taken(ask: Any) -> None:
    check_not_taken(ONE_B, BATCH, "4xL40S", ["parallel.tp=4"], ask)


def check_not_taken(model: str, words: list[str], machines: str, pins: list[str], ask: Any) -> None:
    """Both plans are those of searches with the pins and without; the differences of their seconds, for as many tokens,
    add up to that of a step, and those of their bytes to that of the peak."""
    found = ask(f"--model={model}", *words, "--cluster", machines, "--why-not", ",".join(pins))
    cluster = parse_cluster(machines)
    plans = by_hand(model, words, cluster), by_hand(model, [*words, *pins], cluster)
    assert [row["name"] for row in found["rows"]] == ["chosen", " ".join(pins)]
    for row, plan in zip(found["rows"], plans, strict=True):
        same(row, plan, cluster)
    tokens = [plan.batch.global_batch_size(plan.layout.dp) * plan.batch.seq_len for plan in plans]
    steps = seconds(plans[0]).step_s, seconds(plans[1]).step_s * tokens[0] / tokens[1]
    assert found["seconds"].pop("a step") == pytest.approx(steps)
    parts = [sum(each) for each in zip(*found["seconds"].values(), strict=True)]
    assert parts == pytest.approx(steps, rel=5e-3)
    assert tuple(found["memory"].pop("in all")) == tuple(plan.estimate.peak_bytes for plan in plans)
    held = [sum(each) for each in zip(*found["memory"].values(), strict=True)]
    assert held == [plan.estimate.peak_bytes for plan in plans]
    for axis, (_, size) in found["sent"].items():
        sent = [one.bytes for one in plans[1].estimate.traffic if one.axis == axis and one.category != "control"]
        assert size == pytest.approx(sum(sent) * tokens[0] / tokens[1])
    assert found["same"] is False


def test_what_has_no_price_ties_with_nothing(ask: Any, capfd: Any) -> None:
    words = [f"--model={ONE_B}", *BATCH, "--compare", "8xH100,8xH200,4xB200", "--price"]
    found = ask(*words, "B200=100")
    assert found["least"]["dollars"] == "4xB200" and found["ties"]["dollars"] == [] != found["ties"]["seconds"]
    assert main(["plan", *words, "B200=100"]) == 0
    assert shows(capfd.readouterr().out, "the cheapest", "with a price: 4xB200\n")


PINNED = [
    (EIGHT_B, "8xH100", ["parallel.tp=8", "recompute.mode=full", "train.micro_batch_size=1"]),
    (SEVENTY_B, "8x8xH100", ["parallel.sequence_parallel=false", "parallel.pp=4", "parallel.stages_per_rank=2"]),
    (MIXTURE, "2x8xH200", ["parallel.strategy=zero3", "parallel.ep=8", "offload.optimizer=host"]),
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "machines", "pins"), PINNED)
def test_what_pins_cost(model: str, machines: str, pins: list[str], ask: Any) -> None:
    check_pins(model, machines, pins, ask)


def test_what_two_pins_cost(ask: Any) -> None:
    check_pins(ONE_B, "4xA100", ["parallel.strategy=zero3", "recompute.mode=full"], ask)


def check_pins(model: str, machines: str, pins: list[str], ask: Any) -> None:
    """Each row is the plan that a search finds without that line of the recipe, and what it saves is of the time."""
    found = ask(f"--model={model}", *BATCH, *pins, "--cluster", machines, "--pins")
    left = [pins, *([other for other in pins if other != pin] for pin in pins), []]
    names = ["as it is", *(f"without {pin}" for pin in pins), "without any"]
    cluster, steps = parse_cluster(machines), list[float]()
    for name, row, kept in zip(names, found["rows"], left, strict=True):
        plan = by_hand(model, [*BATCH, *kept], cluster)
        same(row, plan, cluster)
        assert row["name"] == name
        steps.append(seconds(plan).step_s)
    assert found["rows"][0]["fits"] == "fits"
    for name, row, step in zip(names[1:], found["rows"][1:], steps[1:], strict=True):
        saved = 1 - step / steps[0] if row["fits"] == "fits" else None
        assert found["saved"][name] == pytest.approx(saved), "the batch is the same"


def test_the_words_on_pins(capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"--model={ONE_B}", *BATCH, "--cluster", "4xA100", "--pins"]
    assert main(["plan", *words, "parallel.tp=4", "parallel.schedule=1f1b"]) == 0
    out = capfd.readouterr().out
    table, _, told = out.partition("\n\nwithout")
    assert [line[:12] for line in table.splitlines()[3:]] == ["as it is    ", *["without para"] * 2, "without any "]
    assert "parallel.tp=4 a token takes" in told and "schedule" not in told, "what costs nothing is not told of"
    assert main(["plan", *words]) == 2
    assert refuses(capfd.readouterr().err, "CLI001", "pins nothing", where="--pins", fix="parallel.tp=8")


SWEPT = [
    (EIGHT_B, "8xH100", "train.seq_len=4k..128k", [2**power for power in range(12, 18)]),
    (EIGHT_B, "2x8xA100", "global-batch-size=16,96..200", [16, 96, 192, 200]),
    (MIXTURE, "2x8xH200", "ep=1,2,8", [1, 2, 8]),
    (SEVENTY_B, "8x8xH100", "train.seq_len=8k,64k", [8192, 65536]),
    (LARGEST, "128x8xH100", "parallel.tp=4..8", [4, 8]),
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "machines", "asked", "values"), SWEPT)
def test_a_key_swept(model: str, machines: str, asked: str, values: list[int], ask: Any) -> None:
    batch = ["train.global_batch_size=1024"] if model == LARGEST else []
    check_swept(model, [*BATCH, *batch], machines, asked, values, ask)


def test_the_length_of_sequences_swept(ask: Any) -> None:
    check_swept(ONE_B, BATCH, "1xRTX-4090", "seq_len=2k..8k", [2048, 4096, 8192], ask)


def check_swept(model: str, words: list[str], machines: str, asked: str, values: list[int], ask: Any) -> None:
    found, cluster = ask(f"--model={model}", *words, "--cluster", machines, "--sweep", asked), parse_cluster(machines)
    assert [int(row["name"].partition("=")[2]) for row in found["rows"]] == values
    plans = [by_hand(model, [*words, row["name"]], cluster) for row in found["rows"]]
    for row, plan in zip(found["rows"], plans, strict=True):
        same(row, plan, cluster)
    shares = [plan.estimate.share <= 0.8 for plan in plans]
    borders = [i for i in range(len(shares) - 1) if shares[i] is not shares[i + 1]]
    assert found["borders"] == [[found["rows"][i]["name"], found["rows"][i + 1]["name"]] for i in borders]


IN_TIME = [
    (EIGHT_B, 480, "A100", "100B", "21d"),
    (ONE_B, 480, "8xRTX-4090+10Gb/node", "3B", "30h"),
    (MIXTURE, 512, "H200", "50B", "10d"),
    (SEVENTY_B, 1536, "H100", "200B", "30d"),
    (LARGEST, 2048, "8xH200", "500B", "60d"),
]


@pytest.mark.prove
@pytest.mark.parametrize(("model", "batch", "gpu", "tokens", "deadline"), IN_TIME)
def test_in_time(model: str, batch: int, gpu: str, tokens: str, deadline: str, ask: Any) -> None:
    check_in_time(model, batch, gpu, [tokens, deadline], ask)


def test_in_time_on_a_few_gpus(ask: Any) -> None:
    check_in_time(ONE_B, 48, "L40S", ["100M", "150min"], ask)


def check_in_time(model: str, batch: int, gpu: str, run: list[str], ask: Any) -> None:
    """Searches by hand: of one GPU, of twice as many until a node is full, then of every number of nodes, the first
    that ends in time; then of twice as many each time. What each costs, what it adds to its share, and which is in
    time at the slow end of its band, is arithmetic."""
    words = [*BATCH, f"train.global_batch_size={batch}"]
    prices = ["--price", f"{gpu.partition('+')[0].removeprefix('8x')}=2"]
    asked = ["--cluster", gpu, "--tokens", run[0], "--deadline", run[1], *prices]
    found = ask(f"--model={model}", *words, *asked, "--budget", "1M")
    limit_s = float(run[1].rstrip("dhmin")) * {"d": 86400, "h": 3600, "n": 60}[run[1][-1]]
    steps = -(-int(float(run[0][:-1]) * {"M": 10**6, "B": 10**9}[run[0][-1]]) // (batch * 4096))
    assert found["deadline_s"] == limit_s and found["budget"] == 1e6
    each: dict[str, tuple[Cluster, Plan | None]] = {}

    def takes_s(cluster: Cluster) -> float:
        if str(cluster) not in each:
            with suppress(ConfigError):
                each[str(cluster)] = cluster, by_hand(model, words, cluster)
        plan = each.get(str(cluster), (cluster, None))[1]
        return steps * seconds(plan).step_s if plan and plan.estimate.share <= 1 else float("inf")

    met = [row for row in found["rows"] if row["meets"]]
    fewest = met[0]["plan"]["layout"]
    world, start = fewest_gpus(met[0]), parse_cluster(gpu)
    sizes = [(1, 1), (1, 2), (1, 4), *((nodes, 8) for nodes in range(1, max(2, world // 8 + 1)))]
    tried = [start.resized(*size) for size in sizes if world // 2 <= size[0] * size[1] <= world]
    in_time = [cluster for cluster in tried if takes_s(cluster) <= limit_s]
    assert str(in_time[0]) == found["fewest"] and fewest["ranks_per_node"] == in_time[0].devices_per_node
    hours = {}
    for row in found["rows"]:
        if row["fits"] == "refused":
            continue
        cluster = parse_cluster(row["name"])
        found_s = takes_s(cluster)
        same(row, each[str(cluster)][1] or Plan(), cluster)
        assert row["meets"] is (found_s <= limit_s)
        hours |= {row["name"]: found_s * cluster.world / 3600} if row["meets"] else {}
        if row["meets"]:
            assert row["length"]["dollars"] == pytest.approx(2 * hours[row["name"]])
    assert found["cheapest"] == min(hours, key=lambda name: hours[name])
    assert found["affordable"] == [name for name, each_h in hours.items() if 2 * each_h <= 1e6]
    late = [row["name"] for row in met if row["length"]["high_s"] <= limit_s]
    assert found["sure"] == (late[0] if late else None)
    for one, other in pairwise(met):
        more = fewest_gpus(other) / fewest_gpus(one)
        assert more == 2
        pays = (one["length"]["seconds"] / other["length"]["seconds"] - 1) / (more - 1)
        assert other["pays"] == pytest.approx(pays) and (pays < 0.6) <= (other is met[-1])


def fewest_gpus(row: dict[str, Any]) -> int:
    """The GPUs of a row."""
    return parse_cluster(row["name"]).world


@pytest.mark.parametrize(
    ("words", "code", "where", "fix"),
    [
        (["--deadline", "soon", "--cluster", "H100"], "CLI001", "--deadline", "--deadline 14d"),
        (["--deadline", "0d", "--cluster", "H100"], "CLI001", "--deadline", "--deadline 14d"),
        (["--deadline", "14d"], "CLI001", "--cluster", "--cluster H100"),
        (["--deadline", "14d", "--cluster", "H10"], "CLU002", "--cluster", "did you mean"),
        (["--deadline", "14d", "--cluster", "H100"], "CLI001", "--tokens", "--tokens 1T"),
        (
            ["--deadline", "14d", "--cluster", "H100", "--budget", "9k"],
            "CLI001",
            "--budget",
            "--price H100-SXM-80GB=2.5",
        ),
        (
            ["--deadline", "14d", "--cluster", "H100", "--budget", "-9", "--price", "H100=2"],
            "CLI001",
            "--budget",
            "--budget 50k",
        ),
        (["--budget", "9k"], "CLI001", "--budget", "--deadline 14d"),
        (["--deadlin", "14d"], "CLI001", "the command line", "`--deadline`"),
        (["--whynot=tp=2"], "CLI001", "the command line", "`--why-not`"),
        (["--deadline", "1min", "--cluster", "H100", "--tokens", "100T"], "CLI001", "--deadline", "fewer --tokens"),
        (["--sweep", "optim.name=3"], "CLI001", "--sweep", "--sweep train.seq_len=4k..128k"),
        (["--sweep", "train.sq_len=4k"], "CFG001", "--sweep", "`train.seq_len`"),
        (["--sweep", "seq_len=8k..4k"], "CLI001", "--sweep", "--sweep train.seq_len=1..8"),
        (["--sweep", "seq_len=0..4k"], "CLI001", "--sweep", "--sweep train.seq_len=1..8"),
        (["--sweep", "seq_len"], "CLI001", "--sweep", "--sweep train.seq_len=1,2,4"),
        (["--sweep", "seq_len=1k,nan"], "CLI001", "--sweep", "--sweep train.seq_len=1,2,4"),
        (["--sweep", "max_steps=1..1e12"], "CLI001", "--sweep", "fewer of them"),
        (["--sweep", "max_steps=1..1t"], "CLI001", "--sweep", "--sweep train.max_steps=1,2,4"),
        (["--sweep", "seq_len=-4", "--cluster", "8xH100"], "CFG005", "the command line", "a whole number"),
        (["--why-not", "tp"], "CLI001", "--why-not", "--why-not parallel.tp=8"),
        (["--why-not", "parallel.tq=8"], "CFG001", "the command line", "`parallel.tp`"),
        (["--why-not", "parallel.tp=x"], "CFG002", "the command line", "a whole number"),
        (["--why-not", "tp=2", "--plan", "plan.yaml"], "CLI001", "--plan", "leave out one"),
        (["--smallest", "--cluster", "2xCPU"], "CLI001", "--cluster", "--cluster H100"),
        (["--smallest", "--compare", "8xH100,8xH200"], "CLI001", "--smallest", "leave out one"),
        (["--smallest", "parallel.tp=3"], "PLAN001", "parallel.tp", "one of"),
        (["--smallest", "--cluster", "A100", "precision.products=float8"], "PLAN012", "precision.products", "compute"),
        (["--compare", "8xH10,8xH200"], "CLU002", "--compare", "did you mean"),
        (["--compare", "8xH100"], "CLI001", "--compare", "--compare 8xH100,8xH200"),
        (["--compare", "8xH100,,8xH200"], "CLI001", "--compare", "--compare 8xH100,8xH200"),
        (["--compare", "8xH100,8 H100"], "CLI001", "--compare", "drop one"),
        (["--compare", "8xH100,8xH200", "--price", "H100=-1"], "CLI001", "--price", "--price H100-SXM-80GB=2.5"),
        (["--compare", "8xH100,8xH200", "--price", "L40S=1"], "CLI001", "--price", "--price H100-SXM-80GB=2.5"),
        (["--compare", "8xH100,8xH200", "--cluster", "8xH100"], "CLI001", "--cluster", "--compare 8xH100,"),
        (["--compare", "8xH100,8xH200", "--explain", "why"], "CLI001", "--explain", "leave out one"),
        (["--compare", "8xH100,8xH200", "parallel.tp=3"], "PLAN001", "parallel.tp", "one of 1, 2, 4, 8"),
        (["--compare", "8xH100,8xH200", "trian.seq_len=4k"], "CFG001", "the command line", "train.seq_len"),
    ],
)
def test_what_cannot_be_asked(words: list[str], code: str, where: str, fix: str, ask: Any) -> None:
    exit_code, problem = ask(f"--model={ONE_B}", *words)
    assert exit_code == (2 if code == "CLI001" else 78) and problem["code"] == code
    assert problem["where"].endswith(where) and fix in problem["fix"]


def test_the_table_of_machines(capfd: pytest.CaptureFixture[str]) -> None:
    """Machines on which the recipe's pins are refused are told of below those that have a plan."""
    words = ["plan", f"--model={ONE_B}", *BATCH, "parallel.tp=4", "--compare", "4xH100,2xH100,8xH200"]
    assert main(words) == 0
    out = capfd.readouterr().out
    lines = out.splitlines()
    assert shows(lines[0], "262,144 tokens") and shows(lines[0], "1,000 steps", "default")
    head, first, second, refused = lines[2:6]
    assert head.split()[:4] == ["machines", "per", "rank", "of"] and "the run" in head and "cost" not in head
    assert first.startswith("8xH200") and "> " in first and second.startswith("4xH100")
    assert refused.startswith("2xH100: ") and shows(refused, "tp 4", "not divide")
    assert "the fastest: 8xH200\n" in out and shows(out, "the fewest GPU-hours: 8xH200", "cannot tell", "4xH100")


def test_the_table_of_the_least(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"--model={ONE_B}", *TUNED, "--smallest", "--cluster", "RTX-4090"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[2].split()[3:] == ["as", "it", "is", "with", "a", "with", "b", "with", "c", "with", "d"]
    assert lines[3].split()[:5] == ["RTX", "4090", "23.6", "2", "1"] and len(lines[3].split()) == 8
    assert lines[5].split() == ["a", "offload.optimizer=auto"]
    assert lines[7].split() == ["c", "lora.rank=16"] and len(lines) == 9


@pytest.mark.parametrize(
    ("machines", "pins", "lines"),
    [
        ("4xH100", "strategy=auto", [("chosen plan", "strategy=auto")]),
        ("2xRTX-4090", "strategy=ddp,tp=1,pp=1", [("takes 95%", "below 80%", "before it")]),
        ("2xA10G", "strategy=ddp,tp=1,pp=1", [("does not fit", "needs 102%"), ("more", "the fullest")]),
        ("4xL40S", "tp=4", [("with tp=4", "it fits", "slower"), ("more for tp", "sends", "instead of 0 B)")]),
        ("4xH200", "recompute=full", [("slower",), ("more", "recompute full", "of none)"), (": activations ",)]),
        ("4xH200", "precision.weights=bf16", [("changes", "is trained"), ("moments ",)]),
    ],
)
def test_the_words_on_what_was_not_taken(
    machines: str, pins: str, lines: list[tuple[str, ...]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={ONE_B}", *BATCH, "--cluster", machines, "--why-not", pins]) == 0
    out = capfd.readouterr().out
    assert all(shows(out, *values) for values in lines), out


@pytest.mark.prove
def test_a_pin_of_what_is_chosen_may_find_a_budget(capfd: pytest.CaptureFixture[str]) -> None:
    """Without it the fastest pipeline has other degrees, and a budget is not looked for in these."""
    words = ["plan", f"--model={MIXTURE}", "train.seq_len=4096", "train.global_batch_size=512"]
    assert main([*words, "--cluster", "2x8xH100", "--why-not", "parallel.ep=8"]) == 0
    assert shows(capfd.readouterr().out, "with parallel.ep=8", "it fits", "faster", "the fastest one", "a budget")


@pytest.mark.parametrize(
    ("pins", "code", "values"),
    [
        ("parallel.tp=3", "PLAN001", ("tp 3", "not divide", 4)),
        ("offload.optimizer_fraction=0.5", "CFG008", ("`offload.optimizer_fraction`", "no effect")),
    ],
)
def test_a_refusal_is_an_answer_too(
    pins: str, code: str, values: tuple[object, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={ONE_B}", *BATCH, "--cluster", "4xL40S", "--why-not", pins]) == 0
    out = capfd.readouterr().out
    assert shows(out, f"with {pins}", "refused") and refuses(out, code, *values), out


def test_the_words_on_a_sweep(capfd: pytest.CaptureFixture[str]) -> None:
    """What is refused has a line of its own, and is no border."""
    words = ["plan", f"--model={ONE_B}", *BATCH, "--cluster", "1xRTX-4090", "--sweep"]
    assert main([*words, "parallel.tp=1,2"]) == 0
    out = capfd.readouterr().out
    assert shows(out, "\nparallel.tp=2: tp 2", "not divide") and shows(out.splitlines()[-1], "it fits", "none")
    assert main([*words, "lora=8"]) == 0
    assert shows(capfd.readouterr().out.splitlines()[-1], "it fits", "each")


def test_a_run_whose_length_is_not_known_is_not_in_time() -> None:
    cluster = parse_cluster("8xH100")
    unknown = PlanRow("unknown", cluster, Plan(), Length("--tokens", 1, 1))
    at_once = PlanRow("at once", cluster, Plan(), Length("--tokens", 1, 1, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    found = Curve(60.0, 1.0, [unknown, at_once], {})
    assert found.meeting == found.surely == found.affordable == [at_once]


def test_the_words_on_a_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"--model={ONE_B}", *BATCH, "train.global_batch_size=12", "--cluster", "L40S", "--tokens", "10M"]
    assert main([*words, "--deadline", "30min", "--price", "L40S=1", "--budget", "0.01"]) == 0
    out = capfd.readouterr().out
    assert shows(out, "the fewest GPUs", "30 min 0 s: 1x1xL40S, 1 GPU, ") and "the cheapest: " in out
    assert shows(out, "within $0.01", "none") and shows(out, "another node", "less than 60%")
    assert main([*words, "--deadline", "1min"]) == 0
    assert shows(capfd.readouterr().out, "GPUs", "1 min 0 s", "add little", "no plan")
