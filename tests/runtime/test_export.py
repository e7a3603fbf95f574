"""Weights are gathered whole to be exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, _redistribute
from transformers import AutoTokenizer

from shardwise.data import tokens
from shardwise.data.template import find_template
from shardwise.distributed.fake_world import fake_world
from shardwise.models.lookup import load_spec
from shardwise.runtime.export import ends_of, whole
from shardwise.spec.layout import Layout

LOGGER = "torch.distributed.tensor._redistribute"


def test_gathering_what_is_cut_twice_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts are, over those that have the same ones and over those that have others: torch warns of two gathers
    where it thinks that one would do."""
    with fake_world(Layout(dp_shard=4, ep=2)) as meshes:
        mesh = meshes.expert_mesh("expert_fsdp", "ep")
        value = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Shard(0)], run_check=False)
        caplog.set_level("WARNING", LOGGER)
        for gather, warnings in ((DTensor.full_tensor, 1), (whole, 0)):
            monkeypatch.setattr(_redistribute, "_warned_flatten_issues", set())
            caplog.clear()
            assert gather(value).shape == (8, 3)
            assert len(caplog.records) == warnings


def test_an_export_stops_where_its_template_ends_an_answer(tmp_path: Path) -> None:
    """The ids that transformers' tokenizer gives the ends; a base model knows only the end of a text."""
    directory, spec = tmp_path / "tokenizer", replace(load_spec("Llama-3.2-1B"), eos_token_id=None)
    directory.mkdir()
    tokens.train_tokenizer(["some text"], 300, directory)
    learnt = tokens.extended(tokens.open_directory(directory), [], ["<|im_start|>", "<|im_end|>"], tmp_path / "cache")
    assert ends_of(spec, learnt) == learnt.eot_id, "there is no template"
    template = learnt.directory / "chat_template.jinja"
    template.write_text(find_template("chatml", directory))
    theirs = AutoTokenizer.from_pretrained(learnt.directory)
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert ends_of(spec, learnt) == (theirs.eos_token_id, end)
    assert ends_of(replace(spec, eos_token_id=(7, 8)), learnt) == (7, 8, end)
    assert ends_of(replace(spec, eos_token_id=end), learnt) == end
    template.write_text(find_template("zephyr", directory))
    assert ends_of(spec, learnt) == theirs.eos_token_id, "it ends an answer as a text ends"
    template.write_text("{{ raise_exception('no questions') }}")
    assert ends_of(spec, learnt) == theirs.eos_token_id
