"""Which tokenizer a recipe means: the named one, the one of the model that is trained on, or one made for the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, DataError, MissingInputError
from shardwise.models import resolve as resolving
from shardwise.models.added_rows import with_added
from shardwise.models.config import to_hf, with_fields
from shardwise.models.families import FAMILIES
from shardwise.models.known import configs
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.resolve import data_of, resolve
from shardwise.spec.load import load_recipe
from shardwise.spec.recipe import Data, Model, Recipe, TokenizerSection
from tests.models.families import config_of
from tests.runtime.small_run import MODEL
from tests.said import refusal, shows

YARN = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.path=a/b"], TokenizerSection(path="a/b")),
        (["model.path=a/b", "model.revision=v1"], TokenizerSection(path="a/b", revision="v1")),
        (["model.path=models/x/model.safetensors"], TokenizerSection(path="models/x")),
        (["model.path=a/b", "data.tokenizer.path=c/d"], TokenizerSection(path="c/d")),
        (["model.path=a/b", "data.tokenizer.vocab_size=300"], TokenizerSection(vocab_size=300)),
        (["model.path=a/b", "model.init=random"], TokenizerSection()),
        (["model.config.vocab_size=9"], TokenizerSection()),
    ],
)
def test_a_model_that_is_trained_on_brings_its_tokenizer(words: list[str], expected: TokenizerSection) -> None:
    recipe = load_recipe(None, words)
    assert data_of(recipe).tokenizer == expected
    assert data_of(recipe).model_copy(update={"tokenizer": recipe.data.tokenizer}) == recipe.data


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tie_word_embedings", "tie_word_embeddings"),
        ("rope_thta", "rope_theta"),
        ("num_key_value_head", "num_key_value_heads"),
    ],
)
def test_a_misspelt_dimension_is_named(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"CFG001.*`model.config.{wrong}`[^?]*`{right}`"):
        resolve(Recipe.model_validate({"model": {"config": {**MODEL, wrong: 1}}}))


def test_dimensions_of_no_model_in_particular_are_refused() -> None:
    recipe = Recipe.model_validate({"model": {"config": {"hidden_size": 64}}})
    with pytest.raises(ConfigError, match=r"CFG004.*model type(.|\n)*model_type: llama"):
        resolve(recipe)


@pytest.mark.parametrize("name", configs())
def test_whole_configs_are_taken_as_they_are(name: str) -> None:
    """With all that other programs have written into them."""
    config = configs()[name]
    if config["model_type"] in FAMILIES:
        assert resolve(Recipe.model_validate({"model": {"config": config}})).hidden_size == config["hidden_size"]


@pytest.mark.parametrize(
    ("name", "words", "kind", "theta", "reaches"),
    [
        ("meta-llama/Llama-3.1-8B", ["model.rope_theta=8e6"], "llama3", 8e6, 131_072),
        ("Qwen/Qwen3-0.6B", [f"model.rope_scaling={YARN}"], "yarn", 1e6, 131_072),
        ("Qwen/Qwen3-0.6B", [f"model.rope_scaling={YARN}", "model.rope_theta=5e6"], "yarn", 5e6, 131_072),
        ("google/gemma-3-1b-it", ["model.rope_theta=5e6"], None, 5e6, 32_768),
    ],
)
def test_a_recipe_stretches_positions(
    name: str, words: list[str], kind: str | None, theta: float, reaches: int
) -> None:
    """Of a trained model, whichever way its config tells them; what is exported says so too."""
    plain, spec = load_spec(name), resolve(load_recipe(None, [f"model={name}", *words]))
    assert (spec.positions.rope_scaling.kind if spec.positions.rope_scaling else None, spec.positions.rope_theta) == (
        kind,
        theta,
    )
    assert (
        spec.max_position_embeddings == reaches and spec.positions.local_rope_theta == plain.positions.local_rope_theta
    )
    again = read_spec(to_hf(spec), name)
    assert (again.positions.rope_theta, again.positions.rope_scaling) == (
        spec.positions.rope_theta,
        spec.positions.rope_scaling,
    )


def test_positions_of_a_new_model_are_its_config_s() -> None:
    with pytest.raises(ConfigError, match=refusal("CFG008", "a new model")) as raised:
        load_recipe(None, ["model.config.model_type=llama", "model.rope_theta=5e6"])
    assert raised.value.problems[0].fix == "`model.config.rope_theta`"


def test_a_recipe_sets_the_losses_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The auxiliary loss of the model's config holds unless the recipe has one, which may be 0."""
    experts = with_fields(
        load_spec(next(iter(configs()))), num_experts=4, experts_per_token=2, router_aux_loss_coef=0.01
    )
    monkeypatch.setattr(resolving, "load_spec", lambda *args: experts)

    def found(*words: str) -> tuple[float, float]:
        spec = resolve(load_recipe(None, ["model.path=a/b", *words]))
        assert spec.experts.expert_capacity == (1.25 if "model.expert_capacity=1.25" in words else None)
        return spec.experts.router_aux_loss_coef, spec.experts.router_z_loss_coef

    assert found("model.expert_capacity=1.25") == (0.01, 0.0)
    assert found() == (0.01, 0.0)
    assert found("model.router_aux_loss=0.5", "model.router_z_loss=0.001") == (0.5, 0.001)
    assert found("model.router_aux_loss=0") == (0.0, 0.0)


def test_corrections_move_at_the_rate_that_is_asked_for_where_all_weights_are_trained() -> None:
    config = {**config_of("glm4_moe"), "output_router_logits": False}
    found = resolve(Recipe.model_validate({"model": {"config": config, "router_bias_rate": 0.001}})).experts.sigmoid
    plain = resolve(Recipe.model_validate({"model": {"config": config}})).experts.sigmoid
    assert found is not None and plain is not None
    assert (found.bias_rate, plain.bias_rate) == (0.001, 0.0) and replace(found, bias_rate=0.0) == plain
    for model, lora in ((config, {"rank": 4}), (config_of("mixtral"), {}), (MODEL, {})):
        asked = {"model": {"config": model, "router_bias_rate": 0.001}, "lora": lora}
        with pytest.raises(ConfigError, match=r"CFG008.*`model.router_bias_rate`"):
            resolve(Recipe.model_validate(asked))


@pytest.mark.parametrize(
    ("key", "asked", "none"),
    [("router_aux_loss", 0.1, 0.0), ("router_z_loss", 0.1, 0.0), ("expert_capacity", 1.0, None)],
)
def test_what_is_asked_of_experts_that_a_model_has_not_is_refused(key: str, asked: float, none: float | None) -> None:
    recipe = Recipe.model_validate({"model": {"config": MODEL, key: asked}})
    with pytest.raises(ConfigError, match=rf"CFG008.*`model.{key}`.*no experts"):
        resolve(recipe)
    assert resolve(Recipe.model_validate({"model": {"config": MODEL, key: none}})) == resolve(
        Recipe.model_validate({"model": {"config": MODEL}})
    )


MIXTURE = {**MODEL, "model_type": "mixtral", "num_key_value_heads": 2, "router_aux_loss_coef": 0.02}


@pytest.mark.parametrize(
    ("said", "asked", "weight"),
    [
        ({"output_router_logits": False}, {}, 0.0),
        ({}, {}, 0.0),
        ({"output_router_logits": True}, {}, 0.02),
        ({"output_router_logits": False}, {"router_aux_loss": 0.5}, 0.5),
        ({"output_router_logits": True}, {"router_aux_loss": 0.0}, 0.0),
        ({"output_router_logits": False}, {"init": "random"}, 0.02),
    ],
)
def test_a_model_that_is_tuned_has_the_loss_that_its_config_switches_on(
    said: dict[str, object], asked: dict[str, object], weight: float, tmp_path: Path
) -> None:
    """Unless the recipe says its coefficient; one that begins anew has it. An export says whether it was there."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | said))
    spec = resolve(Recipe.model_validate({"model": {"path": str(tmp_path), **asked}}))
    assert spec.experts.router_losses == (weight, 0.0)
    assert to_hf(spec)["output_router_logits"] == (weight > 0)


def test_a_described_model_has_the_loss_that_balances_its_experts() -> None:
    assert resolve(Recipe.model_validate({"model": {"config": MIXTURE}})).experts.router_losses == (0.02, 0.0)


@pytest.mark.parametrize(
    ("files", "named", "fix"),
    [
        (["recipe.yaml"], "", ["`shardwise export {run}`", "`model.path: {run}/hf`"]),
        (["recipe.yaml", "hf/config.json"], "", ["`model.path: {run}/hf`"]),
        (
            ["recipe.yaml", "adapter/adapter_config.json"],
            "adapter",
            ["`lora.path: {run}/adapter`", "`model.path`"],
        ),
        ([], "", ["config.json", "save_pretrained"]),
    ],
)
def test_a_run_as_a_model_is_told_what_to_write(tmp_path: Path, files: list[str], named: str, fix: list[str]) -> None:
    """Of a run the export is the model, which a run of adapters has once they are merged."""
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(MissingInputError) as raised:
        resolve(Recipe(model=Model(path=str(tmp_path / named))))
    assert raised.value.problems[0].code == "MOD002"
    assert shows(raised.value.problems[0].fix, *(each.format(run=tmp_path) for each in fix))


def in_files(directory: Path, rows: int, ids: int, *, pairs: bool = False) -> Path:
    """A model's config and the tokenizer beside it: of so many ids, the last an added token."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(to_hf(replace(load_spec("Llama-3.2-1B"), vocab_size=rows))))
    texts = [f"t{i}" for i in range(ids - 1)]
    vocabulary = [[text, -1.0] for text in texts] if pairs else {text: i for i, text in enumerate(texts)}
    added = [{"id": ids - 1, "content": "<eot>", "special": True}]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return directory


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("rows", "added", "expected"),
    [(9, ["<a>"], 10), (9, ["<a>", "<b>"], 11), (12, ["<a>"], 12), (9, ["<eot>", "t3"], 9)],
)
def test_a_model_has_a_row_for_each_new_token(
    tmp_path: Path, rows: int, added: list[str], expected: int, pairs: bool
) -> None:
    """Rows that a model has to spare are used first, as of Qwen 2.5: an adapter then fits the model as it is."""
    model = in_files(tmp_path / "model", rows, 9, pairs=pairs)
    words = [f"model.path={model}", f"data.add_tokens=[{added[0]}]", f"data.add_special_tokens={json.dumps(added[1:])}"]
    assert resolve(load_recipe(None, words)).vocab_size == expected
    assert resolve(load_recipe(None, words[:1])).vocab_size == rows


def test_adapters_alone_leave_a_new_token_untrained(tmp_path: Path) -> None:
    words = [f"model.path={in_files(tmp_path / 'model', 12, 9)}", "lora.rank=2", "data.add_tokens=[<a>]"]
    with pytest.raises(ConfigError, match=refusal("CFG008", "`<a>`", fix="lora.modules_to_save")):
        resolve(load_recipe(None, words))
    assert resolve(load_recipe(None, [*words, "lora.modules_to_save=[embed_tokens,lm_head]"])).vocab_size == 12
    assert resolve(load_recipe(None, [*words[:2], "data.add_tokens=[t3]"])).vocab_size == 12, "nothing is new"
    adapter = in_files(tmp_path / "adapter", 12, 9)
    content = json.loads((adapter / "tokenizer.json").read_text())
    content["added_tokens"].append({"id": 9, "content": "<a>", "special": False})
    (adapter / "tokenizer.json").write_text(json.dumps(content))
    found = with_added(Data(), TokenizerSection(path=str(tmp_path / "model")), adapter)
    assert (found.tokenizer.path, found.add_tokens, found.add_special_tokens) == (str(adapter), ["<a>"], [])
    assert with_added(Data(), TokenizerSection(path=str(adapter)), adapter) == Data(), "nothing is new"
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=refusal("TOK004", "tokens are added")):
        resolve(load_recipe(None, words))
