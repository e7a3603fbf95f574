"""Is the model what its family is elsewhere? The small model beside transformers' own class, in float64, with the same
weights and rows: logits, and the gradient of every weight. A wrong forward with its matching backward, in a module that
the run and the plain loop share, is seen by nothing else.

What the class computes in a narrower type (norms, softmax, rotation) is computed in float64 too, so that right models
agree to 1e-13. Sizes that a config of the family ties to one another are tied; a row is one document.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.data.micro_batch import collate
from shardwise.errors import ShardwiseError, first_line
from shardwise.methods.loss import mask
from shardwise.models import hf
from shardwise.models.config import ModelSpec, flat, from_hf, parameter_shapes, to_hf, with_fields
from shardwise.models.hf_model import model_of
from shardwise.models.hf_names import Location, locations, tensors
from shardwise.models.predictor import without_predictor
from shardwise.prove.in_float64 import Widened
from shardwise.prove.workload import Workload, as_one, texts

TOLERANCE = 1e-9
"""Relative, of logits and gradients."""
SMALL = 1e-6
"""Of the longest gradient: a shorter one is taken to be so long (biases of keys without rotation have none)."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FOLLOWING = {*ENDS, "expert_size", "embedding_multiplier", "attention_scale", "expert_capacity", "stored"}
"""What a config says by other sizes, or only in words; the room of experts is ours alone, and how files hold weights
changes none."""


@dataclass(frozen=True)
class Likeness:
    """The distances of the logits and of each weight's gradient from transformers', relative to their length; or
    ``why`` there are none."""

    logits: float
    gradients: dict[str, float]
    why: str = ""

    def problems(self) -> list[str]:
        """A line for each that is not within the tolerance, the farthest first."""
        apart = "from those of transformers' class"
        found = [f"logits {apart}: relative error {self.logits:.1e}"] if not self.logits <= TOLERANCE else []
        wrong = {name: error for name, error in self.gradients.items() if not error <= TOLERANCE}
        for name in sorted(wrong, key=wrong.__getitem__, reverse=True):
            found.append(f"gradient of {name} {apart}: relative error {wrong[name]:.1e}")
        return [f"{line}, at most {TOLERANCE:g}" for line in found]


def counterpart(spec: ModelSpec) -> ModelSpec | str:
    """Return ``spec`` as transformers' class of its family has it, or why none has."""
    if spec.hf_model is not None:
        return "it runs in transformers' own modules"
    try:
        spec = without_predictor(spec)
        told = from_hf(to_hf(with_fields(spec, **dict.fromkeys(ENDS))), spec.name)
    except (ShardwiseError, ValueError) as error:
        return f"no config of {spec.family} says what it has ({first_line(error)})"
    known, read = flat(spec), flat(told)
    if other := [key for key in known if known[key] != read[key] and key not in FOLLOWING]:
        return f"configs of {spec.family} do not say `{other[0]}: {known[other[0]]}`"
    return with_fields(told, **dict.fromkeys(ENDS))  # an embedding with a row for padding gives that no gradient


def quiet() -> None:
    """Keep libraries from telling of kernels that are not there: nothing here is to be fast."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()


def on_rank(rank: int, world: int, job: Workload) -> Likeness:
    """Compute both, in this process. ``job`` has a :func:`counterpart`."""
    quiet()
    spec, why = job.spec, ""
    square = with_fields(spec, hidden_size=spec.attention.num_attention_heads * spec.attention.head_dim)
    for tried in (spec, square):  # some classes take no other size of heads
        try:
            theirs = _theirs(tried)
        except Exception as error:  # whatever a class says of sizes that it cannot be, or transformers of its name
            why = f"transformers makes no model of it: {first_line(error)}"
            continue
        weights = {name: job.first(name, shape).double() for name, shape in parameter_shapes(tried).items()}
        held = tensors(locations(tried, theirs.state_dict()))
        given = {name: hf.assembled(parts, weights.__getitem__) for name, parts in held.items()}
        sizes = {name: value.shape for name, value in theirs.state_dict().items()}
        if tried is spec and any(sizes.get(name, value.shape) != value.shape for name, value in given.items()):
            continue
        lacking = theirs.load_state_dict(given, strict=False).missing_keys
        if unknown := [name for name in lacking if not spec.tie_word_embeddings or name != "lm_head.weight"]:
            raise ValueError(f"transformers' class has `{unknown[0]}`, of which nothing here is the value")
        return _compare(tried, weights, theirs, held, job)
    return Likeness(0.0, {}, why)


def _theirs(spec: ModelSpec) -> Any:
    """Make transformers' model, with any weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plainly: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(spec)), **plainly).double().eval()
    finally:
        torch.set_default_dtype(before)


def _compare(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    theirs: Any,
    held: Mapping[str, list[tuple[str, Location]]],
    job: Workload,
) -> Likeness:
    own: dict[str, Tensor] = {name: nn.Parameter(value) for name, value in weights.items()}
    batch = collate([as_one(row) for row in texts(job, 0)[-2:]])
    labels = batch.labels.flatten()
    logits = torch.func.functional_call(model_of(spec).double(), own, (batch.ids, batch.positions, mask(batch)))
    functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    with Widened():
        known = theirs(batch.ids, use_cache=False).logits
        functional.cross_entropy(known.flatten(0, 1), labels).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.items()}
    longest, errors = max(float(gradient.norm()) for gradient in gradients.values()), dict[str, float]()
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None and name in held:
            mine = hf.assembled(held[name], gradients.__getitem__)
            whose = " and ".join(dict.fromkeys(part for part, _ in held[name][:2]))
            error = float((parameter.grad - mine).norm()) / max(float(parameter.grad.norm()), SMALL * longest)
            errors[whose] = error if not error <= errors.get(whose, 0.0) else errors[whose]
    return Likeness(float(((logits - known).norm() / known.norm()).detach()), errors)
