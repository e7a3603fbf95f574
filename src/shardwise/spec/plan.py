"""The plan: every execution setting decided, with its reason. A YAML file that a person can read, edit and pin."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.spec import explain
from shardwise.spec.hash_once import hash_once
from shardwise.spec.layout import Layout
from shardwise.spec.methods import LOSSES, LossName
from shardwise.spec.optimizers import OPTIMIZERS, OptimizerName
from shardwise.spec.pipelines import PIPELINES, PipelineSpec
from shardwise.spec.pipelines import ScheduleName as ScheduleName
from shardwise.spec.rank_kind import stages_of
from shardwise.spec.recomputation import Remat as Remat
from shardwise.spec.recomputation import SavedResult as SavedResult
from shardwise.spec.records import ENTROPY, MethodSpec, OptimizerSpec

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Matmul = Literal["highest", "high", "medium"]
"""torch's setting for fp32 products."""
MEMORY_CATEGORIES = (
    "weights",
    "gradients",
    "moments",
    "offloaded",
    "gathered",
    "accumulated gradients",
    "activations",
    "logits",
    "gather buffers",
    "reduce buffers",
    "buffers",
    "attention workspace",
    "cuBLAS workspaces",
    "allocator rounding",
    "NCCL buffers",
    "reserve",
)
"""In the order of the page. A plan's peak is their sum: what is made under another name is not counted, but for rows of
experts."""
NOT_ALLOCATED = ("allocator rounding", "NCCL buffers", "reserve")
"""The categories that are not part of torch's count of allocated memory."""
BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}


@dataclass(frozen=True)
class Shard:
    """``strategy`` says what lives on a slice of the data-parallel ranks (hsdp is zero3 with dp_replicate > 1). In a
    backward of zero3, weights of ``backward_prefetch`` units are gathered ahead, while one computes; and its gradients
    are reduced after every micro-batch, unless ``sync_each_batch`` is false."""

    strategy: Strategy = "ddp"
    reshard_after_forward: bool | int = True
    backward_prefetch: int = 1
    sync_each_batch: bool = True
    bucket_bytes: int = 25 * 2**20

    @property
    def accumulates(self) -> bool:
        """True where ranks add up whole gradients of micro-batches, and reduce them after the last."""
        return self.strategy == "zero1" or not self.sync_each_batch


@dataclass(frozen=True)
class Pipeline:
    """``schedule``: the order in which each rank computes its stages of each micro-batch. ``split``: how many blocks
    each stage has, in the order of the model; every rank has ``stages_per_rank`` of them. Of no effect where the layout
    has no pipeline."""

    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    split: tuple[int, ...] = ()

    @property
    def spec(self) -> PipelineSpec:
        """The schedule's row."""
        return PIPELINES[self.schedule]


CpKind = Literal["ring", "ulysses", "nested", "gather"]


Products = Literal["compute", "float8"]
Scales = Literal["block", "row", "mx"]
Gather = Literal["compute", "float8"]


@dataclass(frozen=True)
class Precision:
    """``products``: the dtype that linear layers and experts of blocks multiply in, with float8's ``scales``, but those
    whose names match one of ``exclude``: a glob, or ``first`` and ``last`` (blocks). ``gather``: how they are sent."""

    compute: Dtype = "fp32"
    weights: Dtype = "fp32"
    reduce: Literal["fp64", "fp32", "bf16"] = "fp32"
    modules: tuple[tuple[str, Dtype], ...] = ()
    matmul: Matmul = "highest"
    products: Products = "compute"
    scales: Scales = "block"
    exclude: tuple[str, ...] = ()
    gather: Gather = "compute"

    @property
    def products_words(self) -> str:
        """Return what linear layers multiply in, where that is another dtype, as an addition to a line."""
        each = {"mx": "32 elements"}.get(self.scales, self.scales) + ", sent as codes" * (self.gather == "float8")
        return f", products in {self.products} (a scale each {each})" * (self.products != "compute")

    @property
    def loss_scaling(self) -> bool:
        """fp16's gradients underflow without a scale."""
        return self.compute == "fp16"


@hash_once
@dataclass(frozen=True)
class Batch:
    """Sequences: a step is ``micro_batch_size * accumulation * dp`` sequences of ``seq_len`` tokens.
    ``loss_chunk_tokens`` tokens at a time pass through the output layer and the loss."""

    micro_batch_size: int = 1
    accumulation: int = 1
    seq_len: int = 2048
    loss_chunk_tokens: int = 1024

    def global_batch_size(self, dp: int) -> int:
        return self.micro_batch_size * self.accumulation * dp


@dataclass(frozen=True)
class Optim:
    """``moments``: their dtype, if they are rounded stochastically; None: the dtype of the weights."""

    name: OptimizerName = "adamw"
    fused: bool = True
    moments: Literal["fp32", "bf16"] | None = None

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer's row, which is read without torch."""
        return OPTIMIZERS[self.name]

    @property
    def streamed(self) -> bool:
        """Return whether it can go through files, which hold what it keeps in the dtype of the weights."""
        return self.spec.streamed and self.moments is None

    @property
    def words(self) -> str:
        """The dtype of its moments where that is its own, else its title."""
        if self.spec.packed or self.moments is not None:
            return f"moments in {'8 bits' if self.spec.packed else self.moments}"
        return self.spec.title

    @property
    def exact(self) -> Optim:
        """The optimizer whose updates it rounds; itself if it rounds none."""
        return Optim(self.spec.exact or self.name, self.fused)


TIER_WORDS = {"host": "the host", "nvme": "NVMe"}
"""Outside the device, in words."""


@dataclass(frozen=True)
class Offload:
    """``optimizer``: where moments are, and copies of the weights that are updated there: ``none`` on the device,
    ``host`` in the host's memory, ``nvme`` in files. ``activations``: where the inputs of blocks that are computed
    again wait for backward. ``weights``: where those weights of blocks that the device does not update are while other
    blocks compute. ``sums``: where gradients of several micro-batches are added up. ``optimizer_fraction``: of how many
    blocks the optimizer is on the host; below 1 that of embedding and output layer is not."""

    optimizer: Literal["none", "host", "nvme"] = "none"
    activations: Literal["none", "host", "nvme"] = "none"
    weights: Literal["none", "host", "nvme"] = "none"
    sums: Literal["device", "host"] = "device"
    optimizer_fraction: float = 1.0

    def moves(self, number: int) -> bool:
        """Say whether the optimizer of the block of this number is not on the device: of those up to any block, the
        fraction, rounded down."""
        up_to, with_it = (int(round(count * self.optimizer_fraction, 9)) for count in (number, number + 1))
        return self.optimizer != "none" and with_it > up_to

    @property
    def words(self) -> list[str]:
        """The words for what is outside the device, and where."""
        part = f"{self.optimizer_fraction:.0%} of " * (self.optimizer_fraction < 1)
        found = {f"{part}the optimizer": self.optimizer, "inputs of blocks": self.activations}
        found["weights of blocks"] = self.weights
        found["sums of gradients"] = "none" if self.sums == "device" else self.sums
        return [f"{what} on {TIER_WORDS[where]}" for what, where in found.items() if where != "none"]

    @property
    def filed(self) -> list[str]:
        """The names of what is in files on NVMe."""
        return [what for what, where in vars(self).items() if where == "nvme"]

    @property
    def without_files(self) -> Offload:
        """An offload like this one, with all that is in files in memory of the host."""
        moved: dict[str, Any] = {what: "host" for what, where in vars(self).items() if where == "nvme"}
        return replace(self, **moved)


@dataclass(frozen=True)
class Lora:
    """``targets`` are roles of linear layers (none: all). The product of both matrices is multiplied by alpha / rank,
    or with ``rslora`` by alpha / sqrt(rank). ``frozen`` is the dtype of the frozen weights; with ``nf4`` those of the
    blocks' linear layers are stored in 4 bits, with ``float8`` in a byte each. ``modules_to_save``: of ``embed`` and
    ``head`` those that are trained whole."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    frozen: Dtype = "fp32"
    nf4: bool = False
    dropout: float = 0.0
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    float8: bool = False

    @property
    def codes(self) -> str:
        """The word for how the frozen weights of the blocks' linear layers are stored; empty where as the others."""
        return "nf4" if self.nf4 else "float8" if self.float8 else ""

    def saves(self, name: str) -> bool:
        """Return whether the parameter with this canonical name is trained whole."""
        return name.removesuffix(".weight") in self.modules_to_save


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in one step on one rank: the payload bytes of all calls together, and their count.
    ``link`` is the slowest link that it crosses."""

    axis: str
    kind: str
    category: str
    bytes: int
    count: int
    link: str = ""


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step on the slowest rank: ``step_s`` is the sum of the parts. ``compute_s``: the device computes
    (``products_s``, ``attention_s`` and ``pointwise_s`` of it are its kinds of kernels), or waits for the host to
    launch what it is to compute; ``exposed_s``: it waits for collectives, by axis; then the optimizer, and what the
    host does once a step; ``offload_s``: it waits for copies to the host and from there, which take ``copied_s``. Four
    steps in five are expected between ``low_s`` and ``high_s``; ``basis`` says what that rests on. ``scale``: what the
    model's seconds were multiplied by, after earlier runs on the machine."""

    step_s: float = 0.0
    compute_s: float = 0.0
    products_s: float = 0.0
    attention_s: float = 0.0
    pointwise_s: float = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict, hash=False)
    sent_s: dict[str, float] = field(default_factory=dict, hash=False)
    optimizer_s: float = 0.0
    host_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    basis: str = ""
    scale: float = 1.0
    offload_s: float = 0.0
    copied_s: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The planner's prediction: of memory, for the fullest rank, bytes at the moment of the peak, by category; of
    ``host``, what a rank holds in host memory, and of ``host_bytes`` all ranks of a node, of which that is the
    capacity; ``disk_bytes`` are what they keep on the node's disks, which have ``disk_capacity_bytes`` (0 where that is
    unknown), and ``written_bytes`` what they write there in every step; of ``seconds``, for the slowest."""

    memory: dict[str, int] = field(default_factory=dict, hash=False)
    peak_bytes: int = 0
    capacity_bytes: int = 0
    traffic: tuple[Traffic, ...] = ()
    flops_per_step: int = 0
    seconds: Seconds | None = None
    host: dict[str, int] = field(default_factory=dict, hash=False)
    host_bytes: int = 0
    host_capacity_bytes: int = 0
    disk_bytes: int = 0
    written_bytes: int = 0
    disk_capacity_bytes: int = 0

    @property
    def share(self) -> float:
        """The share of the memory that is taken, of the device, of the host or of its disks, whichever is more."""
        on_host = self.host_bytes / self.host_capacity_bytes if self.host_capacity_bytes else 0.0
        on_disk = self.disk_bytes / self.disk_capacity_bytes if self.disk_capacity_bytes else 0.0
        return max(self.peak_bytes / max(1, self.capacity_bytes), on_host, on_disk)

    @property
    def allocated_bytes(self) -> int:
        """The part of ``memory`` that torch counts as allocated."""
        return sum(size for name, size in self.memory.items() if name not in NOT_ALLOCATED)


@hash_once
@dataclass(frozen=True)
class Plan:
    layout: Layout = Layout()
    batch: Batch = Batch()
    shard: Shard = Shard()
    precision: Precision = Precision()
    remat: Remat = Remat()
    compile: bool = False
    deterministic: bool = False
    attention: str = "auto"
    sequence_parallel: bool = False
    cp_kind: CpKind = "ring"
    expert_imbalance: float = 1.5
    optim: Optim = Optim()
    offload: Offload = Offload()
    frozen: tuple[str, ...] = ()
    lora: Lora | None = None
    loss: LossName = "cross_entropy"
    entropy: bool = False
    pipeline: Pipeline = Pipeline()
    estimate: Estimate = Estimate()
    why: dict[str, str] = field(default_factory=dict, hash=False)
    model: str = ""
    cluster: str = ""
    format: int = 1

    def explain(self) -> str:
        """Return the plan in words, of several lines: whether it fits in the memory, in bytes and as a share, the batch
        in sequences and tokens, seconds of a step, what memory is taken by, what is sent, and why each setting is as it
        is. Of a plan that no search has made nothing is estimated."""
        return explain.text(self)

    @property
    def row_tokens(self) -> int:
        """The number of tokens of each row that a rank has."""
        return self.batch.seq_len // self.layout.cp

    @property
    def method(self) -> MethodSpec:
        """The row of the method that its loss is of; of several, the first."""
        return LOSSES[self.loss]

    @property
    def loss_figures(self) -> tuple[str, ...]:
        """The names of what the loss reports of each step beside itself."""
        return (*self.method.figures, *[ENTROPY] * self.entropy)

    @property
    def sharded(self) -> bool:
        """True where weights are cut over the ranks of a group ``fsdp``; over one rank nothing is."""
        return self.shard.strategy != "ddp" and self.layout.fsdp > 1

    def stages(self, blocks: int) -> list[range]:
        """The blocks of each stage of a model that has so many; without a pipeline there is one."""
        return stages_of(self.pipeline.split) if self.layout.pp > 1 else [range(blocks)]

    @property
    def model_words(self) -> str:
        """The words for how the model and its rows are split, where they are: ``tp 4 with sp, cp 2 (ring), pp 2 (1f1b,
        stages of 8 to 9 blocks)``."""
        words = [f"tp {self.layout.tp}" + " with sp" * self.sequence_parallel] * (self.layout.tp > 1)
        if self.layout.cp > 1:
            nested = f" of {self.layout.ring} x {self.layout.ulysses}" * (self.cp_kind == "nested")
            words.append(f"cp {self.layout.cp} ({self.cp_kind}{nested})")
        if self.layout.ep > 1:
            words.append(f"ep {self.layout.ep}")
        if self.layout.pp > 1:
            least, most = min(self.pipeline.split, default=0), max(self.pipeline.split, default=0)
            blocks = str(most) if least == most else f"{least} to {most}"
            words.append(f"pp {self.layout.pp} ({self.pipeline.schedule}, stages of {blocks} blocks)")
        return ", ".join(words)

    @property
    def kept(self) -> str:
        """The dtypes of weights and moments, in words."""
        dtype = "int8" if self.optim.spec.packed else self.optim.moments or self.precision.weights
        moments = dtype + {"none": "", "host": " on the host", "nvme": " on NVMe"}[self.offload.optimizer]
        moments += f" ({self.offload.optimizer_fraction:.0%})" * (self.offload.optimizer_fraction < 1)
        if self.lora is None:
            return f"weights {self.precision.weights}, moments {moments}"
        frozen = f"{self.lora.codes} and {self.lora.frozen}" if self.lora.codes else self.lora.frozen
        whole = "".join(f", {name}" for name in self.lora.modules_to_save)
        return f"adapters{whole} {self.precision.weights}, moments {moments}, frozen weights {frozen}"
