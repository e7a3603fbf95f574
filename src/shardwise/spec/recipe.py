"""The recipe: what the user wrote. Frozen; unknown keys are refused; nothing in it depends on the machine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Literal["fp64", "fp32", "bf16", "fp16"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Model(Section):
    """What is trained: a Hub id, a local directory, a built-in name, or the dimensions of a new model in ``config``.
    ``frozen`` are globs over parameter names (``embed.*``): those weights stay as they are."""

    path: str | None = None
    revision: str | None = None
    config: dict[str, Any] | None = None
    init: Literal["pretrained", "random"] | None = None
    frozen: list[str] = []


class Tokenizer(Section):
    """A tokenizer to load (``path``: Hub id or directory), or the size of a byte-level BPE to train on the data. With
    neither, a model that is trained on brings its own."""

    path: str | None = None
    revision: str | None = None
    vocab_size: int | None = Field(default=None, ge=300, le=1_000_000)


class Data(Section):
    """What it is trained on: files, directories or globs of text or jsonl; ``stdlib`` is Python's own sources."""

    path: str | list[str] = "stdlib"
    validation_path: str | list[str] | None = None
    validation_share: float = Field(default=0.05, ge=0.0, le=0.5)
    text_key: str = "text"
    tokenizer: Tokenizer = Tokenizer()
    mask_documents: bool = True
    cache: str | None = None
    num_proc: int | None = Field(default=None, ge=1)
    repeat: bool = False


class Method(Section):
    name: Literal["pretrain"] = "pretrain"


class Train(Section):
    """The batch and the length. Two of the three batch sizes may be given; the third follows."""

    seq_len: int = Field(default=2048, ge=2)
    micro_batch_size: int | None = Field(default=None, ge=1)
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    global_batch_size: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    num_epochs: float | None = Field(default=None, gt=0)


class Group(Section):
    """Parameters whose name matches ``pattern`` (a glob) get their own settings; the first match counts."""

    pattern: str
    learning_rate: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)


class Optim(Section):
    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    min_learning_rate: float = Field(default=0.0, ge=0)
    groups: list[Group] = []


class Parallel(Section):
    """Pins on the layout; what is left out is derived. Degrees multiply to the number of processes."""

    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = "auto"
    dp_replicate: int | None = Field(default=None, ge=1)
    dp_shard: int | None = Field(default=None, ge=1)
    reshard_after_forward: bool | int | None = None


class Precision(Section):
    """Data types. ``weights`` are the master weights; ``compute`` is used in forward and backward."""

    compute: Literal["auto"] | Number = "auto"
    weights: Number = "fp32"
    reduce: Literal["fp64", "fp32", "bf16"] | None = None
    modules: dict[str, Number] = {}
    matmul: Literal["auto", "highest", "high", "medium"] = "auto"


class Recompute(Section):
    mode: Literal["auto", "none", "selective", "full"] = "auto"
    every: int = Field(default=1, ge=1)


class Checkpoint(Section):
    save_steps: int | None = Field(default=None, ge=1)
    save_total_limit: int = Field(default=2, ge=2)
    keep_every: int | None = Field(default=None, ge=1)
    asynchronous: bool = True


class Evaluate(Section):
    eval_steps: int | None = Field(default=None, ge=1)
    max_batches: int | None = Field(default=None, ge=1)
    sample_prompt: str | None = None


class Run(Section):
    """Where it runs and where it writes."""

    name: str = "run"
    out: str = "runs"
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nproc: int | None = Field(default=None, ge=1)
    nodes: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=60.0, gt=0)
    log_steps: int = Field(default=1, ge=1)
    max_skipped_steps: int = Field(default=3, ge=0)


class Recipe(Section):
    """Everything the user may say. ``format`` is the version of this schema."""

    format: Literal[1] = 1
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    method: Method = Method()
    train: Train = Train()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    compile: Literal["auto"] | bool = "auto"
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
