"""Figures of a report by hand, and files that are none."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from bench.accuracy.memory import memory_of
from bench.accuracy.rows import Measurement, read
from bench.accuracy.score import (
    Score,
    efficiency,
    flops_per_token,
    groups_of,
    left_out,
    levels_of,
    measured_s,
    pairs,
    percentile,
    predicted_s,
    rows_of,
    score,
    summary,
)
from shardwise.planner.price import price
from tests.bench.accuracy.published import changed


def reading(**values: str) -> Measurement:
    found = read(changed(**values))
    assert isinstance(found, Measurement), found
    return found


def test_seconds_that_a_row_states() -> None:
    """Four sequences a GPU and step, 64 over 16 GPUs, of 2,048 tokens: 8,192 tokens."""
    assert measured_s(reading()) == 8192 / 1000
    assert measured_s(reading(step_time_s="7.5")) == 7.5
    assert measured_s(reading(tokens_per_s_per_gpu="", samples_per_s="8")) == 64 / 8
    assert measured_s(reading(tokens_per_s_per_gpu="")) is None
    assert measured_s(reading(step_time_s="2", notes="step_time_s is per MICRO-iteration")) == 2 * 4
    assert measured_s(reading(task="sft", notes="seq_len is the MAX truncation")) is None


def test_operations_by_their_definition() -> None:
    """Llama 2 7B: 6,738,415,616 parameters, of which 2 x 32,000 x 4,096 are the two tables."""
    row, blocks, table = reading(), 6_738_415_616 - 2 * 131_072_000, 131_072_000
    attention = 12 * 32 * 4096 * 2048
    assert flops_per_token(row) == 6 * blocks + attention + 6 * table
    assert flops_per_token(row, "CAUSAL attention") == 6 * blocks + attention / 2 + 6 * table
    assert flops_per_token(row, "full non-causal attention") == flops_per_token(row)
    hardware = flops_per_token(row, "HARDWARE incl. recompute")
    assert hardware == pytest.approx(4 / 3 * (6 * blocks + attention) + 6 * table)
    assert flops_per_token(row, "HARDWARE estimate 8*N*s*B/(t*n)") == 8 * 6_738_415_616
    seconds = measured_s(reading(tokens_per_s_per_gpu="", tflops_per_gpu="200"))
    assert seconds == pytest.approx(flops_per_token(row) * 8192 / 200e12)


def test_seconds_are_those_of_the_row_s_software() -> None:
    """InternEvo broadcasts the slices of eight ranks one after another, 2.676 ms each; async tp hides traffic; blocks
    that are compiled move fewer bytes than eager ones."""
    row = reading(framework="InternEvo", zero_stage="1")
    plain = replace(row, habits=replace(row.habits, broadcast_s=0.0))
    assert predicted_s(row) == pytest.approx((predicted_s(plain) or 0) + 8 * 0.002676)
    one_node = {"num_gpus": "8", "gbs": "32"}  # between two, what is sent would decide
    usual = predicted_s(reading(**one_node)) or 0
    assert (predicted_s(reading(**one_node, notes="AsyncTP")) or 0) < usual
    assert (predicted_s(reading(**one_node, compile="yes")) or 0) < usual
    assert (predicted_s(reading(**one_node, framework="something else")) or 0) != usual


def test_groups() -> None:
    assert groups_of(reading()) == ["dense_16bit", "dense_16bit_stated"]
    assert groups_of(reading(inferred_fields="dp layers")) == ["dense_16bit", "dense_16bit_stated"]
    assert groups_of(reading(inferred_fields="gbs")) == groups_of(reading(ac="")) == ["dense_16bit"]
    assert groups_of(reading(task="lora", tp="1", seq_len="16384")) == ["fine_tune", "long"]


def test_pairs_by_hand() -> None:
    """Of one model on the same GPUs, at 1.0, 1.05, 2.0 and 4.0 s for as many tokens, five pairs differ by more than a
    tenth; the slowest is predicted to be the fastest, and is wrong beside each of the other three."""
    found = [
        Score(reading(), "dense_16bit", measured, predicted, 1.0)
        for measured, predicted in ((1.0, 1.1), (1.05, 1.0), (2.0, 1.9), (4.0, 0.5))
    ]
    elsewhere = Score(reading(group="b"), "dense_16bit", 9.0, 1.0, 1.0)
    longer = Score(reading(seq_len="4096"), "dense_16bit", 9.0, 1.0, 1.0)
    larger = Score(reading(gbs="128"), "dense_16bit", 9.0, 1.0, 1.0)
    assert pairs([*found, elsewhere, longer, larger]) == {"n": 5, "right": 2, "share": 0.4}
    assert pairs([elsewhere])["share"] is None


def test_percentiles_are_interpolated() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.9) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([float(n) for n in range(11)], 0.9) == 9.0
    assert percentile([0.0, 1.0], 0.9) == 0.9


def test_a_summary_by_hand() -> None:
    """Errors of +10, -20, +50 % from two sources, whose medians are 15 and 50. Of the peak the rows reach 0.5, 0.4 and
    0.2: a guess of 0.4 is off by 25 % of the first, 0 and 50 %."""
    a, b = reading(), reading(group="b")
    scores = [
        Score(a, "dense_16bit", 10.0, 11.0, 5.0),
        Score(a, "dense_16bit", 10.0, 8.0, 4.0),
        Score(b, "dense_16bit", 10.0, 15.0, 2.0),
    ]
    levels = levels_of(scores)
    found = summary(scores, levels)
    assert found["n"] == 3
    assert (found["median_ape"], found["p90_ape"], found["median_signed"]) == (20.0, 44.0, 10.0)
    assert found["median_over_sources"] == 32.5
    assert found["constant_guess_median_ape"] == 25.0
    # Of the other source the level is 1.5, or the median of 1.1 and 0.8: 0.95.
    errors = sorted(100 * abs(ratio - 1) for ratio in (1.1 / 1.5, 0.8 / 1.5, 1.5 / 0.95))
    assert found["one_source_left_out"]["n"] == 3
    assert found["one_source_left_out"]["median_ape"] == pytest.approx(errors[1], abs=0.01)
    assert levels == {
        ("fsdp2", "a"): pytest.approx(0.95 * efficiency(a)),
        ("fsdp2", "b"): pytest.approx(1.5 * efficiency(a)),
    }
    assert left_out([replace(one, group="memory") for one in scores], levels) is None
    assert left_out(scores[:2], levels_of(scores[:2])) is None, "there is no other source"


def test_memory_by_the_habits_of_the_software() -> None:
    """One A100 with bf16 weights, gradients and moments, 8 bytes a parameter; an unfused update has a copy of a moment
    beside them, 2 bytes more. With adapters whole logits of 16,384 tokens and 32,000 ids take 14 bytes each."""
    one = {"num_gpus": "1", "tp": "1", "gbs": "", "mbs": "2", "seq_len": "4096", "task": "full-ft", "ac": "full"}
    pure = {"precision_detail": "pure bf16 weights, grads and Adam moments"}
    parameters = 6_738_415_616
    update = memory_of(reading(**one, **pure, framework="HF Trainer"))
    assert update.allocated_bytes == pytest.approx(10 * parameters, rel=1e-3)
    assert memory_of(reading(**one, **pure, framework="unsloth")).allocated_bytes < 8.6 * parameters
    adapters = one | {
        "task": "lora",
        "mbs": "4",
        "precision_detail": "frozen base bf16; adapters as torch_dtype (no AMP)",
    }
    whole = memory_of(reading(**adapters, framework="HF Trainer")).allocated_bytes
    chunked = memory_of(reading(**adapters, framework="HF Trainer", notes="chunked loss")).allocated_bytes
    inputs = 2 * 16384 * 4096 * 32  # of each block
    assert whole == pytest.approx(2 * parameters + inputs + 14 * 16384 * 32000, rel=0.03)
    assert whole - chunked > 4 * 16384 * 32000
    row = reading(**adapters, framework="HF Trainer")
    assert memory_of(row).peak_bytes - memory_of(row).allocated_bytes == (
        (estimate := price(row.spec, row.plan, row.cluster).estimate).peak_bytes - estimate.allocated_bytes
    )


def test_a_report_counts_every_row() -> None:
    rows = [
        changed(peak_mem_gib="20", mem_def="max_memory_allocated"),
        changed(peak_mem_gib="20", mem_def="peak reserved GiB"),
        changed(peak_mem_gib="20", mem_def="nvidia-smi"),
        changed(mbs="64", gbs="512", ac="none", outcome="OOM", peak_mem_gib="79"),
        changed(outcome="OOM"),
        changed(precision="fp8", peak_mem_gib="20", mem_def="nvidia-smi"),
        changed(gpu="H9000"),
        changed(ep="2"),
        {"unheard_of": "1"},
    ]
    report, scores = score(rows)
    assert report["rows"] == 9
    assert sum(report["skipped"].values()) == 3 and report["skipped"]["unknown GPU"] == 1
    groups = report["groups"]
    assert {name: groups[name]["n"] for name in groups} == {
        "dense_16bit": 3, "dense_16bit_stated": 3, "fine_tune": 0, "long": 0, "experts": 0, "experts_fine_tune": 0,
        "dense_float8": 1, "dense_mxfp8": 0, "fine_tune_float8": 0,
        "memory": 3, "memory_allocated": 1, "memory_reserved": 1, "memory_smi": 1, "fit": 5, "pairs": 0,
    }  # fmt: skip
    assert groups["fit"] == {"n": 5, "right": 4, "false_does_not_fit": 0, "oom": 2, "missed_oom": 1}
    assert all(one.predicted > 0 and one.measured > 0 for one in scores)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names no column"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "codec can't decode"),
        (b"gpu,layers\nA100,\0\n", "NUL"),
        (b'gpu,layers\n"A100,3\n', "end of data"),
        (b'{"gpu": 1}\n', "names no column"),
        (b"gpu,layers\n" + b"x" * 200_000 + b",1\n", "field larger"),
    ],
)
def test_what_is_no_table_of_measurements(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    limit = csv.field_size_limit(2**17)  # its default, which other libraries raise
    with pytest.raises(SystemExit, match=rf"rows\.csv .*measurements: .*{said}"):
        rows_of(path)
    csv.field_size_limit(limit)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.csv: No such file"):
        rows_of(tmp_path / "none.csv")


def test_a_table_may_be_ragged(tmp_path: Path) -> None:
    """A row with too few cells lacks some columns, and what is beyond the header's belongs to none."""
    path = tmp_path / "rows.csv"
    path.write_text("\ufeffgpu,layers\nA100\nA100,32,more\n", encoding="utf-8")
    assert rows_of(path) == [{"gpu": "A100"}, {"gpu": "A100", "layers": "32"}]
    path.write_text("gpu,layers\n")
    report, _ = score(rows_of(path))
    assert report["rows"] == 0 and report["groups"]["fit"]["n"] == 0 and report["groups"]["long"]["median_ape"] is None
