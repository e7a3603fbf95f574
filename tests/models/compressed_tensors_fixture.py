"""What has made compressed_tensors.safetensors: small matrices that compressed-tensors 0.20.1 wrote in float8, with
their scales, and what it reads there. It is no dependency: run this where it is installed, with the file's path."""

from __future__ import annotations

import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, BLOCK, GROUP = 44, (16, 32), 24


def largest(weight: Tensor, kind: str) -> Tensor:
    """The largest size of what has a scale in common; of blocks, those at the edges are smaller."""
    if kind == "tensor":
        return weight.abs().amax().reshape(1)
    if kind == "channel":
        return weight.abs().amax(1, keepdim=True)
    height, width = BLOCK if kind == "block" else (1, GROUP)
    padding = (0, -weight.shape[1] % width, 0, -weight.shape[0] % height)
    padded = torch.nn.functional.pad(weight, padding).abs()
    return padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).amax((1, 3))


def made() -> dict[str, Tensor]:
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    found: dict[str, Tensor] = {}
    more: dict[str, dict[str, Any]] = {"tensor": {}, "channel": {}, "block": {"block_structure": [*BLOCK]}}
    more |= {"group": {"group_size": GROUP}, "mxfp8": {"group_size": 32, "scale_dtype": torch.uint8}}
    for kind, given in more.items():
        mx = kind == "mxfp8"
        weight = torch.randn(ROWS, 96 if mx else 72) * torch.logspace(-3, 1, ROWS).unsqueeze(1)
        strategy = "group" if mx else kind
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **given)
        if mx:
            scale = torch.exp2(torch.ceil(torch.log2(weight.abs().unflatten(1, (-1, 32)).amax(-1) / 448)))
        else:
            highest = largest(weight, kind)
            scale, _ = calculate_qparams(-highest, highest, args)
        compressor = MXFP8QuantizationCompressor if mx else FloatQuantizationCompressor
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        given = {"weight": weight.bfloat16(), "weight_scale": scale.bfloat16()}
        state = compressor.compress(given, scheme)
        found |= {f"{kind}.{name}": state[name] for name in ("weight", "weight_scale")}
        found[f"{kind}.values"] = compressor.decompress(state, scheme)["weight"].contiguous()
    return found


if __name__ == "__main__":
    save_file(made(), sys.argv[1])
