"""The choice of the kernel that computes attention: a table, and the function that reads it. Imports no torch, since
plans ask it too.

    flash      FlashAttention 2, which ships with torch, on CPUs and CUDA
    fa3        FlashAttention 3 for Hopper, if `flash_attn_interface` is installed
    cudnn      cuDNN's, for Hopper and Blackwell, where every row is one document
    efficient  xFormers' memory-efficient attention, which ships with torch: older cards, and fp32
    flex       FlexAttention, compiled for the mask: caps, and windows where flash has none
    blockwise  plain torch, any mask on any device

Sinks need no kernel of their own: they are added to what any of them computes (``blockwise.with_sinks``).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import cache

from shardwise.models.config import ModelSpec, layer_kinds

Capability = tuple[int, int]
HALF, WIDE = frozenset({"bf16", "fp16"}), frozenset({"fp32", "fp64"})
EIGHTS = frozenset(range(8, 257, 8))
MIDDLE = frozenset(range(200, 225, 8))
"""Head dims whose backward takes more shared memory than consumer cards have (check_requires_grad_and_head_dim_gt192 in
torch's sdp_utils.cpp)."""
OPTIONAL = frozenset({"fa3", "cudnn"})
"""Kernels that are not part of every installation."""
FA3_PACKAGE = "flash_attn_interface"
LENGTH = 64
TRAITS = ("documents", "window", "soft_cap", "positions", "odd_length", "apart", "deterministic")
"""What a case has, or not, and a kernel serves, or not: fields of both."""


@dataclass(frozen=True)
class Case:
    """A case that a kernel must support: the device (``device``: cpu, cuda or rocm; ``capability``: CUDA's), the dtype,
    the size of heads and the mask. ``documents``: rows hold several. ``odd_length``: 64 does not divide the length of
    rows, as in generation, where a kernel that is compiled for each length would be compiled for every token.
    ``apart``: keys are of other tokens than queries. ``deterministic``: bitwise the same result in every run."""

    device: str
    dtype: str
    head_dim: int
    capability: Capability = (0, 0)
    documents: bool = False
    window: bool = False
    soft_cap: bool = False
    positions: bool = False
    odd_length: bool = False
    apart: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Kernel:
    """One row of the table: what a kernel supports. ``head_dims`` None: all; ``capabilities``: first and last of each
    range."""

    name: str
    device: str
    dtypes: frozenset[str]
    head_dims: frozenset[int] | None = EIGHTS
    capabilities: tuple[tuple[Capability, Capability], ...] = (((0, 0), (99, 0)),)
    documents: bool = True
    window: bool = False
    soft_cap: bool = False
    positions: bool = False
    odd_length: bool = True
    apart: bool = True
    deterministic: bool = True

    def serves(self, case: Case) -> bool:
        return (
            self.device in (case.device, "any")
            and case.dtype in self.dtypes
            and (self.head_dims is None or case.head_dim in self.head_dims)
            and any(first <= case.capability <= last for first, last in self.capabilities)
            and all(vars(self)[trait] >= vars(case)[trait] for trait in TRAITS)
        )


HOPPER = (9, 0)
AMPERE = (8, 0)
NEWEST = (12, 1)
CUDNN = ((HOPPER, HOPPER), ((10, 0), (10, 0)))
"""Where torch prefers cuDNN itself (check_prefer_cudnn_attention in sdp_utils.cpp)."""
FLEX = Kernel("flex", "rocm", HALF | {"fp32"}, EIGHTS - {8}, window=True, soft_cap=True, odd_length=False, apart=False)
KERNELS = (
    Kernel("flash", "cpu", HALF | WIDE, None),
    Kernel("fa3", "cuda", HALF, EIGHTS, ((HOPPER, HOPPER),), window=True),
    Kernel(
        *("cudnn", "cuda", HALF, frozenset(range(8, 129, 8)), CUDNN),
        documents=False,
        odd_length=False,
        apart=False,
        deterministic=False,
    ),
    Kernel("flash", "cuda", HALF, EIGHTS - MIDDLE, ((AMPERE, NEWEST),), window=True),
    Kernel("flash", "cuda", HALF, MIDDLE, ((AMPERE, AMPERE), (HOPPER, (11, 0))), window=True),
    Kernel("flash", "rocm", HALF),
    Kernel("efficient", "cuda", frozenset({"fp16", "fp32"}), EIGHTS, (((5, 0), NEWEST),), deterministic=False),
    Kernel("efficient", "cuda", frozenset({"bf16"}), EIGHTS, ((AMPERE, NEWEST),), deterministic=False),
    replace(FLEX, device="cuda", capabilities=((AMPERE, NEWEST),)),
    FLEX,
    Kernel("blockwise", "any", HALF | WIDE, None, window=True, soft_cap=True, positions=True),
)
"""The first row that supports a case is taken."""


@cache
def able(case: Case, present: Set[str] = frozenset()) -> tuple[str, ...]:
    """The kernels that support ``case``, the best first. ``present``: which of :data:`OPTIONAL` are installed."""
    return tuple(row.name for row in KERNELS if row.serves(case) and row.name not in OPTIONAL - present)


def choose(case: Case, pin: str = "auto", present: Set[str] = frozenset()) -> str:
    """The kernel to use: the pinned one if it supports the case, else the best."""
    found = able(case, present)
    return pin if pin in found else found[0]


def cases(spec: ModelSpec, case: Case, seq_len: int) -> dict[str, Case]:
    """The case of each kind of layer of a model, by a description of what the layer sees."""
    windows = {kind.window for kind in layer_kinds(spec)[0]}
    windows = {window if window is not None and window < seq_len else None for window in windows}
    found = {f"windows of {window:,}": replace(case, window=True) for window in sorted(filter(None, windows))}
    if None in windows:
        found = {"full attention": case, **found}
    cap = spec.attention.attention_soft_cap is not None
    return {words: replace(of, soft_cap=cap, odd_length=seq_len % LENGTH != 0) for words, of in found.items()}


def described(of: dict[str, Case], pin: str, present: Set[str]) -> str:
    """``flash``, or ``flash (full attention), blockwise (windows of 4,096)``; and the kernel for rows of one document,
    if it is another."""
    taken: dict[str, list[str]] = {}
    for words, case in of.items():
        taken.setdefault(choose(case, pin, present), []).append(words)
    told = [f"{name} ({' and '.join(words)})" if len(taken) > 1 else name for name, words in taken.items()]
    whole = {choose(replace(case, documents=False), pin, present) for case in of.values() if case.device != "cpu"}
    return ", ".join([*told, *(f"{name} (rows of one document)" for name in sorted(whole - taken.keys()))])
