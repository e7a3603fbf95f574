"""Recipes: every problem at once, each with its code, place and remedy (cases B-01 to B-13 of the bad-input suite)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.spec.keys import dotted, keys_of
from shardwise.spec.load import dump_recipe, load_recipe, read_recipe, recipe_schema
from shardwise.spec.recipe import Recipe
from tests.said import shows

Complain = Callable[..., list[Problem]]


@pytest.fixture
def complain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Complain:
    """The problems of a recipe text with overrides; all of them end with exit code 78."""
    monkeypatch.chdir(tmp_path)

    def problems(text: str, *overrides: str) -> list[Problem]:
        Path("run.yaml").write_text(text)
        with pytest.raises(ShardwiseError) as caught:
            load_recipe("run.yaml", overrides)
        assert caught.value.exit_code == 78
        return list(caught.value.problems)

    return problems


@pytest.mark.parametrize(
    ("case", "text", "code", "what", "where", "fix"),
    [
        (
            "B-01",
            "\n\ntrian:\n  seq_len: 4",
            "CFG001",
            "unknown key `trian.seq_len`",
            "run.yaml:4",
            "did you mean `train.seq_len`?",
        ),
        (
            "B-01 leaf",
            "train:\n  sequence_lenn: 4",
            "CFG001",
            "unknown key `train.sequence_lenn`",
            "run.yaml:2",
            "did you mean `train.seq_len`?",
        ),
        (
            "B-02",
            'optim:\n  learning_rate: "abc"',
            "CFG002",
            '`optim.learning_rate` must be a number > 0, got text "abc"',
            "run.yaml:2",
            "give a number > 0",
        ),
        (
            "B-02 whole",
            "train: {max_steps: soon}",
            "CFG002",
            '`train.max_steps` must be a whole number ≥ 1, or null, got text "soon"',
            "run.yaml:1",
            "give a whole number ≥ 1, or null",
        ),
        (
            "B-03",
            "train:\n  max_steps: 1\n  seq_len: 8\n  max_steps: 2",
            "CFG003",
            "`train.max_steps` is set twice",
            "run.yaml:2 and :4",
            "remove one",
        ),
        (
            "B-03 alias",
            "lr: 1\noptim:\n  learning_rate: 2",
            "CFG003",
            "`optim.learning_rate` is set twice",
            "run.yaml:1 and run.yaml:3",
            "remove one",
        ),
        (
            "B-04",
            "train:\n  max_steps: 1.5",
            "CFG004",
            "`train.max_steps` must be a whole number ≥ 1, or null, got 1.5",
            "run.yaml:2",
            "give a whole number ≥ 1, or null",
        ),
        (
            "B-04 bool",
            "train: {seq_len: true}",
            "CFG004",
            "`train.seq_len` must be a whole number ≥ 2 and ≤ 16,777,216, got true",
            "run.yaml:1",
            "give a whole number ≥ 2 and ≤ 16,777,216",
        ),
        (
            "B-04 null",
            "train: {seq_len: null}",
            "CFG004",
            "`train.seq_len` must be a whole number ≥ 2 and ≤ 16,777,216, got null",
            "run.yaml:1",
            "give a whole number ≥ 2 and ≤ 16,777,216",
        ),
        (
            "B-04 section",
            "train: 5",
            "CFG004",
            "`train` is a section, got 5",
            "run.yaml:1",
            "indent its keys under `train:`",
        ),
        (
            "B-04 list",
            "data: {path: [1, x]}",
            "CFG004",
            '`data.path` must be text, or a list of text, got a list (1, text "x")',
            "run.yaml:1",
            "give text, or a list of text",
        ),
        (
            "B-05",
            "optim: {learning_rate: -1}",
            "CFG005",
            "`optim.learning_rate` must be a number > 0, got -1",
            "run.yaml:1",
            "give a number > 0",
        ),
        (
            "B-05 beta",
            "optim: {beta2: 1}",
            "CFG005",
            "`optim.beta2` must be a number ≥ 0 and < 1, got 1",
            "run.yaml:1",
            "give a number ≥ 0 and < 1",
        ),
        (
            "B-05 choice",
            "optim: {schedule: cosin}",
            "CFG005",
            "`optim.schedule` must be one of constant, linear, linear_to_last, cosine, cosine_to_last, polynomial, "
            'inverse_sqrt, wsd, wsd_cosine, wsd_sqrt, wsd_exponential, got text "cosin"',
            "run.yaml:1",
            "did you mean `cosine`?",
        ),
        (
            "B-05 warmup",
            "train: {max_steps: 1000}\noptim: {warmup_steps: 5000}",
            "CFG005",
            "`warmup_steps` 5000 exceeds `max_steps` 1000",
            "run.yaml:2",
            "`optim.warmup_steps: 1000` or less, or a larger `train.max_steps`",
        ),
        (
            "B-05 large",
            f"run: {{seed: {2**70}}}",
            "CFG005",
            "`run.seed` does not fit 64 bits",
            "run.yaml:1",
            "use a smaller number",
        ),
        (
            "B-06",
            "optim:\n  max_grad_norm: .nan",
            "CFG006",
            "`optim.max_grad_norm` is NaN",
            "run.yaml:2",
            "use a finite number, or null to turn it off",
        ),
        (
            "B-06 inf",
            "optim: {learning_rate: 1e999}",
            "CFG006",
            "`optim.learning_rate` is infinite",
            "run.yaml:1",
            "use a finite number",
        ),
        ("B-07 empty", "", "CFG007", "run.yaml is empty", "run.yaml", "write a recipe"),
        ("B-07 comments", "# nothing\n", "CFG007", "run.yaml is empty", "run.yaml", "write a recipe"),
        (
            "B-07 list",
            "- a",
            "CFG007",
            'run.yaml must hold `key: value` lines, got a list (text "a")',
            "run.yaml",
            "start with `train:`",
        ),
        (
            "B-07 tab",
            "train:\n\tseq_len: 2",
            "CFG007",
            "run.yaml:2:1 is not valid YAML: found a tab",
            "run.yaml:2:1",
            "indent with spaces",
        ),
        (
            "B-09",
            "train: {global_batch_size: 10, micro_batch_size: 4}",
            "CFG008",
            "global_batch_size 10 is not a multiple of micro 4 × accumulation 1 = 4",
            "run.yaml:1",
            "`train.global_batch_size: 12`, or drop one of the three",
        ),
        (
            "B-10",
            "train: {seq_len: 4}\nformat: 3",
            "CFG009",
            "written for format 3, this program reads up to 1",
            "run.yaml:2",
            "upgrade: pip install -U shardwise",
        ),
        (
            "two models",
            "model: {path: a/b, config: {vocab_size: 1}}",
            "CFG008",
            "`model.path` and `model.config` both define the model",
            "run.yaml:1",
            "drop one of the two",
        ),
        (
            "the best of nothing",
            "checkpoint: {keep_best: true}",
            "CFG008",
            "`checkpoint.keep_best` needs validation at intervals",
            "run.yaml:1",
            "`evaluate.eval_steps: 100`",
        ),
        (
            "the best of nothing held out",
            "load_best_model_at_end: true\neval_steps: 5\nval_set_size: 0",
            "CFG008",
            "`checkpoint.keep_best` needs a validation loss, but no validation data are held out",
            "run.yaml:1",
            "`data.validation_share: 0.05`",
        ),
        (
            "a token of no text",
            "data: {tokenizer: {path: t}, add_tokens: [<a>, ''], add_special_tokens: [<b>]}",
            "CFG005",
            'each added token is a text of its own, got a list (text "<a>", text "", text "<b>")',
            "run.yaml:1",
            "`data.add_tokens: [<a>]`",
        ),
        (
            "a token that is added twice",
            "data: {tokenizer: {path: t}, add_tokens: [<a>], add_special_tokens: [<b>, <a>]}",
            "CFG005",
            'each added token is a text of its own, got a list (text "<a>", text "<b>", text "<a>")',
            "run.yaml:1",
            "`data.add_special_tokens: [<b>]`",
        ),
        (
            "tokens for a tokenizer that is trained",
            "model: {path: a/b}\ndata: {tokenizer: {vocab_size: 400}, add_special_tokens: [<a>]}",
            "CFG008",
            "`data.add_special_tokens` adds to a tokenizer that there is, and this one is trained on the data",
            "run.yaml:2",
            "`data.tokenizer.path`, or leave it out",
        ),
        (
            "entropy of pairs",
            "method: {name: dpo, entropy: true}",
            "CFG008",
            "`method.entropy` is for `method: pretrain` and `sft`, but the method is dpo",
            "run.yaml:1",
            "`method.name: pretrain`, or leave it out",
        ),
        (
            "stopping early without validation",
            "evaluate: {early_stopping_patience: 3}",
            "CFG008",
            "`evaluate.early_stopping_patience` needs validation at intervals",
            "run.yaml:1",
            "`evaluate.eval_steps: 100`",
        ),
        (
            "saves said twice",
            "saves_per_epoch: 4\nsave_steps: 100",
            "CFG008",
            "`checkpoint.save_steps` and `checkpoint.saves_per_epoch` both set the interval",
            "run.yaml:1",
            "drop one of the two",
        ),
        (
            "a warm-up longer than the run",
            "warmup_ratio: 1.5",
            "CFG002",
            '`optim.warmup_steps` must be a whole number ≥ 0, or a number > 0, got text "1.5 of the run"',
            "run.yaml:1",
            "give a whole number ≥ 0, or a number > 0",
        ),
        (
            "a power of nothing",
            "optim: {schedule: linear,\n  power: 2}",
            "CFG008",
            "`optim.power` has no effect with `optim.schedule: linear`",
            "run.yaml:2",
            "`optim.schedule: polynomial`, or leave it out",
        ),
        (
            "steps before a warm-up, at no rate",
            "optim:\n  warmup_delay: 1",
            "CFG008",
            "`optim.warmup_delay` needs the rate that the steps before the warm-up have",
            "run.yaml:2",
            "`optim.warmup_from: 0`, or leave it out",
        ),
        (
            "a warm-up that falls",
            "optim:\n  warmup_from: 0.1",
            "CFG005",
            "`warmup_from` 0.1 exceeds `learning_rate` 0.0003",
            "run.yaml:2",
            "`optim.warmup_from: 0.0003` or less, or a larger `optim.learning_rate`",
        ),
        (
            "a share of the run that falls",
            "optim: {schedule: wsd, decay_steps: 0.1}",
            "CFG005",
            "`optim.decay_steps` must be a whole number ≥ 1, or a number ≥ 1, or null, got 0.1",
            "run.yaml:1",
            "give a whole number ≥ 1, or a number ≥ 1, or null",
        ),
        (
            "moments said twice",
            "optim: {name: adamw8bit,\n  moments: bf16}",
            "CFG008",
            "`optim.moments: bf16` has no effect with `optim.name: adamw8bit`",
            "run.yaml:2",
            "`optim.name: adamw`, or drop `optim.moments`",
        ),
        (
            "codes of what is not in float8",
            "precision:\n  gather: float8",
            "CFG008",
            "`precision.gather` is of products in float8, and they are in the dtype of `precision.compute`",
            "run.yaml:2",
            "`precision.products: float8`",
        ),
        (
            "missing",
            "optim:\n  groups:\n    - {weight_decay: 0}",
            "CFG004",
            "`optim.groups[0].pattern` is missing; it must be text",
            "run.yaml:2",
            "add `pattern`",
        ),
    ],
)
def test_one_problem(complain: Complain, case: str, text: str, code: str, what: str, where: str, fix: str) -> None:
    assert complain(text) == [Problem(code, what, where, fix)], case


def test_all_problems_of_a_recipe_are_told_at_once(complain: Complain) -> None:
    text = "trian: {seq_len: 5}\ntrain: {max_steps: 1.5, seq_len: 1}\noptim: {learning_rate: abc, beta1: .nan}\n"
    found = complain(text, "optm.lr=3", "runs.seed=1")
    assert sorted((problem.code, problem.where.split(" ")[0]) for problem in found) == [
        ("CFG001", "`optm.lr=3`"),
        ("CFG001", "`runs.seed=1`"),
        ("CFG001", "run.yaml:1"),
        ("CFG002", "run.yaml:3"),
        ("CFG004", "run.yaml:2"),
        ("CFG005", "run.yaml:2"),
        ("CFG006", "run.yaml:3"),
    ]


def test_b08_an_override_is_named_as_the_source(complain: Complain) -> None:
    (problem,) = complain("train: {seq_len: 8}", "optm.lr=3")
    assert problem.code == "CFG001" and problem.where.startswith("`optm.lr=3`")
    assert "`optm.lr`" in problem.what and "`optim.learning_rate`" in problem.fix
    (problem,) = complain("train: {seq_len: 8}", "seq_len=abc")
    assert problem.where.startswith("`seq_len=abc`")


@pytest.mark.parametrize("text", ["data: {path: !!python/name:os.system }", "data: !include x", "data: ${HOME}/x"])
def test_b11_and_b13_end_with_77(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ShardwiseError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert caught.value.exit_code == 77
    with pytest.raises(ShardwiseError) as caught:
        load_recipe(None, ["data.path=${HOME}/x"])
    assert (caught.value.exit_code, caught.value.problems[0].code) == (77, "SEC003")


def test_numbers_in_yaml_1_2() -> None:
    recipe = load_recipe(None, ["optim.learning_rate=1e-3", "optim.weight_decay=0"])
    assert (recipe.optim.learning_rate, recipe.optim.weight_decay) == (0.001, 0.0)


def test_names_that_other_systems_use_are_read_with_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "base_model: a/b\nsequence_len: 4k\nlr: 1e-3\nbf16: true\nfp16: false\ngradient_checkpointing: true\n"
        "steps: 1k\nper_device_train_batch_size: 4\noptimizer: adamw_torch\nlr_scheduler_type: linear\n"
    )
    loaded = read_recipe(path, ["warmup_steps=10"])
    recipe = loaded.recipe
    assert (recipe.model.path, recipe.train.seq_len, recipe.optim.learning_rate) == ("a/b", 4096, 0.001)
    assert (recipe.precision.compute, recipe.recompute.mode, recipe.train.max_steps) == ("bf16", "full", 1000)
    assert (recipe.train.micro_batch_size, recipe.optim.name, recipe.optim.schedule) == (4, "adamw", "linear")
    assert recipe.optim.warmup_steps == 10
    assert f"{path}:2: `sequence_len` is read as `train.seq_len`" in loaded.renamed
    assert f"{path}:2: `train.seq_len` 4k is 4,096 tokens" in loaded.notices
    assert not any("warmup_steps" in notice for notice in loaded.notices + loaded.renamed)


def test_many_renamed_keys_are_counted_not_listed(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("base_model: a/b\nsequence_len: 4k\nlr: 1e-3\nflash_attention: true\n")
    loaded = read_recipe(tmp_path / "r.yaml")
    assert len(loaded.renamed) == 4
    *notices, last = loaded.shown
    assert tuple(notices) == loaded.notices
    assert shows(last, "3 keys", "1 are ignored", "`shardwise plan --explain keys`")
    (tmp_path / "r.yaml").write_text("base_model: a/b\n")
    loaded = read_recipe(tmp_path / "r.yaml")
    assert loaded.shown == loaded.renamed != ()


def test_two_names_of_a_key_may_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("adapter: qlora\nload_in_4bit: true\nlora_r: 8\n")
    assert load_recipe(tmp_path / "r.yaml").lora.frozen == "nf4"


def test_a_name_in_several_sections_is_asked_for_in_full(complain: Complain) -> None:
    (problem,) = complain("revision: main")
    assert problem.fix == "in full: `model.revision` or `data.tokenizer.revision`"


@pytest.mark.parametrize("text", ["rl: grpo", "stage: ppo", "rl: kto", "optimizer: shampoo", "optimizer: lion_8bit"])
def test_another_value_is_no_misspelling(complain: Complain, text: str) -> None:
    (problem,) = complain(text)
    assert problem.fix.startswith("give one of")


def test_a_key_that_is_like_none_is_told_those_of_its_section() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, ["evaluate.every_steps=5"])
    fix = caught.value.problems[0].fix
    assert "`evaluate.eval_steps`" in fix and "`evaluate.max_batches`" in fix and "train." not in fix


def test_a_section_on_the_command_line_may_be_a_mapping() -> None:
    off = load_recipe(None, ["lora={rank: 8, frozen: nf4, modules_to_save: [lm_head]}", "lora.rank=null"])
    assert off.lora.rank is None, "adapters are off, whatever else is said of them"
    lora = load_recipe(None, ["lora={rank: 8, frozen: nf4}", "data={tokenizer: {path: x/y}}"])
    assert (lora.lora.rank, lora.lora.frozen, lora.data.tokenizer.path) == (8, "nf4", "x/y")
    with pytest.raises(ConfigError, match=r"unknown key `lora\.rang`"):
        load_recipe(None, ["lora={rang: 8}"])


def test_values_as_people_write_them() -> None:
    words = ["max_steps=1e3", "warmup_steps=2e2", "run.device=gpu", "parallel=ZeRO-3", "optim.learning_rate=2e0"]
    recipe = load_recipe(None, words)
    assert (recipe.train.max_steps, recipe.optim.warmup_steps, recipe.optim.learning_rate) == (1000, 200, 2.0)
    assert (recipe.run.device, recipe.parallel.strategy) == ("cuda", "zero3")
    for word, fix in (
        ("max_steps=1.5", "a whole number"),
        ("optim.schedule=Cosin", "did you mean `cosine`"),
        ("train=3", "keys: train.seq_len, train.micro_batch_size, "),
        ("precision.products=fp8", "`precision.products=float8`"),
        ("precision.products=e4m3", "`precision.products=float8`, which is e4m3"),
        ("precision.products=BF16", "`precision.products=compute`, which multiplies"),
        ("precision.scales=rowwise", "`precision.scales=row`"),
        ("precision.gather=fp8", "`precision.gather=float8`"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_recipe(None, [word])
        assert fix in caught.value.problems[0].fix


def test_a_section_may_be_one_value() -> None:
    recipe = load_recipe(None, ["recompute=full", "precision=bf16", "parallel=zero2", "model=a/b", "data=x/*.txt"])
    assert (recipe.recompute.mode, recipe.precision.compute, recipe.parallel.strategy) == ("full", "bf16", "zero2")
    assert (recipe.model.path, recipe.data.path) == ("a/b", "x/*.txt")


def test_overrides_are_text_where_text_is_wanted() -> None:
    recipe = load_recipe(
        None, ["run.name=2024", "model.revision=1e5", "data.path=*.txt", "evaluate.sample_prompt=a: b"]
    )
    assert (recipe.run.name, recipe.model.revision, recipe.data.path) == ("2024", "1e5", "*.txt")
    assert recipe.evaluate.sample_prompt == "a: b"


def test_overrides_reach_into_mappings_and_replace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {config: {hidden_size: 64, vocab_size: 9}}\ntrain: {seq_len: 128}\n")
    recipe = load_recipe(path, ["model.config.hidden_size=32", "seq_len=64", "data.path=[a, b]", "seq_len=96"])
    assert recipe.model.config == {"hidden_size": 32, "vocab_size": 9}
    assert (recipe.train.seq_len, recipe.data.path) == (96, ["a", "b"])


def test_a_trial_with_fewer_steps_shortens_the_warmup_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("train: {max_steps: 100}\noptim: {warmup_steps: 20}\n")
    loaded = read_recipe(path, ["train.max_steps=5"])
    assert loaded.recipe.optim.warmup_steps == 5
    assert len(loaded.notices) == 1 and shows(
        loaded.notices[0], f"{path}:2", "`optim.warmup_steps`", 20, 5, "train.max_steps"
    )
    with pytest.raises(ConfigError):
        load_recipe(path, ["train.max_steps=5", "optim.warmup_steps=20"])


def test_a_recipe_survives_being_written(tmp_path: Path) -> None:
    overrides = ["optim.groups=[{pattern: '*norm*', weight_decay: 0}]", "precision.modules.head=fp32", "run.name=no"]
    recipe = load_recipe(None, [*overrides, 'evaluate.sample_prompt="def \\n\\t# é \\U0001F600"', "data.path=[a, '1']"])
    path = tmp_path / "r.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    assert load_recipe(None) == Recipe()


def test_keys_are_all_leaves_of_the_recipe() -> None:
    keys = sorted(keys_of(recipe_schema()).leaves)
    assert keys == sorted(set(keys))
    assert {"train.seq_len", "data.tokenizer.vocab_size", "compile", "optim.groups"} <= set(keys)
    assert "train" not in keys


def test_dotted_keys_of_what_is_nested() -> None:
    assert dotted({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


@pytest.mark.parametrize(
    "key",
    [
        *("train.seq_len", "train.micro_batch_size", "train.gradient_accumulation_steps", "train.global_batch_size"),
        *("parallel.tp", "parallel.cp", "parallel.ep", "parallel.pp", "parallel.dp_shard", "parallel.dp_replicate"),
        *("parallel.stages_per_rank", "run.nodes", "run.nproc", "data.num_proc", "train.num_epochs"),
    ],
)
def test_numbers_that_are_looped_over_have_a_bound(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, ["model=m", f"{key}=100000000"])
    assert any((problem.code, key in problem.what) == ("CFG005", True) for problem in caught.value.problems)
