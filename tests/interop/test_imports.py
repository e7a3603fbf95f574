"""The files of other systems: what each key means, with that system's defaults; own small samples, one rule a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.interop.imports import Imported, foreign, read_files
from shardwise.interop.system import FATES, READ, lines_of, table
from shardwise.interop.systems import SYSTEMS
from shardwise.spec.keys import keys_of
from shardwise.spec.load import dump_settings, load_recipe, read_settings, recipe_schema

AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
datasets:
  - path: org/conversations
    type: chat_template
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
lr_scheduler: cosine
optimizer: adamw_bnb_8bit
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
bf16: auto
wandb_project: mine
"""
ARGUMENTS = """
model_name_or_path: meta-llama/Llama-3.2-1B
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 5.0e-05
num_train_epochs: 2
lr_scheduler_type: cosine
output_dir: out
"""
TRL = ARGUMENTS + "torch_dtype: bfloat16\ndataset_name: org/pairs\n"
SWIFT = "model: org/model\ntrain_type: lora\ndataset: a.jsonl\nlearning_rate: 1e-4\ndeepspeed: zero2\n"
LLAMAFACTORY = ARGUMENTS + "stage: sft\nfinetuning_type: lora\ncutoff_len: 1024\ndataset: mine\ntemplate: llama3\n"
TORCHTUNE = """
output_dir: /tmp/out
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj, output_proj],
        apply_lora_to_mlp: true, lora_rank: 8, lora_alpha: 16}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, output_dir: "${output_dir}"}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: false}
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
batch_size: 2
batch_size_val: ${batch_size}
epochs: 1
dtype: bf16
"""
TORCHTITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_max_lr": 1e-4},
    },
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
"""
SAMPLES = {
    "axolotl": ("a.yaml", AXOLOTL),
    "hf": (
        "a.json",
        json.dumps(
            {
                "per_device_train_batch_size": 4,
                "learning_rate": "5e-5",
                "num_train_epochs": 1,
                "lr_scheduler_type": "linear",
                "output_dir": "out",
            }
        ),
    ),
    "trl": ("a.yaml", TRL),
    "llamafactory": ("a.yaml", LLAMAFACTORY),
    "torchtune": ("a.yaml", TORCHTUNE),
    "torchtitan": ("a.toml", TORCHTITAN),
    "deepspeed": ("a.json", json.dumps(DEEPSPEED)),
    "accelerate": ("a.yaml", ACCELERATE),
}


def imported(tmp_path: Path, *texts: str | dict[str, Any], world: int = 8) -> Imported:
    """What files with these contents say on so many processes."""
    paths = []
    for index, text in enumerate(texts):
        toml = isinstance(text, str) and text.lstrip().startswith("[")
        path = tmp_path / f"{index}.{'json' if isinstance(text, dict) else 'toml' if toml else 'yaml'}"
        path.write_text(json.dumps(text) if isinstance(text, dict) else text)
        paths.append(path)
    return read_files(paths, world)


def values(found: Imported) -> dict[str, Any]:
    """Every setting, those of the split among them."""
    return {key: setting.value for key, setting in (found.settings | found.pins).items()}


def refusals(tmp_path: Path, *texts: str | dict[str, Any], world: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, *texts, world=world)
    return "\n".join(f"{problem.code} {problem.what}" for problem in caught.value.problems)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_is_recognised_read_and_is_a_recipe(tmp_path: Path, name: str) -> None:
    file, text = SAMPLES[name]
    path = tmp_path / file
    path.write_text(text)
    assert foreign(path)
    found = read_files([path], 8)
    assert [system.name for system in found.systems] == [name]
    settings = {key: (setting.value, setting.origin) for key, setting in (found.settings | found.pins).items()}
    assert all(origin for _, origin in settings.values())
    recipe = read_settings(
        settings, [f"{key}={'model' if key != 'train.seq_len' else 8}" for key in found.asked]
    ).recipe
    again = tmp_path / "recipe.yaml"
    again.write_text(dump_settings(settings, "head"))
    assert load_recipe(again, [f"{key}={'model' if key != 'train.seq_len' else 8}" for key in found.asked]) == recipe
    assert not foreign(again)


def test_each_key_has_one_fate(tmp_path: Path) -> None:
    found = imported(tmp_path, AXOLOTL + "my_own_key: 3\n")
    names = [name for fate in found.fates for name in found.fates[fate]]
    assert len(names) == len(set(names)) == 16
    assert found.fates["unread"] == ["my_own_key"] and found.fates["none"] == ["wandb_project"]


@pytest.mark.parametrize("name", sorted({name for system in SYSTEMS for name in system.tables}))
def test_tables_name_keys_that_there_are(name: str) -> None:
    whole, globs = table(name)
    leaves = keys_of(recipe_schema()).leaves
    for key, row in [*whole.items(), *globs]:
        assert row.fate in (*FATES, "read"), key
        assert row.fate != "kept" or row.ours in leaves, key
        assert row.fate != "refused" or row.say, f"{name}: {key} is refused without a reason"


def test_settings_name_keys_that_there_are() -> None:
    """Ours are keys of a recipe, and theirs are read by a table of a system; a way of reading that is misspelt would
    be found only where such a key comes up."""
    leaves = keys_of(recipe_schema()).leaves
    ways = ("number", "count", "some", "degree", "switch", "on", "text", "refused")
    for row in lines_of("settings"):
        assert row["reads"] in ways or "=" in row["reads"], row
        assert row["reads"] == "refused" or leaves.keys() >= {*row["ours"].split()}, row
        for key in row["keys"].split():
            rows = [known for system in SYSTEMS if (known := system.row(key)) is not None]
            assert any(known.fate in READ or row["reads"] == "refused" for known in rows), key


def test_a_degree_of_another_file_is_not_deepspeeds(tmp_path: Path) -> None:
    """Accelerate's context parallelism is a ring; only DeepSpeed's own key makes it Ulysses."""
    split = "parallelism_config: {parallelism_config_cp_size: 2}\n"
    sharded = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "bf16": {"enabled": True}}
    found = values(imported(tmp_path, ACCELERATE + split, sharded, TRL))
    assert found["parallel.cp"] == 2 and "parallel.cp_kind" not in found
    found = values(imported(tmp_path, sharded | {"sequence_parallel_size": 2}, TRL))
    assert found["parallel.cp"] == 2 and found["parallel.cp_kind"] == "ulysses"


def test_recipes_of_ours_are_not_taken_for_another_systems() -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    assert not [path.name for path in recipes.glob("*.yaml") if foreign(path)]


def test_batch_is_micro_times_accumulation_times_data_parallel_ranks(tmp_path: Path) -> None:
    split = "parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_cp_size: 2}\n"
    assert values(imported(tmp_path, TRL))["train.global_batch_size"] == 4 * 2 * 8
    found = values(imported(tmp_path, ACCELERATE + split, TRL))
    assert found["train.global_batch_size"] == 4 * 2 * 2
    assert (found["parallel.tp"], found["parallel.cp"], found["parallel.strategy"]) == (2, 2, "zero3")
    found = values(imported(tmp_path, AXOLOTL + "context_parallel_size: 4\n"))
    assert found["train.global_batch_size"] == 2 * 4 * 2
    assert values(imported(tmp_path, TORCHTITAN))["train.global_batch_size"] == 2 * 4


def test_of_deepspeeds_three_sizes_the_third_follows_and_all_must_agree(tmp_path: Path) -> None:
    assert values(imported(tmp_path, DEEPSPEED))["train.global_batch_size"] == 2 * 4 * 8
    two = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    found = values(imported(tmp_path, two))
    assert (found["train.micro_batch_size"], found["parallel.strategy"]) == (4, "zero1")
    assert "IMP001" in refusals(tmp_path, DEEPSPEED | {"train_batch_size": 60})
    assert "no multiple" in refusals(tmp_path, {"train_batch_size": 20, "train_micro_batch_size_per_gpu": 3})


def test_auto_says_nothing_and_a_literal_must_agree(tmp_path: Path) -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
    }
    found = values(imported(tmp_path, auto, TRL))
    assert (found["train.global_batch_size"], found["parallel.strategy"]) == (64, "zero2")
    assert found["optim.learning_rate"] == 5e-5
    assert "IMP004" in refusals(tmp_path, auto | {"train_micro_batch_size_per_gpu": 3}, TRL)


def test_deepspeeds_optimizer_and_schedule_go_before_the_trainers(tmp_path: Path) -> None:
    whole = {key: value for key, value in DEEPSPEED.items() if key not in ("train_micro_batch_size_per_gpu",)}
    found = values(imported(tmp_path, whole | {"gradient_accumulation_steps": 2}, TRL.replace("5.0e-05", "1e-4")))
    assert (found["optim.beta2"], found["optim.weight_decay"]) == (0.95, 0.1)
    assert (found["optim.schedule"], found["optim.warmup_steps"]) == ("linear", 10)
    assert "train.max_steps" not in found and found["train.num_epochs"] == 2  # the schedule is as long, not the run
    assert values(imported(tmp_path, DEEPSPEED))["optim.max_grad_norm"] == 1.0  # DeepSpeed's own, since 0.19


@pytest.mark.parametrize(
    ("said", "strategy"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", "zero3"),
        ("fsdp_sharding_strategy: 2", "zero2"),
        ("fsdp_sharding_strategy: NO_SHARD", "ddp"),
        ("fsdp_sharding_strategy: HYBRID_SHARD", "hsdp"),
        ("fsdp_version: 2, fsdp_reshard_after_forward: false", "zero2"),
        ("fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_sharding_strategy: FULL_SHARD", "zero2"),
        ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "zero3"),
    ],
)
def test_fsdp_of_both_generations(tmp_path: Path, said: str, strategy: str) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{{said}}}\n"
    assert values(imported(tmp_path, text))["parallel.strategy"] == strategy


def test_precision(tmp_path: Path) -> None:
    def dtypes(*texts: str | dict[str, Any]) -> tuple[Any, Any]:
        found = values(imported(tmp_path, *texts))
        return found.get("precision.compute"), found.get("precision.weights")

    assert dtypes(LLAMAFACTORY) == ("fp32", None)
    assert dtypes(LLAMAFACTORY + "bf16: true\n") == ("bf16", None)
    assert dtypes(LLAMAFACTORY + "pure_bf16: true\n") == ("bf16", "bf16")
    assert dtypes(TORCHTUNE) == ("bf16", "bf16")
    assert dtypes(TORCHTITAN) == ("bf16", "fp32")
    assert dtypes(TORCHTITAN.replace("steps = 1000", 'steps = 1000\ndtype = "bfloat16"')) == ("bf16", "bf16")
    assert dtypes({"train_batch_size": 8, "zero_optimization": {"stage": 1}}) == ("fp32", None)
    assert dtypes({"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})[0] == "fp16"


def test_axolotl_computes_in_bf16_unless_told_otherwise(tmp_path: Path) -> None:
    """`bf16: auto` is the default of its schema; `fp16: true` turns that off."""
    silent = AXOLOTL.replace("bf16: auto\n", "")
    for more, dtype in (("", "bf16"), ("fp16: true\n", "fp16"), ("bf16: false\n", "fp32"), ("bf16: true\n", "bf16")):
        assert values(imported(tmp_path, silent + more))["precision.compute"] == dtype, more
    assert values(imported(tmp_path, AXOLOTL + "fp16: true\n"))["precision.compute"] == "fp16"


def test_what_becomes_of_samples_that_are_too_long(tmp_path: Path) -> None:
    """axolotl and ms-swift leave them out, TRL and LLaMA-Factory cut them."""
    for text, way in (
        (AXOLOTL, "drop"),
        (AXOLOTL + "excess_length_strategy: raise\n", "error"),
        (AXOLOTL + "excess_length_strategy: truncate\n", "truncate"),
        (AXOLOTL + "rl: dpo\n", "drop"),
        (SWIFT, "drop"),
        (SWIFT + "truncation_strategy: right\n", "truncate"),
        (TRL, "truncate"),
        (LLAMAFACTORY, "truncate"),
    ):
        assert values(imported(tmp_path, text)).get("data.too_long", "truncate") == way, text
    assert "IMP001" in (said := refusals(tmp_path, SWIFT + "truncation_strategy: left\n")) and "not left" in said


def test_muon_is_read_where_its_steps_are_ours(tmp_path: Path) -> None:
    """LLaMA-Factory's is Moonlight's, DeepSpeed's the original with AdamW's rate apart; axolotl has another."""
    full = LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: full") + "use_muon: true\n"
    found = values(imported(tmp_path, full))
    assert (found["optim.name"], found["optim.adjust_lr_fn"]) == ("muon", "match_rms_adamw")
    numbers = {"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.9, "ns_method": "gram"}
    told = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Muon", "params": numbers}}
    found = values(imported(tmp_path, told))
    assert (found["optim.name"], found["optim.momentum"], found["optim.eps"]) == ("muon", 0.9, 1e-10)
    assert (found["optim.learning_rate"], found["optim.adam_learning_rate"]) == (0.02, 1e-3)
    assert "optim.adjust_lr_fn" not in found
    assert "muon" in refusals(tmp_path, AXOLOTL.replace("adamw_bnb_8bit", "muon"))


def test_defaults_of_ms_swift(tmp_path: Path) -> None:
    found = values(imported(tmp_path, SWIFT))
    assert (found["lora.rank"], found["lora.alpha"], found["lora.dropout"]) == (8, 32.0, 0.05)
    assert "data.train_on" not in found
    assert values(imported(tmp_path, SWIFT + "loss_scale: last_round\n"))["data.train_on"] == "last"
    assert "IMP001" in refusals(tmp_path, SWIFT + "loss_scale: ignore_empty_think\n")
    assert "`model.frozen` says which" in refusals(tmp_path, SWIFT + "freeze_parameters_ratio: 0.5\n")


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        (AXOLOTL + "datasets: [{pathh: a/b, type: chat_template}]\n", "datasets.pathh", "datasets.path"),
        (ACCELERATE.replace("reshard_after_forward: t", "reshard_after_forwad: t"), "_forwad", "_forward"),
        (AXOLOTL + "fsdp_config: {offload_parms: true}\n", "offload_parms", "offload_params"),
    ],
)
def test_a_misspelt_key_of_a_section_is_named(tmp_path: Path, text: str, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"IMP002.*{wrong}.*not known(.|\n)*did you mean `[\w.]*{right}`"):
        imported(tmp_path, text)


def test_simpo_has_a_margin_of_each_systems_own(tmp_path: Path) -> None:
    """Its authors' in units of beta; of TRL's trainer for CPO only without the loss over tokens beside it."""
    for text, beta, gamma in (
        (TRL + "beta: 10\ngamma_beta_ratio: 0.5\n", 10.0, 5.0),
        (TRL + "gamma_beta_ratio: 0.25\n", 2.0, 0.5),
        (TRL + "loss_type: simpo\nsimpo_gamma: 0.7\ncpo_alpha: 0\n", 0.1, 0.7),
        (AXOLOTL + "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.2\ncpo_alpha: 0.0\n", 2.0, 1.2),
        (LLAMAFACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: simpo\npref_beta: 2.5\n", 2.5, 0.5),
    ):
        found = values(imported(tmp_path, text))
        assert (found["method.name"], found["method.beta"], found["method.gamma"]) == ("simpo", beta, gamma), text
    assert "over tokens" in refusals(tmp_path, AXOLOTL + "rl: simpo\nsimpo_gamma: 1.2\n")
    assert "over tokens" in refusals(tmp_path, TRL + "simpo_gamma: 1.2\ncpo_alpha: 0.5\n")
    found = values(imported(tmp_path, LLAMAFACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: orpo\n"))
    assert (found["method.name"], found["method.beta"]) == ("orpo", 0.1)
    assert "prompts and answers" in refusals(tmp_path, AXOLOTL + "rl: orpo\n")


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    for text in (AXOLOTL, TRL, SWIFT):
        assert "a share of" in refusals(tmp_path, text + "warmup_ratio: 1.5\n")


def test_adapters_have_each_systems_defaults(tmp_path: Path) -> None:
    found = values(imported(tmp_path, LLAMAFACTORY + "lora_rank: 4\nlora_target: all\n"))
    assert (found["lora.rank"], found["lora.alpha"], found["lora.targets"]) == (4, 8.0, "all-linear")
    found = values(
        imported(tmp_path, TRL + "use_peft: true\nlora_target_modules: [q_proj, v_proj]\nload_in_4bit: true\n")
    )
    assert (found["lora.rank"], found["lora.alpha"], found["lora.frozen"]) == (16, 32.0, "nf4")
    assert found["lora.targets"] == ["q_proj", "v_proj"]
    ends = "lora_rank: 4\nadditional_target: embed_tokens,lm_head\n"
    for text in (LLAMAFACTORY + ends, TRL + "use_peft: true\nlora_modules_to_save: [embed_tokens, lm_head]\n"):
        assert values(imported(tmp_path, text))["lora.modules_to_save"] == ["embed_tokens", "lm_head"]
    both = {"data.add_tokens": ["<a>", "<b>"], "data.add_special_tokens": ["<|c|>"]}
    for text in (
        LLAMAFACTORY + "add_tokens: <a>, <b>\nadd_special_tokens: <|c|>\n",
        AXOLOTL + "tokens: [<a>, <b>]\nspecial_tokens: {additional_special_tokens: [<|c|>], eos_token: </s>}\n",
    ):
        assert both.items() <= values(imported(tmp_path, text)).items()
    found = imported(tmp_path, LLAMAFACTORY.replace("template: llama3", "") + "template: llama3\n")
    assert any("`template: llama3`" in note for note in found.notes)
    apart = (
        "new_special_tokens_config: tokens.yaml\ninit_special_tokens: description\nfreeze_original_embeddings: false\n"
    )
    said = refusals(tmp_path, LLAMAFACTORY + apart)
    assert "in another file" in said and "begin otherwise" in said and "freeze" not in said
    found = values(imported(tmp_path, TORCHTUNE))
    assert found["lora.targets"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    found = values(imported(tmp_path, AXOLOTL))
    assert (found["lora.frozen"], found["lora.targets"]) == ("nf4", "all-linear")


def test_what_axolotl_says_of_records_is_read(tmp_path: Path) -> None:
    for named, theirs in (("zephyr", "zephyr"), ("jinja\nchat_template_jinja: mine.jinja", "mine.jinja")):
        found = values(imported(tmp_path, AXOLOTL + f"chat_template: {named}\n"))
        assert found["data.chat_template"] == theirs
    assert "data.chat_template" not in values(imported(tmp_path, AXOLOTL + "chat_template: tokenizer_default\n"))
    fields = "    field_messages: turns\n    message_property_mappings: {role: speaker, content: value}\n"
    found = values(imported(tmp_path, AXOLOTL.replace("sequence_len", fields + "sequence_len", 1)))
    assert [found[f"data.{key}_key"] for key in ("messages", "role", "content")] == ["turns", "speaker", "value"]
    for method in ("dpo", "ipo", "simpo\nsimpo_gamma: 1.2\ncpo_alpha: 0"):
        found = values(imported(tmp_path, AXOLOTL + f"rl: {method}\nchat_template: zephyr\n"))
        assert (found["data.chat_template"], found["data.too_long"]) == ("zephyr", "drop"), method


def test_length_packing_and_clipping_have_each_systems_defaults(tmp_path: Path) -> None:
    found = values(imported(tmp_path, TRL + "max_steps: 50\n"))
    assert found["train.max_steps"] == 50 and "train.num_epochs" not in found
    assert (found["data.packing"], found["train.seq_len"], found["recompute.mode"]) == (False, 1024, "full")
    assert values(imported(tmp_path, AXOLOTL))["data.packing"] is False
    assert values(imported(tmp_path, TORCHTUNE))["optim.max_grad_norm"] is None
    assert values(imported(tmp_path, TRL))["optim.max_grad_norm"] == 1.0
    assert values(imported(tmp_path, TRL + "max_grad_norm: 0\n"))["optim.max_grad_norm"] is None
    found = values(imported(tmp_path, TORCHTUNE + "max_steps_per_epoch: 30\nepochs: 2\n".replace("epochs: 2\n", "")))
    assert found["train.max_steps"] == 30


def test_schedules(tmp_path: Path) -> None:
    kwargs = "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
    found = values(imported(tmp_path, TRL.replace(": cosine", ": cosine_with_min_lr") + kwargs + "warmup_ratio: 0.1\n"))
    assert found["optim.schedule"] == "cosine" and found["optim.min_learning_rate"] == pytest.approx(5e-6)
    assert found["optim.warmup_steps"] == 0.1
    assert not imported(tmp_path, TRL + "warmup_steps: 10\n").notes
    found = values(imported(tmp_path, TRL.replace(": cosine", ": constant") + "warmup_ratio: 0.1\n"))
    assert found["optim.warmup_steps"] == 0  # transformers' constant has none
    assert "reduce_lr_on_plateau" in refusals(tmp_path, TRL.replace(": cosine", ": reduce_lr_on_plateau"))
    assert "2 waves" in refusals(tmp_path, TRL + "lr_scheduler_kwargs: {num_cycles: 2}\n")
    assert "an argument `power`" in refusals(tmp_path, TRL + "lr_scheduler_kwargs: {power: 2}\n")
    stable = TORCHTITAN.replace("warmup_steps = 200", "warmup_steps = 200\ndecay_ratio = 0.1\nmin_lr_factor = 0.1")
    found = values(imported(tmp_path, stable))
    assert (found["optim.schedule"], found["optim.decay_steps"]) == ("wsd", 100)
    assert found["optim.min_learning_rate"] == pytest.approx(3e-5)
    assert "falls as step" in refusals(
        tmp_path, stable.replace("decay_ratio = 0.1", 'decay_ratio = 0.1\ndecay_type = "step"')
    )


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (TRL + "loss_type: nll\n", "sft"),
        (TRL + "loss_type: [sigmoid]\nbeta: 0.2\n", "dpo"),
        (TRL + "loss_type: ipo\nbeta: 0.2\n", "ipo"),
        (TRL + "loss_type: hinge\nbeta: 0.2\n", "hinge"),
        (LLAMAFACTORY.replace("stage: sft", "stage: dpo") + "pref_loss: ipo\npref_beta: 0.2\n", "ipo"),
        (AXOLOTL + "rl: ipo\nrl_beta: 0.2\n", "ipo"),
    ],
)
def test_losses_of_pairs(tmp_path: Path, text: str, method: str) -> None:
    """The losses of TRL's DPOTrainer that are here are read; its ORPO adds another term (docs/preference.md)."""
    found = values(imported(tmp_path, text))
    assert found["method.name"] == method and found.get("method.beta", 0.2) == 0.2
    assert "orpo" in refusals(tmp_path, TRL + "loss_type: orpo\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AXOLOTL + "neftune_noise_alpha: 5\n", "NEFTune"),
        (AXOLOTL + "relora: true\n", "ReLoRA"),
        (AXOLOTL + "rl: kto\n", "kto is not"),
        (TRL + "num_generations: 8\n", "GRPO"),
        (TRL + "optim: rmsprop\n", "rmsprop"),
        (LLAMAFACTORY + "use_galore: true\n", "GaLore"),
        (AXOLOTL + "my_loss_weight: 0.3\n", "IMP002"),
        ({**DEEPSPEED, "compression_training": {"weight_quantization": {"enabled": True}}}, "compression"),
        ({**DEEPSPEED, "optimizer": {"type": "OneBitAdam"}}, "OneBitAdam"),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(tmp_path: Path, text: Any, said: str) -> None:
    assert said in refusals(tmp_path, text)


def test_a_key_that_misspells_one_is_not_passed_over(tmp_path: Path) -> None:
    """The default would be taken, and nobody would see why."""
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, AXOLOTL.replace("learning_rate:", "learnin_rate:"))
    [problem] = caught.value.problems
    assert problem.code == "IMP002" and "learning_rate" in problem.fix and problem.where.endswith(":9")
    assert "IMP002 `lr_scheduler.warmup_step:" in refusals(tmp_path, TORCHTITAN.replace("warmup_steps", "warmup_step"))


def test_what_is_off_is_not_refused(tmp_path: Path) -> None:
    off = "neftune_noise_alpha:\nrelora: false\nload_in_8bit: false\nmy_loss_weight: 0\n"
    assert imported(tmp_path, AXOLOTL + off).fates["refused"] == []


def test_what_is_left_out_is_asked_for_together(tmp_path: Path) -> None:
    def asked(*texts: str) -> set[str]:
        return set(imported(tmp_path, *texts).asked)

    assert asked(ACCELERATE) == {"model.path", "data.path"}
    assert asked(TORCHTITAN) == {"data.path"}
    assert asked(TORCHTUNE.replace(", max_seq_len: 2048", "")) == {"data.path", "train.seq_len"}
    assert asked(ACCELERATE, TRL) == set()


def test_numbers_are_those_of_each_systems_parser(tmp_path: Path) -> None:
    found = values(imported(tmp_path, AXOLOTL.replace("sequence_len: 4096", "sequence_len: 500_000")))
    assert found["train.seq_len"] == 500_000
    assert "is no number" in refusals(tmp_path, AXOLOTL.replace("learning_rate: 2e-4", "learning_rate: fast"))


def test_references_within_a_file(tmp_path: Path) -> None:
    found = imported(tmp_path, TORCHTUNE.replace("batch_size: 2\n", "batch_size: ${epochs}\n"))
    assert values(found)["train.micro_batch_size"] == 1
    loop = TORCHTUNE.replace("batch_size: 2\n", "batch_size: ${batch_size_val}\n")
    assert "batch_size is not in" in refusals(tmp_path, loop)


def test_the_last_of_two_equal_keys_counts_as_there(tmp_path: Path) -> None:
    found = imported(tmp_path, AXOLOTL + "sequence_len: 2048\n")
    assert values(found)["train.seq_len"] == 2048 and any("twice" in note for note in found.notes)


@pytest.mark.parametrize(
    "text",
    [
        "base_model: !!python/object/apply:os.system ['echo hi']\n",
        "a: &a [1]\n"
        + "".join(f"b{n}: &b{n} [" + ", ".join([f"*{'a' if n == 0 else f'b{n - 1}'}"] * 50) + "]\n" for n in range(9)),
        "[" * 200 + "]" * 200,
        "base_model: \x00\n",
        "base_model: *nothing\n",
        "- 1\n- 2\n",
        "base_model: m\nmicro_batch_size: " + "9" * 5000 + "\n",
        "x" * 300_000,
    ],
)
def test_hostile_files_end_in_a_coded_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    for system in (None, "axolotl", "deepspeed"):
        try:
            read_files([path], 8, system)
        except ShardwiseError as error:
            assert all(problem.code for problem in error.problems)


def test_strict_makes_errors_of_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AXOLOTL)
    with pytest.raises(ConfigError, match="wandb_project"):
        read_files([path], 8, strict=True)
