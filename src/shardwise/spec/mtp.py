"""The recipe's section ``model.mtp``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Mtp(BaseModel):
    """The layer that predicts a further token (multi-token prediction), trained with the model: the mean of its loss is
    added, times ``weight``. At 0 it is exported as it was."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    weight: float = Field(default=0.0, ge=0)
