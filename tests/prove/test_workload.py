"""What a proof trains: rows in which nothing is alike that a fault could hide behind, drawn or out of real records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shardwise.data.micro_batch import collate
from shardwise.data.pack import IGNORE, Sample
from shardwise.models.config import parameter_shapes
from shardwise.prove import workload
from shardwise.prove.workload import Excerpts, Setting, Workload, excerpt, random_everywhere
from shardwise.spec.recipe import Method, Recipe
from tests.parity.cases import TIED, UNTIED
from tests.runtime.small_run import recipe
from tests.said import shows

JOB = Workload(UNTIED, 4, 24, "fp64", "fp64")


def test_drawn_pairs_are_unequal_and_their_answers_are_supervised() -> None:
    rows = workload.pairs(JOB, 0)
    assert [len(row.references) for row in rows if row.references is not None] == [1, 2, 1, 2]
    batch = collate(rows)
    assert batch.answers is not None and batch.references is not None and batch.terms() == 6
    supervised = [int((batch.labels[batch.answers == answer] != IGNORE).sum()) for answer in range(12)]
    assert min(supervised) >= 1 and len(set(supervised)) > 2
    for row in rows:
        ends = np.cumsum(row.segments) - 1
        assert (row.labels[ends] == IGNORE).all(), "nothing is supervised across a border"
        known = np.flatnonzero(row.labels != IGNORE)
        assert (row.labels[known] == row.ids[known + 1]).all()
    assert (workload.pairs(JOB, 1)[0].ids != rows[0].ids).any()


def long_row(prompt: int, answer: int, of: int) -> Sample:
    """Documents of a prompt and an answer each, and padding."""
    length = prompt + answer
    ids = np.arange(of * length + 5, dtype=np.int64)
    labels = np.full_like(ids, IGNORE)
    for begin in range(0, of * length, length):
        labels[begin + prompt - 1 : begin + length - 1] = ids[begin + prompt : begin + length]
    positions = np.concatenate([*[np.arange(length)] * of, np.arange(5)])
    return Sample(ids, labels, positions, (*[length] * of, 5), masked=True)


def test_an_excerpt_has_the_end_of_a_prompt_and_the_beginning_of_its_answer() -> None:
    short = excerpt(long_row(100, 50, 3), 24, 67)
    assert sum(short.segments) == 24 and len(short.segments) >= 3
    at = 0
    for length in short.segments[:3]:
        learnt = short.labels[at : at + length] != IGNORE
        assert learnt.any() and not learnt.all()
        at += length
    assert short.ids.max() < 67 and short.labels.max() < 67


def test_of_pairs_both_answers_are_kept() -> None:
    whole = replace(long_row(40, 20, 6), references=np.zeros((3, 2)))
    short = excerpt(whole, 24, 67)
    assert short.references is not None and len(short.references) in (1, 2)
    answers = collate([short]).answers
    assert answers is not None and {*range(2 * len(short.references))} <= set(answers.flatten().tolist())


def test_real_rows_stand_between_drawn_ones() -> None:
    real = excerpt(long_row(30, 30, 2), 24, 67)
    rows = Excerpts((real,), workload.texts)(JOB, 0)
    assert [row is real for row in rows] == [False, True, False, True]
    assert len({int((row.labels != IGNORE).sum()) for row in rows}) > 1
    alone = Excerpts((real,), workload.texts)(replace(JOB, rows=1), 0)
    assert alone == [real]
    as_one = replace(real, segments=(24,), masked=False)
    assert all(not row.masked and row.segments == (24,) for row in Excerpts((as_one,), workload.texts)(JOB, 0))


def test_nothing_begins_at_one_value_for_all() -> None:
    for spec in (UNTIED, TIED):
        for name, shape in parameter_shapes(spec).items():
            values = random_everywhere(name, shape, [slice(0, size) for size in shape], 0, spec)
            assert len(torch.unique(values)) > 0.9 * values.numel(), name
    part = random_everywhere("norm.weight", (20,), [slice(5, 9)], 0, UNTIED)
    assert torch.equal(part, random_everywhere("norm.weight", (20,), [slice(0, 20)], 0, UNTIED)[5:9])


def test_rows_of_the_recipe_where_they_can_be_read(tmp_path: Path) -> None:
    made = recipe(tmp_path, data={"path": str(tmp_path / "text" / "0.txt")})
    setting, told = workload.setting_of(made, UNTIED, 12)
    assert isinstance(setting.rows, Excerpts) and "own records" in told
    assert len(setting.rows.samples) > 5 and all(len(sample.ids) == 12 for sample in setting.rows.samples)


def test_rows_of_pairs_that_are_small_enough(tmp_path: Path) -> None:
    records = [{"prompt": f"is {i} odd? ", "chosen": "who knows", "rejected": f"{i % 2}"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"path": str(tmp_path / "pairs.jsonl"), "tokenizer": {"vocab_size": 300}, "text_key": "prompt"}
    made = recipe(tmp_path, data=data, method={"name": "dpo"}, train={"seq_len": 64})
    setting, told = workload.setting_of(made, UNTIED, 24)
    assert isinstance(setting.rows, Excerpts) and shows(told, "initial model", "drawn"), told
    batch = collate(setting.rows(JOB, 0))
    assert batch.references is not None and len(batch.references) >= 4


def test_why_rows_are_drawn(tmp_path: Path) -> None:
    missing = recipe(tmp_path, data={"path": str(tmp_path / "nowhere")})
    setting, told = workload.setting_of(missing, UNTIED, 12)
    assert setting == Setting(Method(), workload.texts, random_everywhere, sgd=True, packed=True)
    assert "cannot be read" in told and "nowhere" in told
    (tmp_path / "text").rename(tmp_path / "nowhere")
    _, told = workload.setting_of(missing, UNTIED, 12)
    assert "not prepared" in told
    assert workload.setting_of(Recipe(method=Method(name="dpo")), UNTIED, 12)[0].rows is workload.pairs
