"""metrics.jsonl, the progress line and the numbers in them."""

from __future__ import annotations

import io
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.models.config import model_spec, with_fields
from shardwise.runtime.layer_figures import LayerFigures, Lost
from shardwise.runtime.metrics.log import Log, Screen, Speed, flops_per_token, keep_until, progress_line
from shardwise.runtime.metrics.preference import PreferenceWatch
from shardwise.runtime.state import LossScale, TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.plan import Batch, Lora, Plan
from shardwise.spec.units import clock
from tests.said import refuses, shows

SPEC = model_spec("m", 100, 8, 16, 2, 2, 1, 4)


def state_at(step: int) -> TrainState:
    layer = torch.nn.Linear(1, 1)
    return TrainState([layer], torch.optim.AdamW(layer.parameters()), step=step, tokens=step * 64)


def stats(step: int, loss: float = 1.5, skipped: bool = False) -> StepStats:
    return StepStats(step, loss, 0.5, 1e-3, 64, 64 * step, 60, skipped)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_there_once_after_a_kill(tmp_path: Path) -> None:
    """Killed after the line of step 7, half of step 8's written; the newest checkpoint is step 5."""
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    for step in range(1, 8):
        log.step(state_at(step), stats(step, loss=1.0), torch.device("cpu"))
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "los')
    log = Log(tmp_path, 0, 5, 10, Speed(1.0, 0.0))
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]
    for step in range(6, 11):
        log.step(state_at(step), stats(step, loss=2.0), torch.device("cpu"))
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(n, 1.0 if n <= 5 else 2.0) for n in range(1, 11)]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["events.jsonl", "metrics.jsonl"]


def test_a_sampled_step_has_its_layers_whatever_they_came_to(tmp_path: Path) -> None:
    """Of each operand the layers in which a figure is largest, each once; what is not finite is null."""
    lost = {
        ("a", "input"): Lost(0.1, 0.0, 2.0),
        ("b", "input"): Lost(0.0, 0.123456, math.inf),
        ("b", "weight"): Lost(0.0, 0.0, 0.5),
    }
    layers = LayerFigures({"a.weight": 1.0, "b.weight": math.nan, "c.weight": 3.0, "d.weight": 0.1}, lost)
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    log.step(state_at(1), replace(stats(1, skipped=True), layers=layers), torch.device("cpu"))
    log.step(state_at(2), replace(stats(2), layers=layers), torch.device("cpu"))
    log.close()
    for line in lines(tmp_path / "metrics.jsonl"):
        assert (line["float8_saturated"], line["float8_flushed"], line["float8_largest"]) == (0.1, 0.1235, None)
        assert line["float8"] == {
            "layer": ["a", "b", "b"],
            "operand": ["input", "input", "weight"],
            "saturated": [0.1, 0.0, 0.0],
            "flushed": [0.0, 0.1235, 0.0],
            "largest": [2.0, None, 0.5],
        }
        assert line["grad_norms"] == {"parameter": ["b.weight", "c.weight", "a.weight"], "norm": [None, 3.0, 1.0]}


def test_a_line_holds_what_is_promised(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, 0, 10, Speed(flops_per_token=10.0, peak_flops=1e9))
    log.step(state_at(1), replace(stats(1), figures={"balance": 0.75}), torch.device("cpu"))
    log.close()
    [line] = lines(tmp_path / "metrics.jsonl")
    assert line["balance"] == 0.75
    assert {"step", "tokens", "loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "memory_bytes"} <= set(line)
    assert (line["step"], line["tokens"], line["loss"], line["skipped"]) == (1, 64, 1.5, False)
    assert line["mfu"] == pytest.approx(10.0 * float(str(line["tokens_per_s"])) / 1e9, abs=1e-4)


def test_a_line_tells_how_experts_are_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 0 evenly; of layer 3 half the experts have nothing, and one of the others three quarters."""
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    loads = {0: [4.0, 4.0, 4.0, 4.0], 3: [12.0, 0.0, 4.0, 0.0]}
    log.step(state_at(1), replace(stats(1), figures={"router_aux_loss": 2.5}, loads=loads), torch.device("cpu"))
    log.step(state_at(2), replace(stats(2), loads={}), torch.device("cpu"))
    log.close()
    line, without = lines(tmp_path / "metrics.jsonl")
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert line["experts"] == {
        "layer": [0, 3],
        "entropy": [1.0, pytest.approx(entropy, abs=1e-4)],
        "fullest": [1.0, 3.0],
        "dead": [0, 2],
    }
    assert line["expert_entropy"] == pytest.approx(entropy, abs=1e-4)
    assert (line["expert_fullest"], line["dead_experts"], line["router_aux_loss"]) == (3.0, 2, 2.5)
    assert not {"experts", "dead_experts"} & without.keys()
    assert "  experts 3.0x, 2 dead  " in capsys.readouterr().out


def test_a_line_tells_what_pairs_come_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    log.step(state_at(1), replace(stats(1), figures=figures(0.5, -20.0)), torch.device("cpu"))
    log.step(state_at(2), replace(stats(2, skipped=True), figures=figures(math.nan, math.nan)), torch.device("cpu"))
    log.close()
    line, _ = lines(tmp_path / "metrics.jsonl")
    assert {name: line[name] for name in figures(0.5, -20.0)} == figures(0.5, -20.0)
    assert shows(capsys.readouterr().out, "loss 1.500", "accuracy 75 %", "margin +1.25", "lr")
    assert log.preference.means() == figures(0.5, -20.0)


def figures(reward: float, logp: float) -> dict[str, float]:
    """Of the chosen answers."""
    margins = {"rewards/margins": 1.25, "rewards/accuracies": 0.75}
    return {"rewards/chosen": reward, "rewards/rejected": reward - 1.25, **margins, "logps/chosen": logp}


@pytest.mark.parametrize(
    ("falls", "steps"),
    [
        ([0.4 * step for step in range(30)], [15]),  # 4.8 of 20 on average over the last five
        ([0.4 * step * (-1) ** step for step in range(30)], []),
        ([0.05 * step for step in range(30)], []),
        ([8.0 - 0.2 * step for step in range(30)], []),
        ([max(0.0, 0.4 * (step - 10)) for step in range(40)], [18]),
    ],
    ids=["steadily", "up and down", "little", "rising", "later"],
)
def test_a_warning_where_chosen_answers_become_less_likely(falls: list[float], steps: list[int]) -> None:
    """By more than a tenth of their log-probability under the reference, which is -20; once."""
    watch = PreferenceWatch(beta=0.5)
    told = [watch.add(figures(-0.5 * fall, -20.0 - fall)) for fall in falls]
    assert [number for number, text in enumerate(told, 1) if text] == steps
    assert all("DPO002" in text and "log-probability" in text for text in told if text)
    alone = PreferenceWatch()  # of a method without a reference
    assert not any(alone.add(figures(-0.5 * fall, -20.0 - fall)) for fall in falls) and alone.means()


def test_the_highest_imbalance_of_ranks_is_kept(tmp_path: Path) -> None:
    """For the report, and for plans to come; that of a run without ep is not known."""
    for ranks, highest in ((1, 0.0), (2, 1.5)):
        log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
        log.expert_ranks = ranks
        for number, loads in enumerate(([4.0, 4.0], [6.0, 2.0], [5.0, 3.0]), 1):
            log.step(state_at(number), replace(stats(number), loads={0: loads}), torch.device("cpu"))
        log.close()
        assert log.expert_imbalance == highest


def test_a_line_tells_what_experts_drop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By layer, and of all layers together; of none where none is dropped."""
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    loads = {0: [4.0, 4.0], 3: [8.0, 0.0]}
    for number, dropped in ((1, {0: 0.0, 3: 0.25}), (2, {0: 0.0, 3: 0.0})):
        log.step(state_at(number), replace(stats(number), loads=loads, dropped=dropped), torch.device("cpu"))
    log.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["experts"]["dropped"], first["expert_dropped"]) == ([0.0, 0.25], 0.125)  # type: ignore[index]
    assert (second["experts"]["dropped"], second["expert_dropped"]) == ([0.0, 0.0], 0.0)  # type: ignore[index]
    assert "  experts 2.0x, 1 dead, 12.5 % dropped  " in capsys.readouterr().out


@pytest.mark.parametrize(("least", "said"), [(0.0, "1.7x, 1 dead"), (1.0, "1.5x")])
def test_one_expert_without_a_token_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], least: float, said: str
) -> None:
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    log.step(state_at(1), replace(stats(1), loads={0: [5.0, least, 3.0, 4.0]}), torch.device("cpu"))
    log.close()
    assert f"  experts {said}  " in capsys.readouterr().out


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    log = Log(tmp_path, 1, 0, 10, Speed(1.0, 0.0))
    log.step(state_at(1), stats(1), torch.device("cpu"))
    log.event("end")
    log.close()
    assert not list(tmp_path.iterdir())


def test_a_damaged_line_takes_no_other_with_it_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Torn in the middle, a byte that is no UTF-8, steps that a power loss took: what is good stays, the rest is told.
    A torn event does not swallow the next one."""
    path = tmp_path / "metrics.jsonl"
    rows = [b'{"step": %d, "loss": 1.0}\n' % step for step in range(3, 11)]
    path.write_bytes(
        rows[0] + rows[1] + rows[2][:9] + b"\n" + rows[3] + b'{"step": 7, "loss": "\xff"}\n' + rows[5] + b"[1]\n{"
    )
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "start"}\n{"event": "che')
    log = Log(tmp_path, 0, 9, 12, Speed(1.0, 0.0))
    log.event("start", step=9)
    log.step(state_at(10), stats(10), torch.device("cpu"))
    log.close()
    assert [line["step"] for line in lines(path)] == [3, 4, 6, 8, 10]
    values = path, "3 lines", "steps 5, 7, 9"
    assert refuses(capsys.readouterr().out, "LOG001", *values, as_warning=True)
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["step"] == 9


def test_a_skipped_step_is_json_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    log.step(state_at(1), stats(1), torch.device("cpu"))
    log.step(state_at(2), replace(stats(2, math.nan, skipped=True), grad_norm=math.inf), torch.device("cpu"))
    log.event("validation", step=2, nats_per_token=math.nan)
    log.close()
    good, bad = [
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert (bad["loss"], bad["grad_norm"], bad["skipped"]) == (None, None, True)
    assert shows(bad["reason"], "loss is nan", "norm is inf") and "reason" not in good
    assert f"skipped: {bad['reason']}" in capsys.readouterr().out
    event = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=refuse)
    assert event["nats_per_token"] is None


def test_a_step_of_the_search_for_a_loss_scale_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0))
    state = state_at(0)
    state.scale = LossScale(2.0, enabled=True)
    for number, (scale, finite) in enumerate([(2.0, False), (1.0, False), (1.0, True)], 1):
        state.scale.on(torch.device("cpu"))
        state.advance(64)
        state.book(not finite, 2.0, state.scale.update(torch.tensor(finite), torch.tensor(True)).tolist())
        norm = 0.5 if finite else math.inf
        log.step(
            state, replace(stats(number, skipped=not finite), grad_norm=norm, loss_scale=scale), torch.device("cpu")
        )
        assert state.step == number
    log.close()
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["loss_scale"] for row in rows] == [2.0, 1.0, 1.0]
    searching, alone, none = (row.get("reason") for row in rows)
    assert shows(searching, "norm is inf", "scale 2", "halved to 1", "fp16")
    assert shows(alone, "norm is inf", "scale 1") and "halved" not in alone and none is None
    assert f"skipped: {searching}" in capsys.readouterr().out


def test_nothing_to_keep_is_no_error(tmp_path: Path) -> None:
    assert keep_until(tmp_path / "metrics.jsonl", 3) == ""
    assert not list(tmp_path.iterdir())


def test_flops_by_hand() -> None:
    """Per layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 16: 576. Two layers and a head of 100 x 8: 1,952
    parameters, times 6; and causal attention, 6 x 2 layers x 32 tokens x 8."""
    plan = Plan(batch=Batch(seq_len=32))
    attention = 6 * 2 * 32 * 8
    assert flops_per_token(SPEC, plan) == 6 * 1952 + attention
    assert flops_per_token(replace(SPEC, tie_word_embeddings=True), plan) == flops_per_token(SPEC, plan)
    # A frozen head has no gradient of its own; of an adapter on v, 2 x 8 and 4 x 2 in each layer, everything has.
    assert flops_per_token(SPEC, replace(plan, frozen=("head.*",))) == 6 * 1152 + 4 * 800 + attention
    assert flops_per_token(SPEC, replace(plan, lora=Lora(2, 4.0, ("v",)))) == 4 * 1952 + 6 * 2 * 24 + attention


def test_flops_of_a_mixture_by_hand() -> None:
    """Of 6 experts a token goes to 2, of 3 x 8 x 5 parameters each, beside a router of 6 x 8 and an MLP that all share
    of 3 x 8 x 4: in each layer 192 for attention, 240, 48 and 96."""
    spec, plan = with_fields(SPEC, num_experts=6, experts_per_token=2, expert_size=5, shared_expert_size=4), Plan()
    dense = replace(SPEC, intermediate_size=1)
    other = flops_per_token(dense, plan) - 6 * 2 * 3 * 8
    assert flops_per_token(spec, plan) - other == pytest.approx(6 * 2 * (240 + 48 + 96))


def test_mfu_is_unknown_without_a_peak() -> None:
    assert Speed(10.0, 0.0).mfu(100.0) is None
    assert Speed(10.0, 4000.0).mfu(100.0) == 0.25


RECORD = {
    "step": 120,
    "loss": 5.314,
    "learning_rate": 2.8e-3,
    "grad_norm": 0.741,
    "tokens_per_s": 8120.4,
    "mfu": 0.241,
    "memory_bytes": int(0.61 * 2**30),
    "skipped": False,
}


PARTS = (
    "step 120/320 ======----------",
    "loss 5.314",
    "lr 2.8e-03",
    "grad_norm 0.74",
    "8,120 tok/s",
    "MFU 24 %",
    "0.61 GiB",
    "1:41 left",
)


def test_the_progress_line() -> None:
    text = "  ".join(PARTS)
    assert progress_line(RECORD, 320, 101.0) == text
    assert "MFU" not in progress_line(RECORD | {"mfu": None}, 320, 1.0)
    assert progress_line(RECORD | {"skipped": True, "reason": "it is nan"}, 320, 1.0).endswith("  skipped: it is nan")


def test_without_a_terminal_lines_are_plain_and_few() -> None:
    out = io.StringIO()
    screen = Screen(320, out)
    for step in range(1, 321):
        screen.show(RECORD | {"step": step}, 1.0)
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert [int(line.split()[1].split("/")[0]) for line in text.splitlines()] == [1, 320]


def test_a_terminal_that_was_closed_ends_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        screen = Screen(320, stream)
        for step in range(1, 4):
            screen.show(RECORD | {"step": step}, 1.0, due=True)
        screen.say("done")
        screen.close()


def test_a_bar_for_what_comes_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it is redrawn; elsewhere a line every five seconds."""
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen(320, out)
    for done in range(76):
        screen.bar("validation", done, 75)
        now[0] += 1.0
    shown = out.getvalue().splitlines()
    assert len(shown) == 15
    assert shown[0] == "validation  5/75 =---------------  1:10 left"
    assert shown[-1] == "validation 75/75 ================  0:00 left"


def test_lines_every_so_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``run.log_steps``; metrics.jsonl has every step in any case."""
    with Log(tmp_path, 0, 0, 10, Speed(1.0, 0.0)) as log:
        log.log_steps = 4
        for step in range(1, 11):
            log.step(state_at(step), stats(step), torch.device("cpu"))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["4/10", "8/10", "10/10"]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 11))


def test_clock() -> None:
    assert [clock(0), clock(101), clock(3 * 3600 + 65)] == ["0:00", "1:41", "3:01:05"]
