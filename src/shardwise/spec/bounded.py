"""The numbers within bounds, and the words, that sections of a recipe take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.spec.cluster import MOST_DEVICES

Steps = Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0)]
"""A number of steps, which may end within one (as many sequences do), or below 1 a share of the run's."""
Degree = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Sequences = Annotated[int, Field(ge=1, le=2**20)]
"""Of a step. A plan asks how each number of them could be divided, and looks at each micro-batch of some pipelines."""
RecordFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "segments", "tokens", "text", "preference"
]
"""What records of data look like."""
