"""Models that only transformers has: the same numbers as there, files both ways, and what cannot be taken over is
refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.olmo.modeling_olmo import OlmoMLP

from shardwise import techniques
from shardwise.errors import ConfigError, DataError, PolicyError
from shardwise.models import hf, hf_model, hf_names, init
from shardwise.models.attention import MaskSpec
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.lookup import load_spec, read_spec
from shardwise.models.resolve import resolve
from shardwise.models.roles import role
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import cut
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Batch, Plan, Precision
from shardwise.techniques import precision
from tests.models.hf_models import CONFIGS, GATED, LONG, SIZES, config_of, ours_of, spec_of, theirs_of, transposed
from tests.models.llama import relative, tokens

LENGTH = 24
"""Beyond every window."""


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(kind: str) -> None:
    """2e-5 and 1e-4 relative: the project's bar for fp32, where orders of summation differ."""
    theirs = theirs_of(kind)
    ours = ours_of(kind, theirs)
    ids, positions = tokens(90, length=LENGTH)
    logits, reference = ours(ids, positions, MaskSpec()), theirs(ids, use_cache=False).logits
    assert relative(logits, reference) < 2e-5
    labels = ids.roll(-1, 1).flatten()
    F.cross_entropy(logits.flatten(0, 1), labels).backward()
    F.cross_entropy(reference.flatten(0, 1), labels).backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    wanted |= {name: wanted[name].T for name in transposed(theirs)}
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, parameter in ours.named_parameters():
        reference = wanted.pop(hf_names.name_in_model(name, ours.spec))
        if float(reference.norm()) < 1e-6 * largest:  # of k's bias without rotation: nothing but rounding
            assert float(parameter.grad.norm()) < 1e-6 * largest, name  # type: ignore[union-attr]
        else:
            assert relative(parameter.grad, reference) < 1e-4, name
    assert not wanted


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_documents_give_what_each_gives_alone(kind: str) -> None:
    """In float64, but for tables and norms that transformers computes in fp32 whatever it is given."""
    theirs = theirs_of(kind)
    model = ours_of(kind, theirs).double()
    ids, _ = tokens(90, 1, LENGTH)
    border = 9
    positions = torch.cat([torch.arange(border), torch.arange(LENGTH - border)])[None]
    documents = torch.tensor([0, border, LENGTH], dtype=torch.int32)
    with torch.no_grad():
        packed = model(ids, positions, MaskSpec(documents=documents, longest=LENGTH - border))
        for part in (slice(0, border), slice(border, LENGTH)):
            alone = theirs.double()(ids[:, part], use_cache=False).logits
            assert relative(packed[:, part], alone) < 1e-6
    assert relative(model(ids, torch.arange(LENGTH)[None], MaskSpec()), packed) > 1e-3


def test_what_a_spec_says_is_what_the_model_is() -> None:
    found = {kind: spec_of(kind) for kind in CONFIGS}
    assert {
        kind for kind, spec in found.items() if spec.attention.sliding_window == 7 and spec.attention.layer_types
    } == {
        "olmo3",
        "cohere2",
        "exaone4",
        "vaultgemma",
    }
    assert found["starcoder2"].attention.sliding_window == 7 and not found["starcoder2"].attention.layer_types
    assert found["cohere2"].logits_scaling == 4.0 and found["vaultgemma"].final_soft_cap == 3.0
    assert [kind for kind, spec in found.items() if hf_names.transposed(spec)] == ["gpt2"]
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert hf_names.transposed(found["gpt2"]) == {
        f"layers.{block}.{layer}.weight" for block in range(3) for layer in layers
    }
    assert parameter_shapes(found["gpt2"])["layers.2.mlp.c_fc.weight"] == (256, 64)
    for spec in found.values():
        assert (spec.vocab_size, spec.hidden_size, spec.num_hidden_layers, spec.attention.num_attention_heads) == (
            90,
            64,
            3,
            4,
        )
        for name, shape in parameter_shapes(spec).items():
            assert (len(shape) == 1) == (role(name) in ("norm", "bias")), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_files_go_both_ways(tmp_path: Path, kind: str) -> None:
    theirs = theirs_of(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    spec = spec_of(kind)
    values = dict(hf.read_weights(tmp_path / "theirs", whole(spec), spec))
    model = ours_of(kind, theirs)
    assert all(torch.equal(values[name], parameter) for name, parameter in model.named_parameters())
    hf.write_weights(tmp_path / "ours", spec, values.__getitem__)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    ids, _ = tokens(90, length=LENGTH)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_start_from_random_weights_is_that_of_transformers(kind: str) -> None:
    """The same values where they are constant; elsewhere mean and deviation within five standard errors of two
    samples."""
    torch.manual_seed(0)
    spec = spec_of(kind)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**CONFIGS[kind])).state_dict()
    scales = set()
    for name, shape in parameter_shapes(spec).items():
        ours = init.fill(name, shape, [slice(0, size) for size in shape], 0, spec)
        value = theirs[hf_names.name_in_model(name, spec)]
        if not value.std() > 0:
            assert torch.equal(ours, value.expand(shape)), name
            continue
        error = float(value.std()) * 5 * (2 / value.numel()) ** 0.5
        assert abs(ours.mean() - value.mean()) < error and abs(ours.std() - value.std()) < error, name
        scales.add(spec.hf_model.drawn(name)[1] if spec.hf_model else 0)
    assert len(scales) == (2 if kind == "gpt2" else 1)  # GPT-2 begins what is added to its residual smaller


def test_a_start_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    monkeypatch.setattr(modeling_gpt2.init, "normal_", lambda tensor, **_: nn.init.uniform_(tensor))
    recipe = load_recipe(overrides=["model.config.model_type=gpt2", "data.path=text"])
    with pytest.raises(ConfigError, match=r"gpt2 initialises embed\.weight"):
        resolve(recipe)


def whole(spec: ModelSpec) -> dict[str, tuple[slice, ...]]:
    return {name: tuple(slice(0, size) for size in shape) for name, shape in parameter_shapes(spec).items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_its_rows_of_what_is_turned(tmp_path: Path, ranks: int) -> None:
    """A copy of those alone, which lies as the parameter does."""
    theirs, spec = theirs_of("gpt2"), spec_of("gpt2")
    theirs.save_pretrained(tmp_path)
    shapes, named = parameter_shapes(spec), load_file(tmp_path / "model.safetensors")
    found: dict[str, list[torch.Tensor]] = {name: [] for name in hf_names.transposed(spec)}
    for rank in range(ranks):
        rows = {name: slice(*cut((0, shapes[name][0]), ranks, rank)) for name in found}
        parts = {name: (rows[name], slice(0, shapes[name][1])) for name in found}
        for name, value in hf.read_weights(tmp_path, parts, spec):
            assert value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * 4
            found[name].append(value)
    for name, values in found.items():
        assert torch.equal(torch.cat(values), named[hf_names.name_in_files(name, spec)].T), name


def test_a_turned_matrix_of_the_wrong_shape_is_told_as_it_is_in_the_file(tmp_path: Path) -> None:
    theirs_of("gpt2").save_pretrained(tmp_path)
    named = load_file(tmp_path / "model.safetensors")
    for wrong in ((192, 64), (64, 128)):  # the first is how it lies in memory
        save_file(named | {"transformer.h.1.attn.c_attn.weight": torch.zeros(wrong)}, tmp_path / "model.safetensors")
        said = f"`layers.1.attn.c_attn.weight` file {list(wrong)}, model [64, 192]"
        with pytest.raises(DataError, match=f"1 of [0-9]+ tensors differ: {re.escape(said)}"):
            hf.check_weights(str(tmp_path), None, spec_of("gpt2"))


def test_old_names_are_read(tmp_path: Path) -> None:
    """GPT-2's own files lack ``transformer.`` and have the mask as a tensor."""
    theirs_of("gpt2").save_pretrained(tmp_path)
    named = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in named.items()}
    save_file(old | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    spec = spec_of("gpt2")
    (found,) = hf.read_weights(tmp_path, {"layers.1.mlp.c_fc.weight": (slice(3, 90), slice(0, 4))}, spec)
    assert torch.equal(found[1], named["transformer.h.1.mlp.c_fc.weight"].T[3:90, :4])


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("mixtral", {"num_local_experts": 2}, "stacked matrices, such"),
        ("mamba", {}, "stacked matrices"),
        ("phi", {}, "output layer"),
        ("falcon", {}, r"falcon of transformers 5\S+ .*\bown\b"),
        ("gptj", {}, r"gptj of transformers .*\bown\b"),
        ("gpt_neo", {}, r"gpt_neo of .*\bown\b"),
        ("bloom", {}, "bloom uses ALiBi"),
        ("mpt", {}, "mpt uses ALiBi"),
        ("falcon", {"alibi": True}, "falcon uses ALiBi"),
        ("xglm", {}, "own dense mask"),
        ("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}, "lfm2 .*'conv'"),
        ("dbrx", {}, r"without weights \(AttributeError: "),
        ("bert", {}, "output layer"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "a view"),
        ("apertus", {}, "layers and norms"),
        ("stablelm", {}, "the document mask"),
        ("deepseek_v3", {"n_routed_experts": 2}, ""),
        ("qwen3_next", {}, ""),
    ],
)
def test_what_cannot_be_taken_over_is_refused(kind: str, sizes: dict[str, object], said: str) -> None:
    given = {key: value for key, value in GATED.items() if key in CONFIG_MAPPING[kind]().to_dict()}
    with pytest.raises(ConfigError, match=f"MOD001(.|\n)*{said}(.|\n)*docs/own-loop.md"):
        hf_model.read(CONFIG_MAPPING[kind](**(given | sizes)).to_dict(), "other")


def summed(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


def looped(x: torch.Tensor) -> torch.Tensor:
    """A state that each token halves and adds to."""
    states = [x[:, 0]]
    for at in range(1, x.shape[1]):
        states.append(states[-1] / 2 + x[:, at])
    return torch.stack(states, 1)


def rolled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def convolved(x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(x.mT, (2, 0)), x.new_ones(x.shape[-1], 1, 3), groups=x.shape[-1]).mT


def linearly(x: torch.Tensor) -> torch.Tensor:
    return torch.tril(x @ x.mT) @ x


@pytest.mark.parametrize(
    ("mixes", "said"),
    [(summed, "cumsum"), (looped, "stack"), (rolled, "cat"), (convolved, "convolution"), (linearly, "bmm, tril")],
)
def test_blocks_that_carry_a_state_beside_attention_are_refused(
    monkeypatch: pytest.MonkeyPatch, mixes: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """Packed rows would run together there: what the state makes of later tokens depends on an earlier one."""
    plain = OlmoMLP.forward
    monkeypatch.setattr(OlmoMLP, "forward", lambda self, x: mixes(plain(self, x)))
    with pytest.raises(ConfigError, match=rf"MOD001(.|\n)*more than attention \(.*{said}.*packed documents"):
        read_spec(config_of("olmo"), "other")
    model = theirs_of("olmo")
    ids, _ = tokens(90, length=LENGTH)
    other = ids.clone()
    other[:, 2] = (other[:, 2] + 1) % 90
    first, second = (model.model.layers[0].mlp(model.model.embed_tokens(each)) for each in (ids, other))
    assert not torch.equal(first[:, 3:], second[:, 3:])


@pytest.mark.prove
def test_every_causal_model_of_transformers_is_read_or_refused(tmp_path: Path) -> None:
    """From a directory, as transformers itself writes its config: some 190 kinds, of which any may fail in its own
    way."""
    read, refused, early = [], {}, 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with suppress(Exception):  # not all sizes go together, and transformers refuses one default of its own
            CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
            known = json.loads((tmp_path / kind / "config.json").read_text())
            sizes = {key: value for key, value in (GATED | LONG).items() if key in known}
            CONFIG_MAPPING[kind](**sizes).save_pretrained(tmp_path / kind)
        if not (tmp_path / kind).is_dir():
            continue
        try:
            load_spec(str(tmp_path / kind))
            read.append(kind)
        except ConfigError as error:
            refused[kind] = str(error)
            early += "(docs/models.md)" in str(error)
            with pytest.raises(ConfigError):  # whatever is said of a config alone is so
                hf_model.read(json.loads((tmp_path / kind / "config.json").read_text()), kind)
    assert early > 100
    assert {"llama", "gpt2", "olmo3", "arcee", "cohere2", "vaultgemma"} <= set(read) and len(read) > 30
    for kind, null in (("deepseek_v2", "num_experts_per_tok"), ("dots1", "n_routed_experts")):
        assert null in refused.pop(kind)  # which is null there, and runs nowhere
    assert all("MOD001" in said or "PLAN008" in said for said in refused.values())
    assert not [kind for kind, said in refused.items() if "KeyError" in said and "examined" in said]


def test_matrices_of_an_unknown_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could say how they are multiplied by."""
    monkeypatch.setattr(hf_model, "_transpose", lambda whole: [])
    with pytest.raises(ConfigError, match=r"layers.\{\}.attn.c_attn.weight, "):
        read_spec(config_of("gpt2"), "other")


def test_configs_that_are_wrong_are_refused_as_such() -> None:
    for change, said in (
        ({"hidden_size": "abc"}, "hidden_size"),
        ({"num_attention_heads": 7}, "without weights"),
        ({"pad_token_id": 90}, "PLAN008.*pad_token_id 90 "),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quantised"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_spec(config_of("gpt_neox") | change, "other")


def test_positions_that_are_learnt_end() -> None:
    spec, cluster = spec_of("gpt2"), parse_cluster("1xH100")
    assert not techniques.check(spec, Plan(batch=Batch(seq_len=64)), cluster)
    assert [p.code for p in techniques.check(spec, Plan(batch=Batch(seq_len=65)), cluster)] == ["PLAN008"]
    assert not techniques.check(spec_of("gpt_neox"), Plan(batch=Batch(seq_len=65)), cluster), "rotated ones do not"


def test_a_head_that_differs_from_a_tied_embedding_is_told(tmp_path: Path) -> None:
    theirs_of("cohere2").save_pretrained(tmp_path)
    named = load_file(tmp_path / "model.safetensors")
    same = named["model.embed_tokens.weight"].clone()
    for head, told in ((same, False), (torch.randn(90, 64), True), (torch.cat((same, same[:1])), True)):
        save_file(named | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError, match="head and embedding") if told else nullcontext():
            hf.check_weights(str(tmp_path), None, spec_of("cohere2"))


def test_the_padding_row_is_trained_by_no_layout() -> None:
    """transformers' embeddings send no gradient there, in whatever type they are looked up."""
    found = []
    for compute in ("fp32", "bf16"):
        model = ours_of("olmo", theirs_of("olmo"))
        precision.apply([model], Plan(precision=Precision(compute)), None)
        ids, positions = tokens(90, length=LENGTH)
        ids[:, 3] = model.embed.padding_idx
        model.normed(ids, positions, MaskSpec()).float().square().sum().backward()
        found.append(float(model.embed.weight.grad[model.embed.padding_idx].abs().max()))
    assert model.embed.padding_idx == 0 and found == [0.0, 0.0]


def test_what_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'brandnew'.* causal"):
        read_spec({"model_type": "brandnew", **SIZES}, "other")
    with pytest.raises(PolicyError, match="never executed"):
        read_spec(config_of("gpt2") | {"auto_map": {"AutoModel": "code.Model"}}, "other")
