"""What transformers generates from the export of a run: a prompt at once, then token by token from what it keeps of the
ones before. Shardwise computes each token from the whole text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.models import hf
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.models.lookup import load_spec
from shardwise.runtime.state import TrainState
from tests.models.families import CONFIGS
from tests.models.llama import relative
from tests.models.test_routers import everything, in_float64
from tests.runtime.small_run import directory, recipe, train_here

PROMPT, MORE = 21, 12


def exported(tmp_path: Path, family: str) -> tuple[Path, Tensor, Tensor]:
    """The export of a run of three steps, a row of ids, and the logits [s,V] that the run's own model has of it at the
    end."""
    config = CONFIGS[family](random.Random(3)) | {"model_type": family, "vocab_size": 320, "initializer_range": 0.3}
    steps = {"seq_len": 16, "max_steps": 3}
    ids, seen = torch.randint(0, 320, (1, PROMPT), generator=torch.Generator().manual_seed(5)), []

    def look(state: TrainState, *_: Any) -> None:
        with torch.no_grad():
            seen.append(logits_of(state.parts[0], ids))

    made = recipe(tmp_path, model={"config": config}, train=steps, optim={"learning_rate": 0.01})
    train_here(made, (look,))
    return directory(made) / "hf", ids, seen[-1]


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[s,V], without anything kept."""
    found: Tensor = model(ids, torch.arange(ids.shape[1])[None], MaskSpec())[0]
    return found


def ours_of(path: Path) -> Decoder:
    spec = load_spec(str(path))
    model = Decoder(spec).double()
    missing = model.load_state_dict(dict(hf.read_weights(path, everything(spec), spec)), strict=False)
    assert not missing.unexpected_keys and {key.rpartition(".")[2] for key in missing.missing_keys} <= {"weight"}
    return model


def theirs_of(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **plain)
    return model.eval()


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.prove)])
def test_transformers_generates_what_the_run_s_model_would(tmp_path: Path, family: str) -> None:
    """Logits of the run at its end within 2e-5 of those of its export (fp32). In float64 those of every generated token
    within 1e-9, with caches of latent attention, of states and of convolutions there, and none here; and so the same
    tokens."""
    path, ids, at_the_end = exported(tmp_path, family)
    with torch.no_grad():
        assert relative(theirs_of(path, torch.float32)(ids).logits[0], at_the_end) < 2e-5
    ours = ours_of(path)
    with in_float64(family), torch.no_grad():
        theirs = theirs_of(path, torch.float64)
        lengths: list[int] = []
        written: list[Tensor] = []  # what generate returns of them is in fp32
        theirs.model.embed_tokens.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
        theirs.lm_head.register_forward_hook(lambda module, given, out: written.append(out[0, -1]))
        asked: dict[str, Any] = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MORE, **asked)
        assert lengths == [PROMPT] + [1] * (MORE - 1)
        text = ids
        for step in range(MORE):
            logits = logits_of(ours, text)[-1]
            assert logits.dtype == written[step].dtype == torch.float64
            assert relative(written[step], logits) < 1e-9, step
            text = torch.cat((text, logits.argmax().reshape(1, 1)), 1)
    assert torch.equal(out, text)
    assert len(set(text[0, PROMPT:].tolist())) > 1, "it writes more than one word again and again"
