"""The rule by flash-linear-attention's function: how rows, documents and states are handed over, with the definition in
its place; and by its own kernels, where the package is there, which Triton can interpret without a GPU."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.models import fused_delta
from shardwise.models.delta import gated_delta, gated_delta_backward
from tests.models.test_delta import drawn


def rule_of_one(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, token by token, of one document [1,s,..] from a state [heads,key,value]."""
    each, out = v.shape[2] // k.shape[2], []
    q, k = ((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(each, 2) for x in (q, k))
    for t in range(v.shape[1]):
        key = k[0, t].unsqueeze(-1)
        state = decay[0, t, :, None, None].exp() * state
        state = state + rate[0, t, :, None, None] * key * (v[0, t].unsqueeze(-2) - key.mT @ state)
        out.append((q[0, t].unsqueeze(-2) @ state).squeeze(-2) * q.shape[-1] ** -0.5)
    return (torch.stack(out) if out else v[0]).unsqueeze(0), state


def stand_in(
    *given: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """What the package's function says that it does."""
    assert use_qk_l2norm_in_kernel and output_final_state
    rows, length, heads, value = given[2].shape
    if cu_seqlens is None:
        pieces = [tuple(x[row : row + 1] for x in given) for row in range(rows)]
    else:
        assert rows == 1 and cu_seqlens[0] == 0 and cu_seqlens[-1] == length and (cu_seqlens.diff() > 0).all()
        lengths = cu_seqlens.diff().tolist()
        pieces = list(zip(*(torch.split(x, lengths, 1) for x in given), strict=True))
    zeros = given[2].new_zeros(len(pieces), heads, given[1].shape[-1], value)
    start = zeros if initial_state is None else initial_state
    assert start.shape == zeros.shape
    outs, states = zip(*map(rule_of_one, *zip(*pieces, strict=True), start), strict=True)
    return torch.cat(outs, 0 if cu_seqlens is None else 1), torch.stack(states)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The definition where the package's function is looked for."""
    for name in ("fla", "fla.ops", fused_delta.MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[fused_delta.MODULE], "chunk_gated_delta_rule", stand_in, raising=False)
    yield


BOUNDS = {
    "one a row": None,
    "none goes on": (0, 5, 21, 24, 42, 42),
    "the second row goes on": (0, 5, 24, 42),
    "both go on": (3, 8, 30),
}
"""Of two rows of 21 tokens. Bounds of pieces under context parallelism may not name where their rows start."""


@pytest.mark.parametrize("documents", BOUNDS)
@pytest.mark.parametrize("states", [False, True])
def test_what_is_handed_over_is_the_rule(
    package: None, documents: str, states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients are those of the plain rule, with a state before the rows and a gradient of that after."""
    given = [x.detach() for x in drawn(21)]
    bounds = None if BOUNDS[documents] is None else torch.tensor(BOUNDS[documents], dtype=torch.int32)
    torch.manual_seed(1)
    before, after = (torch.randn(2, 2, 2, 6, 5, dtype=torch.float64) if states else None for _ in range(2))
    grad = torch.randn_like(given[2])
    out, kept = gated_delta(*given, bounds, before)
    wanted = gated_delta_backward(grad, *given, bounds, before, kept, after)
    torch.testing.assert_close(fused_delta.forward(tuple(given), bounds, before), out, rtol=1e-12, atol=1e-13)
    monkeypatch.setattr(fused_delta, "serves", lambda q, k: True)
    found = gated_delta_backward(grad, *given, bounds, before, kept, after)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("version", "serves"), [("0.5.3", False), ("0.6.0", True), ("0.10rc1", True), ("1.0", True)])
def test_older_versions_are_left_alone(version: str, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no heads of values that share one of keys."""
    monkeypatch.setattr(fused_delta.metadata, "version", lambda name: version)
    assert fused_delta.installed.__wrapped__() is serves


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_but_a_gpu_is_served(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_delta, "installed", lambda: True)
    x = torch.empty(1, 2, 1, 128, dtype=torch.bfloat16, device=device)
    assert not fused_delta.serves(x, x)


@pytest.mark.filterwarnings("ignore")  # the package warns where it finds no GPU
@pytest.mark.skipif(not find_spec("fla") or not find_spec("triton"), reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("documents", ["one a row", "none goes on", "the second row goes on"])
def test_its_kernels_are_the_rule(documents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, interpreted: set TRITON_INTERPRET=1."""
    autotuner: Any = pytest.importorskip("triton.runtime.autotuner")
    monkeypatch.setattr(autotuner.Autotuner, "prune_configs", lambda self, _: self.configs[:1])  # no time to try more
    given = [x.detach().float() for x in drawn(21, key=16, value=16)]
    bounds = None if BOUNDS[documents] is None else torch.tensor(BOUNDS[documents], dtype=torch.int32)
    torch.manual_seed(1)
    before, after = (torch.randn(2, 2, 2, 16, 16) for _ in range(2))
    grad = torch.randn_like(given[2])
    out, kept = gated_delta(*given, bounds, before)
    wanted = gated_delta_backward(grad, *given, bounds, before, kept, after)
    found = fused_delta.forward(tuple(given), bounds, before)
    assert (found - out).abs().max() < 1e-5 * out.abs().max()
    for ours, theirs in zip(fused_delta.backward(grad, tuple(given), bounds, before, after), wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
