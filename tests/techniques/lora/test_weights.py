"""What is stored of a weight that was read or drawn: a magnitude of DoRA is the norm of a whole row."""

from __future__ import annotations

import torch

from shardwise.techniques import lora

WEIGHT = "layers.0.attention.o.weight"
MAGNITUDE = WEIGHT.removesuffix("weight") + "lora_m"


def test_magnitudes_ask_for_whole_rows_of_a_weight_whose_columns_are_cut() -> None:
    rows, columns = slice(2, 4), slice(3, 6)
    found = lora.wanted({WEIGHT: (rows, columns), MAGNITUDE: (rows,), "norm.weight": (rows,)}, {WEIGHT: (4, 6)})
    assert found == {WEIGHT: (rows, slice(0, 6)), "norm.weight": (rows,)}


def test_a_magnitude_begins_as_the_norm_of_the_rows_that_are_given() -> None:
    parameters = {WEIGHT: torch.zeros(2, 3), MAGNITUDE: torch.zeros(2)}
    values = torch.tensor([[3.0, 4.0], [5.0, 12.0]])
    made = lora.store(parameters, WEIGHT, (slice(0, 2), slice(0, 2)), lambda: values)
    assert parameters[MAGNITUDE].tolist() == [5.0, 13.0] and made() is values
