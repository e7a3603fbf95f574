"""AdamW whose moments, or weights too, are stored in few bits and rounded stochastically: in bf16, or in 8 bits
(moments.py).

The update is computed in fp32. Written back to bf16, a number becomes one of its two neighbours, the nearer one with
the higher probability, so that the mean does not change. Rounding to nearest loses every change below half a step of
bf16 (1/256 of the number, at most): a second moment that decays by 0.001 a step would never fall (Zamirai et al., arXiv
2010.06192). The random bits are a pure function of seed, parameter, update and the element's place in the whole tensor:
no layout changes the result, and a resumed run equals one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.distributed.slices import local, local_slice
from shardwise.techniques.optim import elementwise
from shardwise.techniques.optim.elementwise import PIECE

_GOLDEN, _MIX = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed numbers."""


Kept = dict[str, Tensor]
"""A parameter's moments as they are stored, by key of the optimizer's state."""


def noise(key: Tensor, slices: tuple[slice, ...], shape: tuple[int, ...]) -> Tensor:
    """Return 48 random bits, the upper ones of an int64, for each element in ``slices`` of a tensor of ``shape``. They
    depend on ``key`` (int64, no dims) and the element's place."""
    place = torch.zeros((), dtype=torch.int64, device=key.device)
    for span, size in zip(slices, shape, strict=True):
        place = (place * size).unsqueeze(-1) + torch.arange(span.start, span.stop, device=key.device)
    place = place + key
    for shift, factor in zip((30, 27), _MIX, strict=True):
        place.bitwise_xor_(place >> shift).mul_(factor)
    return place


def draw(random: Tensor, field: int) -> Tensor:
    """Return 16 of the bits of :func:`noise`, as an int32 from 0 to 65535; ``field`` 0, 1 or 2 says which. Not of
    tensors without dims."""
    fields = random.view(torch.int16).unflatten(-1, (-1, 4))  # all machines of today are little-endian
    sixteen: Tensor = fields[..., field + 1]
    return sixteen.to(torch.int32, memory_format=torch.contiguous_format).bitwise_and_(0xFFFF)


def stochastic(wide: Tensor, random: Tensor, field: int) -> Tensor:
    """Round ``wide`` (fp32) to bf16, up or down with the probabilities that keep the mean. Values that bf16 can
    represent do not change, nor do infinity and NaN."""
    halves = draw(random, field).add_(wide.contiguous().view(torch.int32)).view(torch.int16).unflatten(-1, (-1, 2))
    rounded = halves[..., 1].view(torch.bfloat16)
    return torch.where(wide.isnan(), torch.nan, rounded)  # a carry could turn NaN into a number


class RoundedAdamW(Optimizer):
    """AdamW over plain and sharded parameters in fp32 or bf16, with moments of dtype ``moments``; what is in bf16 is
    rounded stochastically. Random bits depend on a parameter's name if it was given with one, else on its place in the
    list."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        moments: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._keys: dict[nn.Parameter, int] = {}
        self.moments = moments
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._told: dict[torch.device, Tensor] = {}
        numbers = count()
        for group in self.param_groups:
            for name, parameter in zip(group.get("param_names", numbers), group["params"], strict=False):
                self._keys[parameter] = xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) - 2**63
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, **self.fresh(parameter)}

    def fresh(self, parameter: nn.Parameter) -> Kept:
        """Return the moments of one parameter before its first step, sharded as it is."""
        return {key: torch.zeros_like(parameter, dtype=self.moments).detach() for key in ("exp_avg", "exp_avg_sq")}

    def wide(self, kept: Kept) -> tuple[Tensor, Tensor]:
        """Return first and second moments as new fp32 tensors."""
        first, second = (kept[key].to(torch.float32, copy=True) for key in ("exp_avg", "exp_avg_sq"))
        return first, second

    def keep(self, kept: Kept, moments: tuple[Tensor, Tensor], random: Tensor) -> None:
        """Write what :meth:`wide` gave back."""
        for field, (key, value) in enumerate(zip(("exp_avg", "exp_avg_sq"), moments, strict=True), 1):
            self.write(kept[key], stochastic(value, random, field) if kept[key].dtype == torch.bfloat16 else value)

    def write(self, target: Tensor, value: Tensor) -> None:
        """Copy ``value`` into ``target``, unless this step is skipped. That is decided on the device, without the
        host."""
        skips = self._skips(target.device)
        target.copy_(value if skips is None else torch.where(skips, target, value))

    def _skips(self, device: torch.device) -> Tensor | None:
        """Return whether this step is skipped, on a device, to which that is copied once a step; None where none can
        be."""
        if self.found_inf is not None and device not in self._told:
            self._told[device] = self.found_inf.to(device, non_blocking=True) > 0
        return self._told.get(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient. Like torch's fused AdamW, it divides gradients by
        ``grad_scale``, and changes nothing if ``found_inf`` is 1."""
        self._told.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local(parameter.grad), group)

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state, slices = self.state[parameter], local_slice(parameter)
        state["step"] += 1 if self.found_inf is None else 1 - self.found_inf
        key = state["step"].long() * _GOLDEN + self._keys[parameter]
        weight, kept = local(parameter), {name: local(value) for name, value in state.items() if name != "step"}
        if not weight.numel():
            return
        if not parameter.ndim:
            kept = {name: value.view(1) for name, value in kept.items()}
            return self._rows(weight.view(1), grad.view(1), kept, noise(key, (), ()).view(1), group, state["step"])
        length = weight.shape[0]
        rows = max(1, PIECE.get(grad.device.type, 2**22) * length // weight.numel())
        for part in elementwise.pieces(length, rows):
            first = slice(slices[0].start + part.start, slices[0].start + part.stop)
            random = noise(key, (first, *slices[1:]), tuple(parameter.shape))
            held = {name: value[part] for name, value in kept.items()}
            self._rows(weight[part], grad[part], held, random, group, state["step"])

    def _rows(
        self, weight: Tensor, grad: Tensor, kept: Kept, random: Tensor, group: dict[str, Any], step: Tensor
    ) -> None:
        """Update weights and moments in place."""
        wide, (first, second) = weight.to(torch.float32, copy=True), self.wide(kept)
        (beta1, beta2), grad, lr = group["betas"], grad.float(), group["lr"]
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        if (skips := self._skips(grad.device)) is not None:
            grad = torch.where(skips, 0.0, grad)  # what is not finite has no code in 8 bits
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2 ** step.double())).sqrt_().add_(group["eps"])
        wide.mul_(1 - lr * group["weight_decay"])
        wide.sub_((first / denominator).mul_(lr / (1 - beta1 ** step.double())))
        self.write(weight, stochastic(wide, random, 0) if weight.dtype == torch.bfloat16 else wide)
        self.keep(kept, (first, second), random)
