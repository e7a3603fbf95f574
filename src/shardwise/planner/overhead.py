"""The memory of a CUDA device besides the tensors of a step: workspaces of kernels, the allocator's rounding, buffers
of communicators. Constants are those of torch 2.13, FlashAttention 2 and NCCL 2.28, and each says where it stands
there; a CPU has none of this."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shardwise import techniques
from shardwise.models.delta_sizes import CHUNK, CHUNKS
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout, groups_of
from shardwise.spec.plan import BYTES, Dtype, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import KEPT_UNITS, Op, Sheet, Unit, number

CUDA_RESERVE_BYTES = 3 * 2**29
"""CUDA's context and the code of kernels, 0.5 to 1 GiB, and holes between the allocator's blocks: not computed."""

DOCUMENT_TOKENS = 256
"""How long documents are assumed to be on average where they are masked: the plan does not read the data."""
FLASH_ROWS = 128
"""FlashAttention pads each sequence to a multiple of it (``round_multiple(seqlen_q, 128)`` in flash_api.cpp), and makes
room for as many rows more for each document of a packed batch (``total_q + 128 * batch_size``)."""
RULE_BYTES = 71
"""What the backward of gated delta nets holds at its fullest for a token of a block, by the widths of key and value:
18 kB for two of 128, where each head of values has a key of its own; counted on a CPU, operation by operation."""
MOST_MULTIPROCESSORS = 192
"""No GPU has more (H100: 132, B200: 148, RTX PRO 6000: 188); what is computed from it is an upper bound."""

HOPPER_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace from Hopper on, and under ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` anywhere
(``parseChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp)."""
EARLIER_WORKSPACE_BYTES = 8 * 2**20 + 128 * 2**10
"""Before Hopper: ``:4096:2:16:8``, two blocks of 4 MiB and eight of 16 KiB (in the same place)."""
CUBLAS_HANDLES = 2
"""A workspace belongs to a handle, and a handle to a thread: that of forward, and that in which autograd runs."""

BLOCK_BYTES = 512
"""The allocator gives out multiples of it (``kMinBlockSize`` in c10/core/AllocatorConfig.h)."""
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * 2**20, 20 * 2**20
"""By which the allocator takes memory from the device, for blocks up to 1 MiB and above (``kSmallBuffer`` and
``large_segment_size_`` in the same file); each stream has segments of its own, of which the last is not full."""

CHANNEL_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + 4 * 2**20
"""What NCCL allocates for each connection of a channel: a buffer for each of its protocols, LL, LL128 and Simple
(``DEFAULT_LL_BUFFSIZE``, ``DEFAULT_LL128_BUFFSIZE`` and ``DEFAULT_BUFFSIZE`` in src/init.cc)."""
NVLINK_CHANNELS, PCIE_CHANNELS = 24, 4
"""Channels of a communicator; NCCL prints them under ``NCCL_DEBUG=INFO``: 16 to 24 where GPUs have NVLink, else 2 to
4."""
RING, RING_AND_TREE = 1, 3
"""Connections of a channel on which a rank receives: rings, for gathers and scatters; for all-reduces trees too, from
the parent and from a child."""


def attention_bytes(op: Op, sizes: tuple[int, int], compute: Dtype, *, deterministic: bool = False) -> int:
    """Workspace of one call of FlashAttention's backward (``mha_bwd`` and ``mha_varlen_bwd`` in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), for documents that are masked: ``dq_accum``, the
    gradient of q summed in fp32 over padded rows and heads padded to a multiple of 32; ``softmax_d``, a number for each
    row; where queries share key heads, ``dk_expanded`` and ``dv_expanded``, one for each query head. Deterministic,
    ``dq_accum`` is there once for each multiprocessor that would otherwise add to the same sums. 0 where it is not
    FlashAttention that computes; other kernels take about as much. ``sizes``: sequences, and tokens of each."""
    if compute not in ("bf16", "fp16") or len(op.allocates) < 3:
        return 0
    b, (heads, s, _, head_dim, key_heads) = sizes[0], (number(dim, sizes) for dim in op.dims[:5])
    heads, key_heads = heads // b, key_heads // b
    rows = b * s + FLASH_ROWS * b * ceil(s / DOCUMENT_TOKENS)
    padded = ceil(head_dim / 32) * 32 if head_dim <= 192 else 256
    copies = ceil(MOST_MULTIPROCESSORS / (b * heads)) if deterministic else 1
    expanded = 0 if key_heads == heads else 2 * b * s * heads * head_dim * BYTES[compute]
    return 4 * rows * heads * (padded * copies + 1) + expanded


def workspace_bytes(op: Op, sizes: tuple[int, int], compute: Dtype, *, deterministic: bool = False) -> int:
    """Workspace in backward of attention or, where it is fullest, of the rule of gated delta nets: a block of every row
    and head."""
    if op.kind == "attention":
        return attention_bytes(op, sizes, compute, deterministic=deterministic)
    heads, key, value = (number(dim, sizes) for dim in op.dims[:3])
    return RULE_BYTES * (key + value) * heads // sizes[1] * min(sizes[1], CHUNK * CHUNKS)


def standing_bytes(costed: Sheet, plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Bytes that are held for the whole step, by category of memory."""
    if cluster.kind != "cuda":
        return {}
    return {**fixed_bytes(plan, cluster), "allocator rounding": _rounding_bytes(costed, plan)}


def fixed_bytes(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Return those of :func:`standing_bytes` that any model needs."""
    if cluster.kind != "cuda":
        return {}
    recent = cluster.device.capability is None or cluster.device.capability >= (9, 0)
    workspace = HOPPER_WORKSPACE_BYTES if recent or plan.deterministic else EARLIER_WORKSPACE_BYTES
    channels = NVLINK_CHANNELS if cluster.device.peer_bytes_per_s else PCIE_CHANNELS
    return {
        "cuBLAS workspaces": CUBLAS_HANDLES * workspace,
        "NCCL buffers": sum(communicators(plan)) * channels * CHANNEL_BYTES,
        "reserve": CUDA_RESERVE_BYTES,
    }


def _rounding_bytes(costed: Sheet, plan: Plan) -> int:
    """The ends of blocks that no tensor fills, of weights, gradients and moments, a block for the count of steps
    of each trained weight, and the last segments of every stream. Activations fill their blocks, or nearly."""
    kept = plan.optim.spec.kept
    total = sum(times * _unfilled_bytes(unit, costed.rank_kind, kept) for unit, times in costed.repeated())
    return total + techniques.streams(plan) * (SMALL_SEGMENT_BYTES + LARGE_SEGMENT_BYTES)


@lru_cache(maxsize=8 * KEPT_UNITS)
def _unfilled_bytes(unit: Unit, rank_kind: RankKind, kept: int) -> int:
    total = 0
    for weight in unit.weights:
        size = weight.local_numel(rank_kind, padded=True) * BYTES[weight.dtype]
        unfilled = -size % BLOCK_BYTES
        total += (2 + kept) * unfilled + BLOCK_BYTES if weight.trained else unfilled
    return total


def communicators(plan: Plan) -> list[int]:
    """The connections of a channel of each communicator: that of all ranks, who sum what a step logs; of each axis that
    something is sent along; of those over which weights are gathered, and of those who sum gradients."""
    over, part = techniques.sent_over(plan)
    found = _connections(plan.layout, *over)
    return [*found, RING] if part and found else found


@lru_cache
def _connections(layout: Layout, gathered: tuple[str, ...], summed: tuple[str, ...]) -> list[int]:
    known = groups_of(layout)
    names = [name for name in (*gathered, *summed, "pp", "ring", "ulysses", "tp", "ep", "world") if name in known]
    distinct = {"world" if layout.size(name) == layout.world else layout.called(name): name for name in names}
    return [RING if name in gathered else RING_AND_TREE for name in distinct.values()]
