"""What experts have no room for, against plain loops over rows, experts and tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from shardwise.models.capacity import within_capacity
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.layers import GATES
from shardwise.models.moe import Experts, MoE
from shardwise.models.room import expert_room
from shardwise.models.router_losses import RowPlaces, Tally
from tests.parity.experts import MOE
from tests.parity.mixtures import GPT_OSS

CAPPED = with_fields(MOE, expert_capacity=1.0, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
BIASED = with_fields(GPT_OSS, expert_capacity=1.25)


def layer(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> MoE:
    torch.manual_seed(0)
    made = MoE(spec).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return told(made)


def told(module: MoE) -> MoE:
    """The layer as in a training step."""
    sizes = (module.router.weight.shape[0], 2, 2, 1)
    module.tally = Tally(*(torch.zeros(size, dtype=torch.float64) for size in sizes))
    return module


def dropped(module: MoE) -> float:
    assert module.tally is not None and module.tally.dropped is not None
    return float(module.tally.dropped)


def rows(count: int, length: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, length, MOE.hidden_size, dtype=dtype, requires_grad=True)


def by_hand(module: MoE, spec: ModelSpec, x: Tensor, filled: Tensor | None = None) -> tuple[Tensor, int]:
    """What the layer makes of x [b,s,d], and how many choices it drops. Of each row the first ``filled`` tokens are
    more than padding, which experts leave alone."""
    assert spec.experts.expert_capacity is not None
    length, k, count = x.shape[1], spec.experts.experts_per_token, 0
    room = math.ceil(spec.experts.expert_capacity * length * k / spec.experts.num_experts)
    made = []
    for number, row in enumerate(x):
        tokens = length if filled is None else int(filled[number])
        scores = linear(row, module.router.weight, module.router.bias).softmax(-1)
        best = scores.topk(k)
        weights = best.values / best.values.sum(-1, keepdim=True) if spec.experts.normalised_top_k else best.values
        out = [torch.zeros_like(row[0]) for _ in range(length)]
        for expert in range(spec.experts.num_experts):
            asking = [(t, j) for t in range(tokens) for j in range(k) if best.indices[t, j] == expert]
            asking.sort(key=lambda place: (-weights[place].bfloat16().item(), place[0]))
            count += len(asking[room:])
            for t, j in asking[:room]:
                out[t] = out[t] + weights[t, j] * of_expert(module.experts, spec, expert, row[t])
        made.append(torch.stack(out))
    whole = torch.stack(made)
    if module.shared is not None and module.shared_gate is not None:
        whole = whole + module.shared(x) * torch.sigmoid(module.shared_gate(x))
    return whole, count


def of_expert(experts: Experts, spec: ModelSpec, expert: int, token: Tensor) -> Tensor:
    def product(of: Any, value: Tensor) -> Tensor:
        bias = None if of.bias is None else of.bias.chunk(spec.experts.num_experts)[expert]
        return linear(value, of.weight.chunk(spec.experts.num_experts)[expert], bias)

    gate, up = product(experts.expert_gate, token), product(experts.expert_up, token)
    return product(experts.expert_down, GATES[spec.activation](gate, up))


def outcome(module: MoE, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """What was made, and the gradients of something that weighs all of it."""
    module.zero_grad()
    x.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None and found.keys() == dict(module.named_parameters()).keys()
    return found | {"x": x.grad.clone(), "out": out.detach()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("capacity", [1.0, 1.25, 100.0])
@pytest.mark.parametrize("spec", [CAPPED, BIASED], ids=["shared", "biases"])
def test_it_is_a_loop_over_rows_experts_and_tokens(spec: ModelSpec, capacity: float, dtype: torch.dtype) -> None:
    """Values and gradients; of fp32 by one product for all experts, whose rows are all some expert's."""
    spec = with_fields(spec, expert_capacity=capacity, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    module, x, computed = layer(spec, dtype), rows(3, dtype=dtype), []
    products = module.experts.products

    def watched(given: Tensor, counts: Tensor) -> Tensor:
        assert given.shape[0] == counts.sum()
        computed.append(given.shape[0])
        return products(given, counts)

    with patch.object(module.experts, "products", watched):
        found = outcome(module, x, module(x))
    made, count = by_hand(module, spec, x)
    for name, value in outcome(module, x, made).items():
        torch.testing.assert_close(found[name], value, rtol=1e-10 if dtype == torch.float64 else 1e-4, atol=1e-5)
    assert dropped(module) == count and (count > 0) == (capacity < 100)
    assert computed == [3 * 12 * spec.experts.experts_per_token - count]


@pytest.mark.prove
def test_gradients_by_finite_differences() -> None:
    small = with_fields(CAPPED, hidden_size=4, expert_size=3, shared_expert_size=2)
    module, x = layer(small), rows(1, 10)[..., :4].detach().requires_grad_()
    names, values = zip(*module.named_parameters(), strict=True)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(module, dict(zip(names, given, strict=True)), x)
        return out

    assert torch.autograd.gradcheck(run, (x, *values))
    assert by_hand(module, small, x)[1] > 0


def test_rows_do_not_take_each_other_s_room() -> None:
    """However many of them a pass has."""
    module, x = layer(CAPPED), rows(3)
    whole = module(x)
    torch.testing.assert_close(whole, torch.cat([module(row[None]) for row in x]), rtol=1e-12, atol=1e-12)
    assert dropped(module) == 2 * by_hand(module, CAPPED, x)[1] > 0


def test_padding_takes_no_room_from_tokens_and_nothing_is_computed_for_it() -> None:
    """However many tokens alike there are, whose weights tie."""
    module, x, filled = layer(CAPPED), rows(3).detach(), torch.tensor([5, 12, 9])
    for row, end in zip(x, filled, strict=True):
        row[end:] = x[0, 0]
    out = module(x, filled)
    made, count = by_hand(module, CAPPED, x, filled)
    torch.testing.assert_close(out, made, rtol=1e-10, atol=1e-10)
    assert dropped(module) == count > 0
    assert count < by_hand(module, CAPPED, x)[1]


def test_what_is_alike_but_for_roundoff_goes_by_its_place() -> None:
    """Another micro-batch or layout sums in another order."""
    torch.manual_seed(3)
    ids, places = torch.zeros(64, 1, dtype=torch.int64), RowPlaces(1, 64)
    weights = torch.full((64, 1), 0.37) * (1 + 1e-6 * torch.randn(64, 1))
    found, lost = within_capacity(ids, weights, places, 1, 20)
    assert found.flatten().tolist() == [0] * 20 + [1] * 44 and lost == 44


@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_the_same_is_dropped_in_any_micro_batch(together: int) -> None:
    """In fp32, of rows that end in hundreds of tokens alike, as a whole batch's product rounds and as a row's does."""
    spec = replace(CAPPED, hidden_size=256)
    module, found = layer(spec, torch.float32), list[Tensor]()
    torch.manual_seed(2)
    x, filled = torch.randn(8, 300, 256), torch.tensor([300, 10, 150, 299, 1, 42, 200, 300])
    for row, end in zip(x, filled, strict=True):
        row[end // 2 :] = x[0, 0]  # some of the tokens that count are alike, too

    def watched(*given: Any) -> tuple[Tensor, Tensor]:
        ids, count = within_capacity(*given)
        found.append(ids)
        return ids, count

    with patch("shardwise.models.moe.within_capacity", watched), torch.no_grad():
        module(x, filled)
        for rows_, ends in zip(x.split(together), filled.split(together), strict=True):
            module(rows_, ends)
    assert torch.equal(found[0], torch.cat(found[1:])) and (found[0] == spec.experts.num_experts).any()


def test_outside_a_training_step_nothing_is_dropped() -> None:
    """Evaluation measures the model that is exported, which has no capacity."""
    module, x = layer(CAPPED), rows(3)
    cut = module(x)
    module.tally = None
    whole = module(x)
    assert torch.equal(whole, layer(with_fields(CAPPED, expert_capacity=None))(x)) and not torch.equal(whole, cut)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_counts_nothing_twice(recompute: bool) -> None:
    module, x = layer(CAPPED), rows(3)
    out = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    out.sum().backward()
    assert dropped(module) == by_hand(module, CAPPED, x)[1] > 0


def test_of_equal_weights_the_earlier_stay() -> None:
    """As where a token goes to one expert, whose weight is 1."""
    ids = torch.tensor([[1], [0], [1], [1], [1], [0]])
    found, lost = within_capacity(ids, torch.ones(6, 1), RowPlaces(1, 6), 2, 2)
    assert found.flatten().tolist() == [1, 0, 1, 2, 2, 0] and lost == 2


PADDED = RowPlaces(2, 3, first=2)
"""Of two rows of three tokens the last four, and behind them padding."""
WEIGHTS = torch.tensor([[1.0], [2.0], [3.0], [1.0], [9.0], [9.0]])


def test_padding_takes_no_room() -> None:
    ids = torch.zeros(6, 1, dtype=torch.int64)
    found, lost = within_capacity(ids, WEIGHTS, PADDED, 1, 2)
    assert found.flatten().tolist() == [0, 0, 0, 1, 1, 1] and lost == 1


def test_padding_that_takes_room_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault."""
    places = RowPlaces.of

    def with_padding(self: RowPlaces, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        row, inside = places(self, tokens, like)
        return row, torch.ones_like(inside)

    monkeypatch.setattr(RowPlaces, "of", with_padding)
    with pytest.raises(AssertionError):
        test_padding_takes_no_room()


@pytest.mark.parametrize(
    ("capacity", "tokens", "room"), [(1.0, 12, 5), (1.1, 1_000, 440), (1.25, 8, 4), (1.0, 1, 1), (7.0, 5, 14)]
)
def test_room_is_rounded_up_from_what_is_written(capacity: float, tokens: int, room: int) -> None:
    """1.1 times 400 is 440, not the 441 to which binary fractions round up."""
    assert expert_room(with_fields(MOE, expert_capacity=capacity), tokens) == room


def test_no_tokens_at_all() -> None:
    module = layer(CAPPED)
    x = torch.randn(1, 0, MOE.hidden_size, dtype=torch.float64, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert out.shape == x.shape and all(p.grad is not None and not p.grad.any() for p in module.parameters())
