"""A layer that predicts a further token, in float64: its loss and every gradient by a plain loop over documents, in
which transformers' own layers compute; the names in files; and what a recipe may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel

from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.pack import IGNORE
from shardwise.distributed.meshes import Meshes
from shardwise.methods.loss import Further
from shardwise.models.config import from_hf
from shardwise.models.predictor import with_predictor
from shardwise.prove.workload import job_of, texts
from shardwise.runtime import passes
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.spec.plan import Batch, Plan, Precision
from shardwise.spec.recipe import Method, OptimSection
from tests.models.families import config_of, corrections, in_memory, random_model
from tests.models.test_delta import in_float64, relative

WEIGHT = 0.3
CLASSES = {"deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "qwen3_next": "Qwen3Next"}


def config(family: str, seed: int) -> dict[str, Any]:
    """Without a stretch of positions, which transformers computes in fp32."""
    given = config_of(family, seed) | {"tie_word_embeddings": False}
    if family == "deepseek_v3":
        given |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rope_scaling": None}
    return given


def their_model(family: str, given: dict[str, Any]) -> PreTrainedModel:
    """transformers' model in float64, with one layer more, which is the predictor's."""
    more = {"num_hidden_layers": given["num_hidden_layers"] + 1}
    if types := given.get("layer_types"):
        more["layer_types"] = [*types, "full_attention"]
    loaded = AutoConfig.for_model(**given | more)
    loaded._attn_implementation = loaded._experts_implementation = "eager"
    made: type[PreTrainedModel] = vars(in_float64(family))[f"{CLASSES[family]}ForCausalLM"]
    return made(loaded).double().eval()


class Plain:
    """The loop: a document at a time, through transformers' layers. ``own``: what the files have of the predictor
    besides its block, by the last words of its names."""

    def __init__(self, theirs: PreTrainedModel, own: dict[str, nn.Parameter], eps: float, plus_one: bool) -> None:
        self.inner, self.head, self.own = theirs.model, theirs.lm_head, own
        self.layers, self.last_norm = [*theirs.model.layers], theirs.model.norm
        self.types, self.eps, self.plus_one = getattr(theirs.config, "layer_types", None), eps, plus_one

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.own[name] + 1 if self.plus_one else self.own[name]
        return functional.rms_norm(x, x.shape[-1:], weight, self.eps)

    def through(self, layers: list[nn.Module], norm: nn.Module, **given: Tensor) -> Tensor:
        self.inner.layers, self.inner.norm = nn.ModuleList(layers), norm
        if self.types:  # looked up by the place in the list
            self.inner.config.layer_types = [self.types[self.layers.index(layer)] for layer in layers]
        made: Tensor = self.inner(**given, use_cache=False).last_hidden_state
        return made

    def losses(self, ids: Tensor, labels: list[int], behind: int | None) -> Iterator[tuple[str, Tensor]]:
        """Of a document [1,n]: the loss of each label, and of each label of the token behind; ``behind`` is the token
        after the last, if it is of the document too."""
        hidden = self.through(self.layers[:-1], self.last_norm, input_ids=ids)
        following = torch.cat([ids[:, 1:], torch.tensor([[behind or 0]])], 1)
        embedded = self.norm("embed", self.inner.embed_tokens(following))
        joined = torch.cat([embedded, self.norm("hidden", hidden)], -1) @ self.own["join"].mT
        further = self.norm("norm", self.through(self.layers[-1:], nn.Identity(), inputs_embeds=joined))
        for place, label in enumerate(labels):
            if label != IGNORE:
                yield "main", functional.cross_entropy(self.head(hidden[0, place]), torch.tensor(label))
        for place in range(len(labels) - 1):
            if place + 2 < len(labels) + (behind is not None) and labels[place + 1] != IGNORE:
                label = torch.tensor(labels[place + 1])
                yield "further", functional.cross_entropy(self.head(further[0, place]), label)


def documents(batch: MicroBatch) -> Iterator[tuple[Tensor, list[int], int | None]]:
    """Ids and labels of each document, and for the last of a row the id behind it, which its label tells."""
    assert batch.documents is not None
    length, borders = batch.ids.shape[1], batch.documents.tolist()
    for start, stop in pairwise(borders):
        ids, labels = batch.ids.flatten()[start:stop], batch.labels.flatten()[start:stop].tolist()
        behind = labels[-1] if stop % length == 0 and labels[-1] != IGNORE else None
        yield ids[None], labels, behind


def own_names(family: str, layers: int) -> dict[str, str]:
    if family == "qwen3_next":
        words = {"embed": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "join": "fc", "norm": "norm"}
        return {word: f"mtp.{name}.weight" for word, name in words.items()}
    words = {"embed": "enorm", "hidden": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
    return {word: f"model.layers.{layers}.{name}.weight" for word, name in words.items()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", CLASSES)
def test_loss_and_gradients_are_those_of_a_plain_loop(family: str, seed: int) -> None:
    """Two micro-batches with unlike numbers of targets, rows of two documents each: 1e-9."""
    given = config(family, seed)
    spec = with_predictor(from_hf(given, "test"), WEIGHT)
    ours, theirs, layers = (
        random_model(spec, seed, torch.float64),
        their_model(family, given),
        spec.num_hidden_layers - 1,
    )
    named = own_names(family, layers)
    block = "mtp.layers.0." if family == "qwen3_next" else f"model.layers.{layers}."
    there = {name.replace(f"model.layers.{layers}.", block): name for name in theirs.state_dict()}
    values = in_memory(spec, ours.state_dict(), there)
    theirs.load_state_dict({there[name]: value for name, value in values.items() if name in there})
    own = {word: nn.Parameter(values[name].clone()) for word, name in named.items()}
    assert values.keys() == there.keys() | {*named.values()}
    plan = Plan(batch=Batch(2, 2, 11, 7), precision=Precision("fp64", "fp64", "fp64"))
    rows = texts(job_of(spec, plan, 1), seed)
    batches = [collate(rows[at : at + 2], ahead=True) for at in (0, 2)]
    plain, sums = Plain(theirs, own, spec.rms_norm_eps, spec.norm_plus_one), {"main": [], "further": []}  # type: ignore[var-annotated]
    for batch in batches:
        for document in documents(batch):
            for which, loss in plain.losses(*document):
                sums[which].append(loss)
    counts = {
        which: [batch.supervised_tokens() if which == "main" else batch.further for batch in batches] for which in sums
    }
    assert {which: sum(each) for which, each in counts.items()} == {which: len(each) for which, each in sums.items()}
    assert len({*counts["further"]}) > 1
    main, further = (torch.stack(each).mean() for each in sums.values())
    (main + WEIGHT * further).backward()
    rules = StepRules(plan, Meshes(), OptimSection(), 10, finish_of(Method(), plan))
    found = passes.train([ours], batches, rules, len(sums["main"]), None, Further(WEIGHT, len(sums["further"])))
    assert abs(found.value - main) < 1e-9 * main, "the loss that is reported is the main one"
    assert abs(found.figures["mtp_loss"] - further) < 1e-9 * further
    gradients = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
    state = in_memory(spec, gradients | corrections(ours), there)
    theirs.model.layers, theirs.model.norm = nn.ModuleList(plain.layers), plain.last_norm
    wanted = {name: theirs.get_parameter(there[name]).grad for name in there if "correction" not in name}
    wanted |= {named[word]: parameter.grad for word, parameter in own.items()}
    for name, gradient in wanted.items():
        assert relative(state[name], gradient) < 1e-9, name


def test_the_id_behind_and_the_label_of_that_stay_in_their_document() -> None:
    ids = torch.arange(10, 20).view(2, 5)
    labels = torch.tensor([[11, 12, 13, 14, 99], [16, IGNORE, 18, 19, IGNORE]])
    told = MicroBatch(ids, labels, ids, torch.tensor([0, 3, 5, 8, 10], dtype=torch.int32), 3).looking_ahead()
    none = IGNORE
    assert told.targets is not None and told.following is not None and told.further == 2
    assert told.following.tolist() == [[11, 12, 13, 14, 99], [16, 17, 18, 19, 0]]
    assert told.targets[..., 1].tolist() == [[12, none, none, 99, none], [none, none, none, none, none]]
