"""A row of measurements to change in tests: the Llama 2 7B on two nodes of eight A100, as a table would print it."""

from __future__ import annotations

ROW = {
    "id": "a-1",
    "group": "a",
    "verified": "yes",
    "kind": "measured",
    "task": "pretrain",
    "framework": "torchtitan",
    "model": "Llama2 7B",
    "params_b": "6.74",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "11008",
    "vocab": "32000",
    "mlp_gated": "1",
    "gpu": "A100",
    "gpu_mem_gb": "80",
    "num_gpus": "16",
    "gpus_per_node": "8",
    "interconnect": "NVLink; 4x100Gb RoCE per node",
    "tp": "2",
    "zero_stage": "3",
    "seq_len": "2048",
    "mbs": "2",
    "gbs": "64",
    "ac": "full",
    "precision": "bf16",
    "tokens_per_s_per_gpu": "1000",
    "outcome": "ok",
}


def changed(**values: str) -> dict[str, str]:
    """The row with other values."""
    return ROW | values
