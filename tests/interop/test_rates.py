"""The learning rate of every step is that of the system whose file was read: beside transformers' own code, and beside
the others' formulas, written out from their sources."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.interop.imports import read_files
from shardwise.spec.load import read_settings
from shardwise.techniques.optim import learning_rate

RATE, STEPS = 2e-4, 60
Rate = Callable[[int], float]


def rates(tmp_path: Path, *texts: str | dict[str, Any], suffix: str = ".yaml", steps: int = STEPS) -> list[float]:
    """The rate of each step of what files with these contents say."""
    paths = []
    for index, text in enumerate(texts):
        path = tmp_path / f"{index}{'.json' if isinstance(text, dict) else suffix}"
        path.write_text(json.dumps(text) if isinstance(text, dict) else text)
        paths.append(path)
    found = read_files(paths, 8)
    settings = {key: (setting.value, setting.origin) for key, setting in (found.settings | found.pins).items()}
    words = [f"{key}={8 if key == 'train.seq_len' else 'model'}" for key in found.asked]
    optim = read_settings(settings, words).recipe.optim
    return [learning_rate(optim, step, steps) for step in range(steps)]


def same(found: Iterable[float], wanted: Iterable[float]) -> None:
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-20), f"step {step}"


TRANSFORMERS: list[tuple[str, float, dict[str, Any]]] = [
    ("linear", 7, {}),
    ("linear", 0, {}),
    ("cosine", 7, {}),
    ("cosine_with_restarts", 7, {}),
    ("cosine_with_min_lr", 7, {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", 0.1, {"min_lr": 3e-5}),
    ("cosine_warmup_with_min_lr", 7, {"min_lr_rate": 0.1}),
    ("constant", 7, {}),
    ("constant_with_warmup", 0.11, {}),
    ("inverse_sqrt", 7, {}),
    ("inverse_sqrt", 0, {}),
    ("inverse_sqrt", 7, {"timescale": 300}),
    ("polynomial", 7, {"power": 2.0}),
    ("polynomial", 7, {"lr_end": 1e-5, "power": 0.5}),
    ("polynomial", 0, {}),
    ("warmup_stable_decay", 7, {"num_decay_steps": 20}),
    ("warmup_stable_decay", 7, {"num_decay_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"}),
    ("warmup_stable_decay", 7, {"num_decay_steps": 53, "decay_type": "1-sqrt", "warmup_type": "1-sqrt"}),
    ("warmup_stable_decay", 7, {"num_decay_steps": 9, "warmup_type": "cosine"}),
]


@pytest.mark.parametrize("written", ["yaml", "flags"])
@pytest.mark.parametrize(("name", "warmup", "arguments"), TRANSFORMERS)
def test_rates_of_transformers(
    tmp_path: Path, name: str, warmup: float, arguments: dict[str, Any], written: str
) -> None:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    steps = math.ceil(warmup * STEPS) if warmup < 1 else warmup
    theirs = get_scheduler(name, optimizer, steps, STEPS, arguments or None)
    wanted = []
    for _ in range(STEPS):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    said = {"per_device_train_batch_size": 1, "learning_rate": RATE, "lr_scheduler_type": name, "output_dir": "out"}
    said |= {"num_train_epochs": 1, ("warmup_ratio" if warmup < 1 else "warmup_steps"): warmup}
    if written == "yaml":
        same(rates(tmp_path, said | ({"lr_scheduler_kwargs": arguments} if arguments else {})), wanted)
    else:
        flags = " ".join(f"--{key} {value}" for key, value in said.items())
        text = f"torchrun train.py {flags} --lr_scheduler_kwargs '{json.dumps(arguments)}'\n"
        same(rates(tmp_path, text, suffix=".sh"), wanted)


def deepspeeds(name: str, given: dict[str, Any]) -> Rate:
    """runtime/lr_schedules.py of DeepSpeed at 22779f2; the scheduler steps after the optimizer, from -1."""
    warm, low = max(2, given.get("warmup_num_steps", 1000)), given.get("warmup_min_lr", 0.0)
    high, log = given.get("warmup_max_lr", RATE), given.get("warmup_type", "log") == "log"
    total, least = given.get("total_num_steps", STEPS), given.get("cos_min_ratio", 1e-4)

    def rate(step: int) -> float:
        at = step - 1
        if at < 0:
            return low if name != "WarmupCosineLR" else 0.0
        rise = (math.log(at + 1) / math.log(warm) if log else at / warm) if at < warm else None
        if name == "WarmupCosineLR":
            done = min(1.0, (at - warm + 1) / max(1, total - warm))
            return RATE * (rise if rise is not None else least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)
        fall = max(0.0, (total - at) / max(1.0, total - warm)) if name == "WarmupDecayLR" else 1.0
        return low + (high - low) * (rise if rise is not None else fall)

    return rate


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("WarmupLR", {"warmup_num_steps": 9}),
        ("WarmupLR", {"warmup_num_steps": 9, "warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4}),
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"warmup_num_steps": 9, "total_num_steps": STEPS, "warmup_max_lr": 3e-4}),
        ("WarmupDecayLR", {"warmup_num_steps": 9, "total_num_steps": 40, "warmup_max_lr": RATE}),
        (
            "WarmupDecayLR",
            {"total_num_steps": STEPS, "warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 1e-5}
            | {"warmup_max_lr": 1e-3},
        ),
        ("WarmupCosineLR", {"warmup_num_steps": 9, "total_num_steps": STEPS}),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 1, "total_num_steps": 40, "warmup_type": "linear", "cos_min_ratio": 0.1},
        ),
    ],
)
def test_rates_of_deepspeed(tmp_path: Path, name: str, given: dict[str, Any]) -> None:
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
        "scheduler": {"type": name, "params": given},
    }
    same(rates(tmp_path, config), map(deepspeeds(name, given), range(STEPS)))


def test_deepspeeds_auto_is_the_trainers(tmp_path: Path) -> None:
    plain = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = {"train_batch_size": "auto", "zero_optimization": {"stage": 1}}
    config |= {"scheduler": {"type": "WarmupDecayLR", "params": plain}}
    said = {"per_device_train_batch_size": 1, "learning_rate": RATE, "output_dir": "out", "max_steps": STEPS}
    wanted = deepspeeds("WarmupDecayLR", {"warmup_num_steps": 6, "warmup_max_lr": RATE})
    same(
        rates(tmp_path, config, said | {"warmup_ratio": 0.1, "lr_scheduler_type": "cosine"}), map(wanted, range(STEPS))
    )


def megatrons(
    style: str, warm: float, end: float, low: float, first: float = 0.0, last: tuple[str, float] = ("", 1)
) -> Rate:
    """core/optimizer_param_scheduler.py of Megatron-LM 0.16, in sequences; 16 of them are a step."""

    def rate(step: int) -> float:
        at, (kind, length) = 16.0 * step, last
        if warm > 0 and at <= warm:
            return first + (RATE - first) * at / warm
        if style == "constant":
            return RATE
        if at > end:
            return low
        if style == "inverse-square-root":
            return max(low, RATE * math.sqrt(warm / at))
        done = (at - warm) / (end - warm)
        if style == "WSD":
            done = max(0.0, (at - (end - length)) / length)
        left = {
            "": 0.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "exponential": 2 * 0.5**done - 1,
            "minus_sqrt": 1 - math.sqrt(done),
        }[kind or style]
        return low + left * (RATE - low)

    return rate


LENGTHS = f"--train-iters {STEPS}"
WHOLE = 16.0 * STEPS


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (f"{LENGTHS} --lr-decay-style cosine --lr-warmup-iters 7 --min-lr 2e-5", megatrons("cosine", 112, WHOLE, 2e-5)),
        (f"{LENGTHS}", megatrons("linear", 0, WHOLE, 0)),
        (
            f"{LENGTHS} --lr-decay-style constant --lr-warmup-fraction .11",
            megatrons("constant", 0.11 * WHOLE, WHOLE, 0),
        ),
        (
            f"{LENGTHS} --lr-decay-style cosine --lr-decay-iters 40 --lr-warmup-fraction .11 --min-lr 1e-5",
            megatrons("cosine", 0.11 * 640, 640, 1e-5),
        ),
        (
            "--train-samples 970 --lr-decay-style cosine --lr-warmup-samples 100 --min-lr 2e-5",
            megatrons("cosine", 100, 970, 2e-5),
        ),
        (
            "--train-samples 970 --lr-decay-style linear --lr-warmup-samples 100 --lr-decay-samples 500",
            megatrons("linear", 100, 500, 0),
        ),
        (
            f"{LENGTHS} --lr-decay-style inverse-square-root --lr-warmup-iters 7 --min-lr 9e-5",
            megatrons("inverse-square-root", 112, WHOLE, 9e-5),
        ),
        (
            f"{LENGTHS} --lr-decay-style WSD --lr-warmup-iters 7 --lr-wsd-decay-iters 15 --min-lr 2e-5",
            megatrons("WSD", 112, WHOLE, 2e-5, last=("exponential", 240)),
        ),
        *(
            (
                f"{LENGTHS} --lr-decay-style WSD --lr-wsd-decay-style {kind} --lr-wsd-decay-iters 15"
                " --lr-warmup-iters 5 --lr-warmup-init 1e-6",
                megatrons("WSD", 80, WHOLE, 0, 1e-6, (kind, 240)),
            )
            for kind in ("linear", "cosine", "minus_sqrt")
        ),
        (f"{LENGTHS} --lr-warmup-iters 200", megatrons("linear", 3200, 9e9, 0)),
        (f"{LENGTHS} --lr-warmup-iters 200 --min-lr 1e-4", megatrons("linear", 3200, 9e9, 1e-4)),
        (f"{LENGTHS} --lr-decay-iters 500 --lr-decay-style cosine", megatrons("cosine", 0, 8000, 0)),
    ],
)
def test_rates_of_megatron(tmp_path: Path, flags: str, wanted: Rate) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --seq-length 128"
    text = f"torchrun pretrain_gpt.py {model} --tokenizer-type GPT2BPETokenizer --micro-batch-size 2"
    text += f" --global-batch-size 16 --lr {RATE} --tensor-model-parallel-size 1 {flags}\n"
    same(rates(tmp_path, text, suffix=".sh"), map(wanted, range(STEPS)))


def torchtitans(warm: int, share: float | None, kind: str, low: float) -> Rate:
    """components/optimizer/lr_scheduler.py of TorchTitan 0.3."""
    warm = min(warm, STEPS)
    length = STEPS - warm if share is None else min(STEPS - warm, round(STEPS * share))

    def rate(step: int) -> float:
        if step < warm:
            return RATE * (step + 1) / warm
        if step < STEPS + 1 - length:
            return RATE
        done = (step + 1 - (STEPS + 1 - length)) / length
        left = {"linear": 1 - done, "sqrt": 1 - math.sqrt(done), "cosine": 0.5 * (1 + math.cos(math.pi * done))}[kind]
        return RATE * (low + (1 - low) * left)

    return rate


@pytest.mark.parametrize("kind", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("warm", "share", "low"), [(7, None, 0.0), (0, 0.25, 0.1), (7, 0.8, 0.0), (30, 0.9, 0.1)])
def test_rates_of_torchtitan(tmp_path: Path, kind: str, warm: int, share: float | None, low: float) -> None:
    text = f"[model]\nname = 'llama3'\nflavor = '8B'\n[optimizer]\nlr = {RATE}\n[training]\nsteps = {STEPS}\n"
    text += f"local_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 1\n[lr_scheduler]\nwarmup_steps = {warm}\n"
    text += f"decay_type = '{kind}'\nmin_lr_factor = {low}\n" + (f"decay_ratio = {share}\n" if share else "")
    same(rates(tmp_path, text, suffix=".toml"), map(torchtitans(warm, share, kind, low), range(STEPS)))


def nemos(name: str, warm: int, constant: int, low: float) -> Rate:
    """core/optim/lr_scheduler.py of NeMo 2.4: CosineAnnealing, WarmupAnnealing, WarmupHoldPolicy."""

    def rate(step: int) -> float:
        if warm and step <= warm:
            return RATE * (step / warm if constant else (step + 1) / (warm + 1))
        done = (step - warm) / (STEPS - constant - warm)
        if name == "CosineAnnealing":
            return low + (RATE - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return low + (1 - done) * (RATE - low) if name == "WarmupAnnealing" else RATE

    return rate


@pytest.mark.parametrize(
    ("name", "warm", "constant"),
    [
        ("CosineAnnealing", 7, 0),
        ("CosineAnnealing", 7, 12),
        ("CosineAnnealing", 0, 0),
        ("WarmupAnnealing", 7, 0),
        ("WarmupHoldPolicy", 7, 0),
    ],
)
def test_rates_of_nemo(tmp_path: Path, name: str, warm: int, constant: int) -> None:
    text = f"""
trainer: {{devices: 8, num_nodes: 1, max_steps: {STEPS}, precision: bf16}}
exp_manager: {{name: mine}}
model:
  micro_batch_size: 1
  global_batch_size: 8
  encoder_seq_length: 128
  optim:
    name: fused_adam
    lr: {RATE}
    sched: {{name: {name}, warmup_steps: {warm}, constant_steps: {constant}, min_lr: 2e-5}}
"""
    same(rates(tmp_path, text), map(nemos(name, warm, constant, 2e-5), range(STEPS)))


@pytest.mark.parametrize("given", [{}, {"lr_warmup_steps": 9, "min_lr": 1e-5, "init_lr": 2e-6}])
def test_rates_of_automodel(tmp_path: Path, given: dict[str, Any]) -> None:
    """components/optim/optimizer.py of NeMo Automodel 0.7: unless told, from a tenth of the rate to a hundredth."""
    warm, low, first = (
        given.get("lr_warmup_steps", STEPS // 10),
        given.get("min_lr", RATE / 100),
        given.get("init_lr", RATE / 10),
    )
    text = f"""
step_scheduler: {{global_batch_size: 8, local_batch_size: 1, max_steps: {STEPS}}}
model: {{pretrained_model_name_or_path: org/model}}
distributed: {{strategy: fsdp2}}
optimizer: {{_target_: torch.optim.Adam, lr: {RATE}}}
lr_scheduler: {json.dumps({"lr_decay_style": "cosine", **given})}
"""
    wanted = megatrons("cosine", 16.0 * warm, WHOLE, low, first)
    same(rates(tmp_path, text), map(wanted, range(STEPS)))


@pytest.mark.parametrize("second", ["ConstantLR", "CosineAnnealingLR"])
def test_rates_of_nemo_rls_list_of_torch_schedules(tmp_path: Path, second: str) -> None:
    import torch

    kinds, warm = torch.optim.lr_scheduler, {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 9}
    given = {"factor": 1.0, "total_iters": 10**10} if second == "ConstantLR" else {"T_max": 51, "eta_min": 1e-5}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    parts = [kinds.LinearLR(optimizer, **warm), vars(kinds)[second](optimizer, **given)]
    theirs, wanted = kinds.SequentialLR(optimizer, parts, [9]), []
    for _ in range(STEPS):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    policy = {"model_name": "org/model", "train_global_batch_size": 8, "train_micro_batch_size": 1}
    policy |= {"max_total_sequence_length": 128, "precision": "bfloat16", "dtensor_cfg": {"enabled": True}}
    policy |= {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE}}}
    names = ("LinearLR", warm), (second, given)
    rows = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for name, kwargs in names]
    said = {"policy": {**policy, "scheduler": [*rows, {"milestones": [9]}]}, "sft": {"max_num_steps": STEPS}}
    found = rates(tmp_path, said)
    assert found == pytest.approx(wanted, rel=1e-9)  # torch's own are products of steps, and drift
    if second == "CosineAnnealingLR":
        given["T_max"] = 30
        with pytest.raises(ConfigError, match="CosineAnnealingLR"):  # it would rise again
            rates(tmp_path, said)


@pytest.mark.parametrize(
    ("given", "warm", "low", "end"),
    [
        ({}, 1, 0.0, STEPS),
        ({"warmup_ratio": 0.13}, 7, 0.0, STEPS),
        ({"warmup_steps": 1, "cosine_min_lr_ratio": 0.2}, 2, 0.2, STEPS),
        ({"warmup_steps": 9, "cosine_min_lr_ratio": 0.2, "cosine_constant_lr_ratio": 0.8}, 9, 0.2, 48),
        ({"warmup_steps": 9, "lr_quadratic_warmup": True}, 9, 0.0, STEPS),
    ],
)
def test_rates_of_axolotl(tmp_path: Path, given: dict[str, Any], warm: int, low: float, end: int) -> None:
    """utils/schedulers.py and core/builders/base.py of axolotl 0.19: a share of warm-up is rounded down, a warm-up of
    one step has two."""
    warm = 2 if warm == 1 else warm

    def rate(step: int) -> float:
        if step < warm:
            return RATE * (step / warm) ** (2 if "lr_quadratic_warmup" in given else 1)
        done = (min(step, end) - warm) / (end - warm)
        return RATE * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))

    said = {"base_model": "org/model", "datasets": [{"path": "org/data", "type": "chat_template"}], "sequence_len": 64}
    said |= {"micro_batch_size": 1, "learning_rate": RATE, "max_steps": STEPS, "lr_scheduler": "cosine", **given}
    same(rates(tmp_path, said), map(rate, range(STEPS)))


def test_rates_of_torchtune(tmp_path: Path) -> None:
    """training/lr_schedulers.py of torchtune at bd2a0fc is transformers' cosine."""
    text = f"""
model: {{_component_: torchtune.models.llama3_2.llama3_2_1b}}
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 64}}
checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer}}
optimizer: {{_component_: torch.optim.AdamW, lr: {RATE}}}
lr_scheduler: {{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 7}}
batch_size: 1
"""

    def rate(step: int) -> float:
        return RATE * (step / 7 if step < 7 else 0.5 * (1 + math.cos(math.pi * (step - 7) / (STEPS - 7))))

    same(rates(tmp_path, text), map(rate, range(STEPS)))
