"""The items of the recipe's ``evaluate.tasks``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EvaluationTask(BaseModel):
    """Prompts that the model answers at every evaluation: the first ``samples`` lines of the jsonl file ``path``, each
    with a ``prompt`` to be continued, or ``messages``, and the expected ``answer``. ``score`` is ``exact_match``, or a
    function of yours as ``FILE.py:FUNCTION``, which gets the model's answer and the expected one."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    path: str
    samples: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    score: str = "exact_match"
