"""The recipe: what the user wrote. Frozen; unknown keys are refused; nothing in it depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.errors import Problem
from shardwise.spec.bounded import Degree, RecordFormat, Sequences, Steps
from shardwise.spec.evaluation_task import EvaluationTask
from shardwise.spec.launchers import AUTO, LauncherName
from shardwise.spec.methods import METHODS, MethodName
from shardwise.spec.methods import PREFERENCE as PREFERENCE
from shardwise.spec.methods import SFT_ONLY as SFT_ONLY
from shardwise.spec.mtp import Mtp
from shardwise.spec.optimizers import OPTIMIZERS, OPTIONS, OptimizerName
from shardwise.spec.plan import Dtype, Gather, Products, Scales, ScheduleName
from shardwise.spec.records import MethodSpec, OptimizerSpec
from shardwise.spec.schedules import SCHEDULES, ScheduleWord, WarmupWord

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
MOST_EPOCHS, MOST_PROCESSES = 1e6, 2**10


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    def contradictions(self) -> Iterator[Problem]:
        """Yield a problem for keys of the section that contradict each other; ``where`` is the dotted key."""
        yield from ()


class Model(Section):
    """The model: a Hub id, a directory, a built-in name, or dimensions of a new one in ``config``. ``frozen``: globs
    over names of parameters (``embed.*``) that stay as they are. ``rope_scaling``, ``rope_theta``, ``router_aux_loss``
    take the place of config.json's; without the last, a tuned model balances its experts where config.json has
    ``output_router_logits``. ``router_z_loss`` keeps logits of routers small. ``expert_capacity``: how many times its
    even share of a row an expert takes, at most; ``router_bias_rate``: by how much a step moves its correction."""

    path: str | None = None
    revision: str | None = None
    config: dict[str, Any] | None = None
    init: Literal["pretrained", "random"] | None = None
    frozen: list[str] = []
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = Field(default=None, gt=0)
    router_aux_loss: float | None = Field(default=None, ge=0)
    router_z_loss: float = Field(default=0.0, ge=0)
    expert_capacity: float | None = Field(default=None, ge=1)
    router_bias_rate: float = Field(default=0.0, ge=0)
    mtp: Mtp = Mtp()

    def contradictions(self) -> Iterator[Problem]:
        if self.path is not None and self.config is not None:
            what = "`model.path` and `model.config` both define the model"
            yield Problem("CFG008", what, "model.config", "drop one of the two")
        if self.init == "pretrained" and self.config is not None:
            what = "`model.init: pretrained` needs weights, and `model.config` has none"
            yield Problem("CFG008", what, "model.init", "`model.init: random`, or `model.path`")
        stretched = {"rope_scaling": self.rope_scaling, "rope_theta": self.rope_theta} if self.config else {}
        for key in (key for key, value in stretched.items() if value is not None):
            what = f"`model.{key}` changes a trained model's config, and `model.config` describes a new model"
            yield Problem("CFG008", what, f"model.{key}", f"`model.config.{key}`")


class TokenizerSection(Section):
    """A tokenizer to load (``path``: Hub id or directory), or the size of a byte-level BPE to train; or the model's."""

    path: str | None = None
    revision: str | None = None
    vocab_size: int | None = Field(default=None, ge=300, le=1_000_000)


class Data(Section):
    """The data to train on: files, directories or globs of text or records; ``stdlib`` is Python's own sources.
    ``validation_records``: of records and documents of jsonl at least so many are held out, of few no more than a
    quarter. ``mixture_weights``: how often each of several paths is read an epoch. ``streaming``: portions of
    ``streaming_bytes`` of text are prepared while it trains, and deleted when they are used up. ``add_tokens``: texts
    that are to be one token each wherever they stand, and ``add_special_tokens`` where a template writes them; the
    model has a new row for each that its tokenizer does not have. From ``format`` on, for methods that read records."""

    path: str | list[str] = "stdlib"
    mixture_weights: list[float] | None = None
    validation_path: str | list[str] | None = None
    validation_share: float = Field(default=0.05, ge=0.0, le=0.5)
    validation_records: int = Field(default=1, ge=1)
    text_key: str = "text"
    tokenizer: TokenizerSection = TokenizerSection()
    add_tokens: list[str] = []
    add_special_tokens: list[str] = []
    mask_documents: bool = True
    cache: str | None = None
    num_proc: int | None = Field(default=None, ge=1, le=MOST_PROCESSES)
    repeat: bool = False
    streaming: bool = False
    streaming_bytes: int = Field(default=2**30, ge=1)
    format: RecordFormat = "auto"
    messages_key: str | None = None
    role_key: str | None = None
    content_key: str | None = None
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    chat_template: str | None = None
    train_on: Literal["assistant", "last", "all"] = "assistant"
    train_on_eot: bool = True
    packing: bool = True
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    on_bad_sample: Literal["error", "skip"] = "error"


class Method(Section):
    """``pretrain``: every token of text; ``sft``: the answers in conversations; ``dpo``, ``ipo`` and ``hinge``: which
    of two answers is preferred, more than by the initial model; ``orpo`` and ``simpo``: the same, without it. ``beta``
    keeps the model close to the initial one, or weighs orpo's second term, or simpo's rewards; ``gamma``: by how much
    these should differ; ``label_smoothing``: the share of pairs that are taken to be the wrong way round. ``entropy``:
    of what the model predicts, in nats a token, among the metrics of each step of pretrain and sft."""

    name: MethodName = "pretrain"
    beta: float = Field(default=0.1, gt=0)
    gamma: float = Field(default=0.5, ge=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    entropy: bool = False

    @property
    def spec(self) -> MethodSpec:
        """The method's row, which is read without torch."""
        return METHODS[self.name]


class Train(Section):
    """The batch and the length. Two of the three batch sizes may be given; the third follows."""

    seq_len: int = Field(default=2048, ge=2, le=2**24)
    micro_batch_size: Sequences | None = None
    gradient_accumulation_steps: Sequences | None = None
    global_batch_size: Sequences | None = None
    max_steps: int | None = Field(default=None, ge=1)
    num_epochs: float | None = Field(default=None, gt=0, le=MOST_EPOCHS)


class ParameterGroup(Section):
    """Parameters whose name matches ``pattern`` (a glob) get their own settings; the first match counts."""

    pattern: str
    learning_rate: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)


class OptimSection(Section):
    """``moments``: bf16 keeps AdamW's in half the bytes, rounded stochastically, and weights in bf16 too; null: moments
    have the dtype of the weights. ``warmup_steps``: 100, or 0.1 of the run. ``warmup_from``: the rate of the first
    step, from which the warm-up rises by its ``warmup_shape``; null: the first step has the first rise from 0.
    ``warmup_delay``: so many steps have that rate before the warm-up begins, and the schedule is so much later.
    ``power``: of ``schedule: polynomial``. ``momentum``, ``nesterov`` and ``adjust_lr_fn`` are those of
    torch.optim.Muon; ``adam_learning_rate``: of what AdamW updates beside it; null: ``learning_rate``."""

    name: OptimizerName = "adamw"
    moments: Literal["fp32", "bf16"] | None = None
    learning_rate: float = Field(default=3e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    nesterov: bool = True
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    adam_learning_rate: float | None = Field(default=None, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    schedule: ScheduleWord = "cosine"
    warmup_steps: Steps = 0
    warmup_from: float | None = Field(default=None, ge=0)
    warmup_shape: WarmupWord = "linear"
    warmup_delay: int = Field(default=0, ge=0)
    decay_steps: Annotated[int, Field(ge=1)] | Annotated[float, Field(ge=1)] | None = None
    min_learning_rate: float = Field(default=0.0, ge=0)
    power: float = Field(default=1.0, gt=0)
    groups: list[ParameterGroup] = []

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer's row, which is read without torch."""
        return OPTIMIZERS[self.name]

    def contradictions(self) -> Iterator[Problem]:
        unread = self.model_dump(include=set(OPTIONS) - set(self.spec.options), exclude_defaults=True)
        for key, value in unread.items():
            readers = [f"`optim.name: {spec.name}`" for spec in OPTIMIZERS.values() if key in spec.options]
            what = f"`optim.{key}: {value}` has no effect with `optim.name: {self.name}`"
            yield Problem("CFG008", what, f"optim.{key}", f"{' or '.join(readers)}, or drop `optim.{key}`")
        if self.power != 1.0 and "power" not in SCHEDULES[self.schedule].reads:
            what = f"`optim.power` has no effect with `optim.schedule: {self.schedule}`"
            yield Problem("CFG008", what, "optim.power", "`optim.schedule: polynomial`, or leave it out")
        if self.warmup_delay and self.warmup_from is None:
            what = "`optim.warmup_delay` needs the rate that the steps before the warm-up have"
            yield Problem("CFG008", what, "optim.warmup_delay", "`optim.warmup_from: 0`, or leave it out")


class OffloadSection(Section):
    """The state outside the GPU's memory: in host memory, or on NVMe in files in ``directory`` (by default in the run's
    own). ``optimizer``: AdamW's moments and the weights that it updates, for which gradients come and new weights go
    back in every step; ``auto`` takes the host where no plan fits without. ``optimizer_fraction``: of how many blocks,
    spread evenly, while the GPU updates the others and both ends of the model; null: all, and with ``auto`` searched.
    ``activations``: until backward needs them, the inputs of blocks, which are all that full recomputation keeps.
    ``weights``: those of blocks that are frozen, or updated there; on the GPU are a block's and the next's."""

    optimizer: Literal["auto", "none", "host", "nvme"] = "none"
    optimizer_fraction: float | None = Field(default=None, gt=0, le=1)
    activations: Literal["none", "host", "nvme"] = "none"
    weights: Literal["none", "host", "nvme"] = "none"
    directory: str | None = None

    def contradictions(self) -> Iterator[Problem]:
        if self.directory is not None and "nvme" not in (self.optimizer, self.activations, self.weights):
            what = "`offload.directory` has no effect where nothing is on NVMe"
            fix = "`nvme` for `offload.optimizer`, `offload.activations` or `offload.weights`, or leave it out"
            yield Problem("CFG008", what, "offload.directory", fix)
        if self.optimizer_fraction not in (None, 1.0) and self.optimizer == "none":
            what = "`offload.optimizer_fraction` has no effect with `offload.optimizer: none`"
            yield Problem("CFG008", what, "offload.optimizer_fraction", "`offload.optimizer: host`, or leave it out")


class LoraSection(Section):
    """Adapters instead of full weights: on when ``rank`` is given. ``targets``: all-linear, or roles of linear layers
    (q k v o gate up down; PEFT's q_proj and so on are read too). ``alpha`` is twice the rank unless given. ``dropout``
    applies to an adapter's input. ``frozen``: the dtype of the model's own, frozen weights: nf4 is QLoRA, float8 a byte
    each; auto is bf16 if ``precision.compute`` is, else ``precision.weights``. ``modules_to_save``: embed_tokens and
    lm_head, to be trained whole beside the adapters. ``path``: an adapter in PEFT's format to start from."""

    rank: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    targets: str | list[str] = "all-linear"
    rslora: bool = False
    dora: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    frozen: Literal["auto", "fp32", "bf16", "float8", "nf4"] = "auto"
    modules_to_save: list[str] = []
    path: str | None = None

    def contradictions(self) -> Iterator[Problem]:
        # a rank that is given as null turns adapters off, whatever else the section says
        if self.rank is None and self.path is None and self != LoraSection() and "rank" not in self.model_fields_set:
            said = ", ".join(f"`lora.{key}`" for key in sorted(self.model_fields_set))
            what = f"{said} has no effect without `lora.rank`, which turns adapters on"
            yield Problem("CFG008", what, "lora", "`lora.rank: 16`")
        if not self.targets:
            yield Problem("CFG005", "`lora.targets` names no layer", "lora.targets", "some of q k v o gate up down")


class Parallel(Section):
    """Pins on the layout; what is left out is derived. Degrees multiply to the number of processes."""

    strategy: Literal["auto", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = "auto"
    dp_replicate: Degree | None = None
    dp_shard: Degree | None = None
    reshard_after_forward: bool | int | None = None
    backward_prefetch: int | None = Field(default=None, ge=0)
    sync_each_batch: bool | None = None
    tp: Degree | None = None
    sequence_parallel: bool = True
    cp: Degree | None = None
    cp_kind: Literal["auto", "ring", "ulysses", "nested", "gather"] = "auto"
    ep: Degree | None = None
    expert_imbalance: float | None = Field(default=None, ge=1)
    pp: Degree | None = None
    schedule: Literal["auto"] | ScheduleName = "auto"
    stages_per_rank: Degree | None = None
    split: list[int] | None = None


class PrecisionSection(Section):
    """Data types, of forward and backward ``compute``. Linear layers and experts of blocks multiply in ``products``,
    and zero3 gathers them in ``gather``, but those that ``exclude`` names: globs, ``first`` and ``last`` (blocks)."""

    compute: Literal["auto"] | Dtype = "auto"
    weights: Dtype = "fp32"
    reduce: Literal["fp64", "fp32", "bf16"] | None = None
    modules: dict[str, Dtype] = {}
    matmul: Literal["auto", "highest", "high", "medium"] = "auto"
    products: Products = "compute"
    scales: Scales = "block"
    exclude: list[str] | None = None
    gather: Gather = "compute"


class Recompute(Section):
    mode: Literal["auto", "none", "selective", "budget", "full"] = "auto"
    every: int = Field(default=1, ge=1)


class Checkpoint(Section):
    """One is saved every ``save_steps``, or ``saves_per_epoch`` times an epoch. The newest ``save_total_limit`` stay,
    each step that ``keep_every`` divides, and with ``keep_best`` the one whose validation loss is lowest."""

    save_steps: int | None = Field(default=None, ge=1)
    saves_per_epoch: int | None = Field(default=None, ge=1)
    save_total_limit: int = Field(default=2, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: bool = False
    asynchronous: bool = True


class Evaluate(Section):
    """Validation every ``eval_steps``, or ``evals_per_epoch`` times an epoch; the run ends when
    ``early_stopping_patience`` in a row have found no lower loss. ``tasks`` are answered then, and after the last."""

    eval_steps: int | None = Field(default=None, ge=1)
    evals_per_epoch: int | None = Field(default=None, ge=1)
    early_stopping_patience: int | None = Field(default=None, ge=1)
    max_batches: int | None = Field(default=None, ge=1)
    sample_prompt: str | None = None
    tasks: list[EvaluationTask] = []

    def contradictions(self) -> Iterator[Problem]:
        if len({task.name for task in self.tasks}) < len(self.tasks):
            yield Problem("CFG008", "two tasks have one name", "evaluate.tasks", "give each a name of its own")


class Run(Section):
    """A run's place and output. ``log_steps``: of trackers and logs that are no terminal. ``profile_steps``: 10:12.
    ``check_bits_steps``: every so many steps, and before each save, ranks compute a micro-batch alike and compare its
    bits, and those of what several of them hold; auto is 1,000 for 64 ranks and more, and else off, as null is.
    ``on_oom``: where training runs out of memory on one machine, it is planned again with less, once, or stops.
    ``on_loss``: where one of several nodes is lost, the others wait for it, or are planned for again, or all stop."""

    name: str = "run"
    out: str = "runs"
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nproc: Degree | None = None
    nodes: Degree = 1
    launcher: LauncherName = AUTO
    timeout_s: float = Field(default=60.0, gt=0, le=604_800)
    log_steps: int | None = Field(default=None, ge=1)
    max_skipped_steps: int = Field(default=3, ge=0)
    watch_steps: int | None = Field(default=20, ge=1)
    check_bits_steps: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    trackers: Tracker | list[Tracker] = []
    profile_steps: str | None = None
    deterministic: bool = False
    certificate: Literal["tell", "require"] = "tell"
    on_oom: Literal["replan", "stop"] = "replan"
    on_loss: Literal["stop", "wait", "replan"] = "stop"

    @property
    def tracker_names(self) -> list[Tracker]:
        """Each once, in the order given."""
        return list(dict.fromkeys(self.trackers if isinstance(self.trackers, list) else [self.trackers]))

    @property
    def profiled(self) -> range:
        """The steps of ``profile_steps``; empty where it is not given, or not FIRST:LAST from 1."""
        first, _, last = (self.profile_steps or "").partition(":")
        return range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() and int(first) else range(0)


class Recipe(Section):
    """Everything the user may say. ``format`` is the version of this schema."""

    format: Literal[1] = 1
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    method: Method = Method()
    train: Train = Train()
    lora: LoraSection = LoraSection()
    optim: OptimSection = OptimSection()
    offload: OffloadSection = OffloadSection()
    parallel: Parallel = Parallel()
    precision: PrecisionSection = PrecisionSection()
    recompute: Recompute = Recompute()
    compile: Literal["auto"] | bool = "auto"
    attention: Literal["auto", "flash", "fa3", "cudnn", "efficient", "flex", "blockwise"] = "auto"
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()

    @property
    def sample_tokens(self) -> int | None:
        """The length, in tokens, of the windows into which records are packed; None for plain text."""
        return self.train.seq_len if self.method.spec.records else None

    @property
    def pairs(self) -> bool:
        """True where a record is a pair of answers."""
        return self.method.spec.pairs

    @property
    def judged(self) -> tuple[str, ...]:
        """The keys given that need a validation loss during the run."""
        patience = ("evaluate.early_stopping_patience",) * (self.evaluate.early_stopping_patience is not None)
        return ("checkpoint.keep_best",) * self.checkpoint.keep_best + patience
