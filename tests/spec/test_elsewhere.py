"""What became of the keys of other systems: each answer is true, and those of whole recipes work."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.interop.system import FATES, table
from shardwise.interop.systems import SYSTEMS
from shardwise.spec import elsewhere
from shardwise.spec.keys import keys_of, other_names
from shardwise.spec.load import read_recipe, recipe_schema
from tests.said import shows

KEYS = keys_of(recipe_schema())
ROOT = Path(__file__).parents[2]

_HEAD = """# Coming from another system

Configuration files of other systems are read whole, wherever a command takes a recipe, and several together as that
system merges them:

    shardwise plan train.yaml zero3.json --cluster 8xH100      # an axolotl file, and the DeepSpeed JSON that it uses
    shardwise import train.yaml zero3.json --cluster 8xH100 -o recipe.yaml
    shardwise train recipe.yaml

`key=value` of a recipe may follow, and goes before what the files say; `--from SYSTEM` where a file could be of two;
`--set NAME=VALUE` for a variable of a script, or for what is not literal in a configuration in Python (TorchTitan's):
both are read and never run. What no file says (machines, the model, the data) is asked for once, together. The recipe
that `import` writes says of each line where it came from.

**Each key ends in one of four ways**, and `--explain keys` lists them:

* **read**: the same meaning here, with that system's defaults and units;
* **left to the plan**: how something is done, which is chosen here (bucket sizes, prefetch, overlap, pinned memory);
* **without effect on training**: logging, launching, publishing;
* **refused**: it changes the mathematics in a way that is not there, and the error says what it would have done.

A key in no table is named as not read, and is an error where it might change what is learned.

**A page shows two rows on top**: the split that the files pin, and the best that learns the same. Of an axolotl file
for Llama-3.1-8B (rows of 4,096 tokens, micro-batch 1, accumulation 8, `gradient_checkpointing: true`) and a DeepSpeed
JSON of stage 3 that has the optimizer and the parameters on the CPU, `--cluster 8xH100`:

```text
split by DeepSpeed and axolotl  ZeRO-3 over 8                                               6.80 s a step  \
38,537 tokens/s  fits: 16.0 GiB of 79.1 GiB (20%); 119.7 GiB of 1,000.0 GiB on the host (12%)
best, and learns the same       ZeRO-1 over 4, pp 2 (interleaved, stages of 2 to 5 blocks)  2.82 s a step  \
92,906 tokens/s  fits: 59.3 GiB of 79.1 GiB (75%)
```

**The way back**: `shardwise plan recipe.yaml --cluster 8xH100 --emit deepspeed` prints the plan as a file of DeepSpeed;
`accelerate`, `megatron` and `torchtitan` are the others. What such a file cannot say stands above it, as a comment;
what it says is the same plan, read again.

## What is read of each system

Keys, and patterns of keys, by how they end; `import` tells of your own file which is which. A value of a key that is
read, or several keys together, may ask for what is not there, and are refused as well.

SYSTEMS

## Keys of theirs in a recipe

A recipe of Shardwise's own accepts {READ} keys of axolotl, TRL, transformers, DeepSpeed, LLaMA-Factory and torchtune
unchanged, flat or in the right section; `shardwise plan RECIPE --explain keys` lists how each was read. Of the other
keys of their example configurations {INSTEAD} are answered by what to write instead, {AUTOMATIC} are not needed and
ignored, and {MISSING} are refused with what is not there. Keys that are empty or off (`load_in_8bit: false`,
`wandb_project:`) are ignored.

This page is generated from `src/shardwise/interop/tables/`, `src/shardwise/spec/elsewhere.json` and `keys.json`:
`python -m tests.spec.test_elsewhere > docs/migrating.md`."""

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: false
load_in_4bit: true
strict: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
wandb_project:
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
xformers_attention:
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
eval_table_size:
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens:
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
lora_rank: 8
lora_target: q_proj,v_proj
pref_beta: 0.2
pref_loss: sigmoid
cutoff_len: 2048
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves
logging_steps: 10
save_steps: 500
plot_loss: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
resume_from_checkpoint: null
"""
TORCHTUNE = """
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 8
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  lr: 3e-4
checkpointer:
  checkpoint_files: [a.safetensors]
batch_size: 2
epochs: 1
enable_activation_checkpointing: true
"""


def read(tmp_path: Path, text: str, *more: str):
    (tmp_path / "r.yaml").write_text(text)
    return read_recipe(tmp_path / "r.yaml", more)


def test_no_key_has_two_answers_or_is_one_of_ours() -> None:
    keys = [key for answer in elsewhere.answers() for key in answer.keys.split()]
    assert len(keys) == len(set(keys)) > 400
    assert not [key for key in keys if KEYS.canonical(key)]


def test_what_to_write_instead_can_be_written() -> None:
    needs = {
        "lora.frozen": ["lora.rank=4"],
        "lora.alpha": ["lora.rank=4"],
        "lora.dora": ["lora.rank=4"],
        "lora.dropout": ["lora.rank=4"],
        "lora.targets": ["lora.rank=4"],
        "data.train_on": ["method=sft"],
        "data.packing": ["method=sft"],
        "data.chat_template": ["method=sft"],
        "data.mixture_weights": ["data.path=[a,b]"],
        "data.streaming": ["train.max_steps=5"],
        "data.add_special_tokens": ["data.tokenizer.path=t"],
        "checkpoint.keep_best": ["evaluate.eval_steps=5"],
    }
    for answer in elsewhere.answers():
        if answer.kind == "instead":
            key, _, value = answer.write.partition(": ")
            given = read_recipe(None, [*needs.get(key, []), f"{key}={value}"]).given
            assert key in given or f"{key}.mode" in given, answer.write


MEANT = [
    (key, value, means) for a in elsewhere.answers() for value, means in a.accepts.items() for key in a.keys.split()
]
CLASH = {
    "checkpoint.saves_per_epoch": "checkpoint.save_steps",
    "evaluate.evals_per_epoch": "evaluate.eval_steps",
    "method.name": "method",
}
BESIDE = {
    "lora.rank": "4",
    "lora.frozen": "nf4",
    "checkpoint.save_steps": "5",
    "evaluate.eval_steps": "5",
    "method": "sft",
    "train.max_steps": "9",
}


def test_what_is_said_of_a_value_is_true() -> None:
    """Of each value in the table: ignored because it is done in any case, or because of a key that says the same, or
    read as a setting; never as empty or turned off unless it is."""
    for key, value, means in MEANT:
        ours, colon, _ = means.partition(": ")
        beside = dict(BESIDE) if not means.startswith("-") else {}
        if colon and not means.startswith("="):
            beside = {k: v for k, v in beside.items() if k not in (ours, CLASH.get(ours))}
            loaded = read_recipe(None, [*(f"{k}={v}" for k, v in beside.items()), f"{key}={value}"])
            assert loaded.renamed[0].endswith(f"is read as `{means}`"), (key, value)
            assert ours in loaded.given, (key, value)
            continue
        loaded = read_recipe(None, [*(f"{k}={v}" for k, v in beside.items()), f"{key}={value}"])
        (said,) = loaded.renamed
        why = said.partition(" is ignored: ")[2]
        if means.startswith("="):
            assert why == means[1:]
        else:
            names = means.removeprefix("-").split()
            assert "any case" in why if not names else why.startswith(f"`{names[0]}` "), (key, value)
            assert set(names) <= KEYS.leaves.keys()
    for answer in elsewhere.answers():
        if answer.kind != "automatic":
            told = {word: answer.meaning(word) for word in ("some", True, 7)}
            assert "=it is empty" not in told.values() and "=it is turned off" not in told.values()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("adapter: lora", "`adapter: lora` needs `lora.rank`"),
        ("adapter:\nlora_r: 8", "`adapter: null` contradicts `lora.rank`"),
        ("finetuning_type: full\nlora_rank: 8", "`finetuning_type: full` contradicts `lora.rank`"),
        ("use_peft: true", "`use_peft: true` needs `lora.rank`"),
        ("save_strategy: steps", "`save_strategy: steps` needs `checkpoint.save_steps`"),
        ("eval_strategy: no\neval_steps: 5", "`eval_strategy: no` contradicts `evaluate.eval_steps`"),
    ],
)
def test_a_key_that_is_said_by_another_needs_that(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert [problem.what for problem in raised.value.problems] == [what]


def test_no_key_of_another_system_is_taken_for_a_misspelling() -> None:
    """A guess that is followed must not change what is trained: each names what the key's own answer names."""
    guessed = {
        key: near
        for answer in elsewhere.answers()
        for key in answer.keys.split()
        if (near := KEYS.nearest(key)) and near not in answer.fix
    }
    never_shown = {"local_rank": "lora.rank", "relora": "lora.rslora", "dataset.split": "parallel.split"}
    assert guessed == never_shown, "each has an answer of its own, which is"
    foreign = (
        "zero_optimization.stage",
        "trainer.precision",
        "quantization.bits",
        "model.num_layers",
        "callbacks.name",
    )
    assert [KEYS.nearest(key) for key in foreign] == [None] * len(foreign)


def test_a_missing_letter_is_recognised_in_every_key() -> None:
    names = [*KEYS.leaves, *(name for names in other_names().values() for name in names if "." not in name)]
    for name in (name for name in names if len(name.rpartition(".")[2]) > 6):
        middle = len(name) - len(name.rpartition(".")[2]) // 2
        if name[middle] not in "0123456789_" and name[middle - 1] not in "_.":
            assert KEYS.nearest(name[:middle] + name[middle + 1 :]) == KEYS.canonical(name), name


def test_every_alias_is_of_one_key_and_takes_its_values() -> None:
    names = [name for names in other_names().values() for name in names]
    assert len(names) == len(set(names))
    assert all(KEYS.canonical(name) == key for key, names in other_names().items() for name in names)


def test_a_single_data_set_of_axolotl_is_read(tmp_path: Path) -> None:
    text = """
datasets:
  - path: org/talks
    type: chat_template
    split: train
    field_messages: turns
    message_property_mappings: {role: from, content: value}
chat_template: tokenizer_default
"""
    recipe = read(tmp_path, text).recipe
    assert (recipe.data.path, recipe.method.name) == ("hf://datasets/org/talks", "sft")
    data = recipe.data
    assert (data.messages_key, data.role_key, data.content_key) == ("turns", "from", "value")
    assert data.chat_template is None
    local = read(tmp_path, "datasets: [{path: data/talks.jsonl, type: chat_template}]").recipe
    assert local.data.path == "data/talks.jsonl"
    with pytest.raises(ConfigError, match=r"datasets.type(.|\n)*prompt of axolotl"):
        read(tmp_path, "datasets: [{path: org/talks, type: alpaca}]")
    with pytest.raises(ConfigError, match=r"unknown key `datasets`(.|\n)*several"):
        read(tmp_path, "datasets: [{path: a, type: chat_template}, {path: b, type: chat_template}]")


def test_an_example_of_trl(tmp_path: Path) -> None:
    text = "dataset_name: trl-lib/Capybara\nassistant_only_loss: true\nuse_peft: true\nlora_r: 4\npadding_free: true\n"
    recipe = read(tmp_path, text + "packing: true\nmax_length: 2048\n", "method=sft").recipe
    assert (recipe.data.path, recipe.data.train_on) == ("hf://datasets/trl-lib/Capybara", "assistant")
    assert (recipe.lora.rank, recipe.train.seq_len, recipe.data.packing) == (4, 2048, True)
    assert read(tmp_path, "assistant_only_loss: false", "method=sft").recipe.data.train_on == "all"


def test_a_file_of_deepspeed_is_read_but_for_what_is_not_there(tmp_path: Path) -> None:
    text = """
train_micro_batch_size_per_gpu: auto
gradient_accumulation_steps: 4
gradient_clipping: auto
steps_per_print: 50
bf16: {enabled: true}
fp16: {enabled: false, loss_scale: 0}
optimizer: {type: AdamW, params: {lr: 1e-4, weight_decay: auto, betas: auto}}
scheduler: {type: WarmupLR, params: {warmup_num_steps: 100}}
zero_optimization: {stage: 3, overlap_comm: true, reduce_bucket_size: 5e8, offload_optimizer: {device: cpu}}
"""
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert {problem.what for problem in raised.value.problems} == {
        "unknown key `scheduler.type`",
        "unknown key `scheduler.params.warmup_num_steps`",
    }
    kept = "".join(line for line in text.splitlines(True) if not line.startswith("scheduler"))
    recipe = read(tmp_path, kept).recipe
    assert recipe.offload.optimizer == "host"
    assert read(tmp_path, kept.replace("device: cpu", "device: none")).recipe.offload.optimizer == "none"
    beyond = "{device: nvme, nvme_path: /scratch, pin_memory: true}, offload_param: {device: cpu, pin_memory: true}"
    all_out = read(tmp_path, kept.replace("{device: cpu}", beyond)).recipe.offload
    assert (all_out.optimizer, all_out.directory, all_out.weights) == ("nvme", "/scratch", "host")
    weights = "{device: none}, offload_param: {device: nvme, nvme_path: /scratch}"
    waiting = read(tmp_path, kept.replace("{device: cpu}", weights)).recipe.offload
    assert (waiting.optimizer, waiting.directory, waiting.weights) == ("none", "/scratch", "nvme")
    assert (recipe.parallel.strategy, recipe.precision.compute, recipe.optim.name) == ("zero3", "bf16", "adamw")
    assert (recipe.train.gradient_accumulation_steps, recipe.optim.learning_rate) == (4, 1e-4)


@pytest.mark.parametrize("key", ["ep", "expert_parallel_size", "expert_model_parallel_size"])
def test_expert_parallelism_by_the_names_that_others_give_it(key: str) -> None:
    assert read_recipe(None, [f"{key}=2"]).recipe.parallel.ep == 2


def test_experts_that_tensor_parallelism_would_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="by tensor parallelism"):
        read_recipe(None, ["etp=2"])
    assert shows(read_recipe(None, ["etp=1"]).renamed[0], "ignored", "any case")


def test_every_key_gets_its_answer(tmp_path: Path) -> None:
    """Told as that of the key, never as a misspelling of another; off, it is left out."""
    expected = {key: answer for answer in elsewhere.answers() for key in answer.keys.split()}
    off = read(tmp_path, "".join(f"{key}:\n" for key in expected if "." not in key))
    assert len(off.renamed) == sum("." not in key for key in expected)
    assert all(" is ignored: " in notice for notice in off.renamed)
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "".join(f"{key}: something\n" for key in expected if "." not in key))
    told = {p.what.split("`")[1]: (p.code, p.fix) for p in raised.value.problems}
    assert told == {k: ("CFG001", a.fix) for k, a in expected.items() if "." not in k and a.kind != "automatic"}
    for key, answer in expected.items():
        assert elsewhere.find(key) is answer and answer.fix


def test_an_example_of_axolotl(tmp_path: Path) -> None:
    recipe = read(tmp_path, AXOLOTL).recipe
    assert (recipe.model.path, recipe.train.seq_len, recipe.train.num_epochs) == (
        "NousResearch/Meta-Llama-3-8B",
        4096,
        4,
    )
    assert (recipe.lora.rank, recipe.lora.frozen, recipe.lora.targets) == (32, "nf4", "all-linear")
    assert (recipe.optim.name, recipe.optim.warmup_steps, recipe.recompute.mode) == ("adamw8bit", 0.1, "full")
    assert (recipe.evaluate.evals_per_epoch, recipe.checkpoint.saves_per_epoch) == (4, 1)


def test_an_example_of_llama_factory(tmp_path: Path) -> None:
    recipe = read(tmp_path, LLAMA_FACTORY).recipe
    assert (recipe.method.name, recipe.method.beta, recipe.train.seq_len) == ("dpo", 0.2, 2048)
    assert (recipe.lora.rank, recipe.lora.targets) == (8, ["q_proj", "v_proj"])
    assert (recipe.data.num_proc, recipe.run.trackers, recipe.precision.compute) == (16, [], "bf16")


def test_an_example_of_torchtune(tmp_path: Path) -> None:
    """All that must be said otherwise is told at once, each with what to write."""
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, TORCHTUNE)
    found = {p.what.split("`")[1]: p.fix for p in raised.value.problems}
    assert {key: fix.partition(",")[0] for key, fix in found.items()} == {
        "model._component_": "`model.path: meta-llama/Llama-3.1-8B`",
        "model.lora_attn_modules": "`lora.targets: [q",
        "model.lora_rank": "`lora.rank: 8`",
        "optimizer._component_": "`optim.name: adamw`",
        "batch_size": "`train.micro_batch_size: 4`",
    }


def test_off_is_no_wish_for_the_default(tmp_path: Path) -> None:
    """Where a key means something here too, null and zero are values: they change what is trained."""
    text = "clip_grad_norm: null\noptimizer: {lr: 3e-4, weight_decay: 0.0, eps: 1e-6}\ndataset: {packed: false}\n"
    recipe = read(tmp_path, text, "method=sft").recipe
    assert (recipe.optim.max_grad_norm, recipe.optim.weight_decay, recipe.data.packing) == (None, 0.0, False)
    assert (recipe.optim.learning_rate, recipe.optim.eps) == (3e-4, 1e-6)


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("shuffle: false", "shuffle", "always shuffled"),
        ("shuffle_merged_datasets: false", "shuffle_merged_datasets", "always shuffled"),
        ("pretrain_multipack_attn: false", "pretrain_multipack_attn", "data.mask_documents: false"),
        ("loss: {_component_: torchtune.rlhf.loss.DPOLoss}", "loss._component_", "method.name: dpo"),
        ("dataset: {_component_: torchtune.datasets.alpaca_dataset}", "dataset._component_", "data.path"),
    ],
)
def test_what_would_train_otherwise_is_refused(tmp_path: Path, text: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    (problem,) = raised.value.problems
    assert problem.what == f"unknown key `{key}`"
    assert said in problem.fix


def test_what_is_done_anyway_is_left_out(tmp_path: Path) -> None:
    text = "shuffle: true\nloss: {_component_: torch.nn.CrossEntropyLoss, num_output_chunks: 8}\n"
    assert read(tmp_path, text + "pretrain_multipack_attn: true\ndataset:\n").given == {}


def test_a_misspelt_key_is_still_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "lora_alfa: 16\n")
    assert "`lora.alpha`" in raised.value.problems[0].fix


def test_the_page_is_made_of_the_table() -> None:
    """Make it again: python -m tests.spec.test_elsewhere > docs/migrating.md"""
    assert (ROOT / "docs" / "migrating.md").read_text() == page()


def test_every_argument_of_transformers_trainer_has_an_answer() -> None:
    from dataclasses import fields

    from transformers import TrainingArguments

    taken = {name for names in other_names().values() for name in names}
    names = [item.name for item in fields(TrainingArguments)]
    bare = [
        n
        for n in names
        if n not in taken and not KEYS.canonical(n) and n not in KEYS.sections and not elsewhere.find(n)
    ]
    assert bare == []


def page() -> str:
    """docs/migrating.md."""
    kinds = Counter(answer.kind for answer in elsewhere.answers() for _ in answer.keys.split())
    counts = {"READ": sum(map(len, other_names().values())), **{kind.upper(): kinds[kind] for kind in kinds}}
    text = _HEAD.replace("SYSTEMS", "\n".join(systems()))
    for word, count in counts.items():
        text = text.replace(f"{{{word}}}", str(count))
    return text + "\n"


def systems() -> list[str]:
    """A row for each system whose files are read, of how many keys of its own tables end in which way."""
    rows = [
        "| system | `--from` | read | left to the plan | without effect | refused | refused, for instance |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for system in sorted(SYSTEMS, key=lambda system: system.title.lower()):
        rows_of = [row for name in system.tables for keys in table(name) for row in dict(keys).values()]
        ends = Counter("kept" if row.fate == "read" else row.fate for row in rows_of)
        why = list(dict.fromkeys(row.say.partition(":")[0] for row in rows_of if row.fate == "refused"))
        counts = " | ".join(str(ends[fate]) for fate in FATES)
        said = "; ".join(why[:4]) + f"; {len(why) - 4} more" * (len(why) > 4)
        rows.append(f"| {system.title} | `{system.name}` | {counts} | {said} |")
    return rows


if __name__ == "__main__":
    print(page(), end="")
