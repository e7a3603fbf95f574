"""Gated delta nets: the rule token by token, transformers in float64, and nothing from another document."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel

from shardwise.models import delta_sizes
from shardwise.models.attention import MaskSpec
from shardwise.models.config import from_hf, problems, with_fields
from shardwise.models.decoder import Decoder
from shardwise.models.delta import GatedDeltaNet, conv_silu, gated_delta
from shardwise.models.init import fill
from tests.models.families import LENGTH, config_of, in_memory, random_model, spec_of
from tests.models.llama import relative, tokens

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
CLASSES = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}


def by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """The definition, of one document."""
    each = v.shape[2] // k.shape[2]
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 2) for x in (q, k))
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        key = k[:, t].unsqueeze(-1)
        state = decay[:, t, :, None, None].exp() * state
        lacking = v[:, t].unsqueeze(-2) - key.mT @ state
        state = state + rate[:, t, :, None, None] * key * lacking
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1)


def drawn(
    length: int, heads: int = 2, each: int = 2, key: int = 6, value: int = 5, seed: int = 0, slowest: float = 0.02
) -> list[Tensor]:
    """Two rows; heads that forget slowly, and ones that forget fast."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, *shape, dtype=torch.float64, generator=generator)

    speed = torch.logspace(0, 2, heads * each, dtype=torch.float64) * slowest
    given = [normal(heads, key), normal(heads, key), normal(heads * each, value)]
    given += [-speed * normal(heads * each).abs(), torch.sigmoid(normal(heads * each))]
    return [x.requires_grad_() for x in given]


LENGTHS = {
    "none": (2, 41),
    "one each": (41, 41),
    "many": (1, 3, 4, 33, 2, 39),
    "tokens": (1,) * 82,
}


@pytest.mark.parametrize("documents", LENGTHS)
@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_rule_is_that_of_single_tokens(documents: str, each: int) -> None:
    """Values and gradients, document by document: over several chunks and blocks of them."""
    given = drawn(41, each=each, seed=each)
    assert delta_sizes.chunk(6, 5) < 5 < 8 * delta_sizes.chunk(6, 5) < 41
    lengths = [41, 41] if documents == "none" else [*LENGTHS[documents]]
    bounds = None if documents == "none" else torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    out, _ = gated_delta(*given, bounds)
    flat = [x.flatten(0, 1) for x in given]
    pieces = zip(*(x.split(lengths) for x in flat), strict=True)
    wanted = torch.cat([by_token(*(x.unsqueeze(0) for x in piece))[0] for piece in pieces]).view_as(out)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-13)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    own, theirs = (torch.autograd.grad((x * weights).sum(), given, retain_graph=True) for x in (out, wanted))
    for ours, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-11)


def test_whole_sizes_have_whole_chunks() -> None:
    """What is kept has room for the states between blocks of any heads."""
    assert (delta_sizes.chunk(128, 128), delta_sizes.kept(128, 128)) == (64, 32)
    for key in range(1, 40):
        for value in range(1, 40):
            block = 8 * delta_sizes.chunk(key, value)
            assert block * delta_sizes.kept(key, value) >= key * value and block <= 512


def test_sums_over_tokens_stay_in_their_document() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 4, dtype=torch.float64), torch.randn(4, 1, 3, dtype=torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    lengths = [1, 2, 6, 9]
    bounds = torch.tensor([0, 1, 3, 9, 18], dtype=torch.int32)
    wanted = torch.cat([F.conv1d(F.pad(part.T, (2, 0)), weight, groups=4).T for part in x.flatten(0, 1).split(lengths)])
    wanted = F.silu(wanted).view_as(x)
    out = conv_silu(x, weight, bounds)
    torch.testing.assert_close(out, wanted)
    factors = torch.randn_like(x)
    for ours, theirs in zip(
        *(torch.autograd.grad((y * factors).sum(), (x, weight)) for y in (out, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@cache
def in_float64(family: str) -> types.ModuleType:
    """transformers' module of a family, which computes in fp32 whatever it is given, with its casts to float64."""
    name = family.removesuffix("_text")
    plain = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    text = inspect.getsource(plain).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    copy = types.ModuleType(f"{plain.__name__}_in_float64")
    copy.__package__, copy.__file__ = plain.__package__, plain.__file__
    sys.modules[copy.__name__] = copy
    exec(
        compile(text.replace("torch.float)", "torch.double)").replace("torch.float,", "torch.double,"), "", "exec"),
        copy.__dict__,
    )
    return copy


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_in_float64(family: str, seed: int, tied: bool) -> None:
    """1e-9, of heads that forget slowly."""
    config = config_of(family, seed) | {"tie_word_embeddings": tied}
    spec = from_hf(config, "test")
    ours = random_model(spec, seed, torch.float64)
    made: type[PreTrainedModel] = vars(in_float64(family))[f"{CLASSES[family]}ForCausalLM"]
    loaded = AutoConfig.for_model(**config)
    loaded._attn_implementation = loaded._experts_implementation = "eager"
    theirs = made(loaded).double().eval()
    state = in_memory(spec, ours.state_dict(), theirs.state_dict())
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    ids, positions = tokens(spec.vocab_size, length=LENGTH, seed=seed)
    logits, reference = ours(ids, positions, MaskSpec()), theirs(ids, use_cache=False).logits
    assert relative(logits, reference) < 1e-9
    labels = ids.roll(-1, 1).flatten()
    for each in (logits, reference):
        F.cross_entropy(each.flatten(0, 1), labels).backward()
    gradients = in_memory(spec, {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, state)
    for name, parameter in theirs.named_parameters():
        assert relative(gradients[name], parameter.grad) < 1e-9, name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_a_document_is_anothers(family: str) -> None:
    """Changing one changes no bit of what another makes, nor of its gradients: in fp32, where a sum that reached across
    would."""
    spec = spec_of(family)
    model = random_model(spec)
    bounds = torch.tensor([0, 13, 27, LENGTH], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (13, 14, LENGTH - 27)])[None]
    ids, _ = tokens(spec.vocab_size, rows=1, length=LENGTH)
    found = []
    for other in (0, 1):
        given = ids.clone()
        given[:, 13:27] = (ids[:, 13:27] + other) % spec.vocab_size
        hidden = model.embed(given).detach().requires_grad_()
        mask = MaskSpec(documents=bounds, longest=14)
        tables = model.tables(*_kinds(model), positions, hidden.dtype, mask)
        block = model.layers[0].attention
        out = block(hidden, tables[0], mask)
        kept = torch.cat([out[:, :13], out[:, 27:]], 1)
        kept.square().sum().backward()
        assert hidden.grad is not None
        assert not hidden.grad[:, 13:27].any()
        found.append((kept.detach(), torch.cat([hidden.grad[:, :13], hidden.grad[:, 27:]], 1)))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def _kinds(model: Decoder) -> tuple[tuple[object, ...]]:
    from shardwise.models.config import layer_kinds

    return (layer_kinds(model.spec)[0],)


def test_bf16_is_near_fp32() -> None:
    spec = spec_of("qwen3_next")
    ids, positions = tokens(spec.vocab_size)
    model = random_model(with_fields(spec, layer_types=("linear_attention",) * 3, num_experts=0))
    reference = model(ids, positions, MaskSpec())
    assert relative(model.bfloat16()(ids, positions, MaskSpec()).float(), reference) < 0.06


@pytest.mark.parametrize("key", [3, 16])
def test_fake_tensors_have_the_shapes_of_real_ones(key: int) -> None:
    given = [x.detach().float() for x in drawn(40, key=key)]
    real, grads = gated_delta(*given, None), []
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x).requires_grad_() for x in given]
        made = gated_delta(*fake, None)
        made[0].sum().backward()
        grads = [x.grad for x in fake]
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in real]
    assert [x.shape for x in grads if x is not None] == [x.shape for x in given]


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
def test_a_net_compiles_whole() -> None:
    torch._dynamo.reset()
    model = random_model(spec_of("qwen3_5_text"))
    net, hidden = model.layers[0].attention, torch.randn(2, 20, model.spec.hidden_size)
    assert isinstance(net, GatedDeltaNet)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert relative(compiled(hidden, None, MaskSpec()), net(hidden, None, MaskSpec())) < 1e-5


def test_first_decays_are_between_those_of_transformers() -> None:
    spec = spec_of("qwen3_next")
    drawn = fill("layers.0.attention.decay_log", [4096], [slice(0, 4096)], 0, spec).exp()
    assert 0.01 <= drawn.min() < 0.2 and 15.8 < drawn.max() <= 16.0 and abs(drawn.mean() - 8.0) < 0.3
    norms = [
        fill(f"layers.0.{name}", [3], [slice(0, 3)], 0, spec)
        for name in ("attention.head_norm.weight", "mlp_norm.weight")
    ]
    assert [float(norm[0]) for norm in norms] == [1.0, 0.0]


def test_what_heads_cannot_be() -> None:
    spec = spec_of("qwen3_5_text")
    [problem] = problems(with_fields(spec, linear_num_key_heads=2, linear_num_value_heads=3))
    assert problem.code == "PLAN008" and problem.fix == "linear_num_value_heads: a multiple of 2"
    [problem] = problems(with_fields(spec, linear_conv_kernel_dim=0))
    assert problem.what == "linear_conv_kernel_dim is 0"
    assert not problems(replace(spec, name="x"))
