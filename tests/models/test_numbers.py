"""Numbers in a config.json that no model computes with: refused by name, all at once."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, DataError
from shardwise.models.config import to_hf
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.resolve import resolve
from shardwise.spec.load import load_recipe
from tests.models import families, hf_models
from tests.models.test_config import SMALL


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rope_theta": 0}, ["`rope_theta` is 0; .*above 0"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["`rope_parameters.rope_theta` is -1.0; .*above 0"]),
        ({"rms_norm_eps": -1e-6}, ["`rms_norm_eps` is -1e-06; .*negative"]),
        ({"rms_norm_eps": math.nan, "rope_theta": math.inf}, ["`rms_norm_eps` is NaN", "`rope_theta` is infinite"]),
        ({"hidden_size": 10**400}, ["`hidden_size` .* 1,329 bits; .* 64"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["`rope_scaling.factor` is 0; .*above 0"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 0]}}, ["`rope_scaling.short_factor` is 0; it must"]),
        ({"decoder_sparse_step": 0}, ["`decoder_sparse_step` is 0; .*above 0"]),
        ({"router_aux_loss_coef": -0.1}, ["`router_aux_loss_coef` is -0.1; .*negative"]),
        ({"num_experts_per_tok": 2**15}, ["`num_experts_per_tok` is 32,768; .*16,384"]),
        ({"moe_intermediate_size": 2**29}, ["`moe_intermediate_size` is 536,870,912; .*268,435,456"]),
        ({"max_position_embeddings": math.nan}, ["`max_position_embeddings` is NaN"]),
    ],
)
def test_a_number_that_no_model_computes_with(tmp_path: Path, wrong: dict[str, Any], told: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | wrong))
    with pytest.raises(DataError) as caught:
        load_spec(str(tmp_path))
    found = caught.value.problems
    assert [problem.code for problem in found] == ["MOD005"] * len(told) and caught.value.exit_code == 65
    assert all(re.match(words, problem.what) and problem.fix for problem, words in zip(found, told, strict=True))
    assert told[0].split("`")[1].rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize(("kind", "key"), [("gpt_neox", "rotary_emb_base"), ("gpt2", "layer_norm_epsilon")])
def test_of_a_model_of_transformers_too(kind: str, key: str) -> None:
    with pytest.raises(DataError, match=f"MOD005.*`{key}` is -2.0"):
        read_spec(hf_models.config_of(kind) | {key: -2.0}, "odd")


def test_in_a_recipe_it_is_the_recipe_that_is_wrong() -> None:
    words = [f"model.config.{key}={value}" for key, value in (SMALL | {"rope_theta": 0}).items()]
    with pytest.raises(ConfigError, match="MOD005"):
        resolve(load_recipe(None, words))


@pytest.mark.parametrize("kind", families.CONFIGS)
def test_every_number_of_every_family_that_is_nan_is_refused(kind: str) -> None:
    """Whatever a family reads: nothing passes, and nothing but an error of ours comes out."""
    config = to_hf(families.spec_of(kind))
    numbers = [key for key, value in config.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    assert len(numbers) > 8
    for key in numbers:
        with pytest.raises(DataError, match=f"MOD005.*`{key}` is NaN"):
            read_spec(config | {key: math.nan}, "odd")
