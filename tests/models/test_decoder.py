"""The decoder against transformers, and what it saves for backward on real and fake tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from shardwise.models.attention import MaskSpec
from shardwise.models.config import RopeScaling, model_spec, parameter_shapes, with_fields
from shardwise.models.decoder import Block, Decoder
from shardwise.models.hf_names import to_hf_name
from shardwise.models.layers import RMSNorm, geglu, rotate, rounded, swiglu
from shardwise.models.roles import role
from shardwise.models.rotary import rotary_tables
from tests.models.llama import pair, random_config, random_model, relative, tokens

SPEC = model_spec(
    name="test",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=100.0,
    rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=16),
    attention_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize("seed", range(8))
def test_logits_and_gradients_are_those_of_transformers(seed: int) -> None:
    """2e-5 and 1e-4 relative: the project's bar for fp32, where orders of summation differ."""
    config = random_config(seed)
    ours, theirs = pair(config, seed)
    ids, positions = tokens(config["vocab_size"])
    logits, reference = ours(ids, positions, MaskSpec()), theirs(ids).logits
    assert relative(logits, reference) < 2e-5
    labels = ids.roll(-1, 1).flatten()
    F.cross_entropy(logits.flatten(0, 1), labels).backward()
    F.cross_entropy(reference.flatten(0, 1), labels).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, gradients[to_hf_name(name)]) < 1e-4, name


def test_the_random_configs_use_every_feature() -> None:
    configs = [random_config(seed) for seed in range(8)]
    assert {c["rope_parameters"]["rope_type"] for c in configs} >= {"linear", "llama3"}
    assert {c["tie_word_embeddings"] for c in configs} == {True, False}
    assert {c["attention_bias"] for c in configs} == {c["mlp_bias"] for c in configs} == {True, False}
    groups = [(c["num_key_value_heads"], c["num_attention_heads"]) for c in configs]
    assert any(kv == 1 for kv, _ in groups) and any(kv == h for kv, h in groups) and any(1 < kv < h for kv, h in groups)


@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 4.0), SPEC.positions.rope_scaling])
def test_rope_scaling_changes_the_logits(scaling: RopeScaling | None) -> None:
    """So that the comparison above could not pass with scaling left out."""
    ids, positions = tokens(SPEC.vocab_size)
    model = random_model(SPEC)
    reference = model(ids, positions, MaskSpec())
    model.spec = with_fields(SPEC, rope_scaling=scaling)
    same = relative(model(ids, positions, MaskSpec()), reference) < 1e-6
    assert same == (scaling == SPEC.positions.rope_scaling)


def test_documents_are_separate_sequences() -> None:
    """Packed documents give what each gives alone. fp64, so that only the mask can make a difference."""
    model = random_model(SPEC, dtype=torch.float64)
    ids, _ = tokens(SPEC.vocab_size)
    bounds = [0, 10, 11, 40, 47, 80]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, 40)
    mask = MaskSpec(documents=torch.tensor(bounds, dtype=torch.int32), longest=max(lengths))
    packed = model(ids, positions, mask)
    pieces = zip(ids.flatten().split(lengths), lengths, strict=True)
    alone = torch.cat([model(piece[None], torch.arange(n)[None], MaskSpec())[0] for piece, n in pieces])
    torch.testing.assert_close(packed.flatten(0, 1), alone, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(packed.square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(alone.square().sum(), list(model.parameters()))
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-10)


def test_names_shapes_roles_and_tying() -> None:
    model = Decoder(SPEC)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(SPEC)
    uneven = replace(SPEC, intermediate_sizes=tuple(range(8, 8 + SPEC.num_hidden_layers)))
    assert {name: tuple(p.shape) for name, p in Decoder(uneven).named_parameters()} == parameter_shapes(uneven)
    roles = {role(name) for name in parameter_shapes(SPEC)}
    assert roles == {"embed", "head", "q", "k", "v", "o", "gate", "up", "down", "norm", "bias"}
    tied = Decoder(replace(SPEC, tie_word_embeddings=True))
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in parameter_shapes(tied.spec)
    with pytest.raises(KeyError, match="rotary"):
        role("layers.0.rotary.table")


def test_finish_gets_the_normed_hidden_states_and_the_output_weight() -> None:
    model = random_model(SPEC)
    ids, positions = tokens(SPEC.vocab_size)
    logits = model(ids, positions, MaskSpec(), lambda hidden, weight: hidden @ weight.mT)
    torch.testing.assert_close(logits, model(ids, positions, MaskSpec()))


def saved(model: torch.nn.Module, block: Block, length: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """(type, elements) of each distinct storage that a block saves, parameters left out."""
    hidden = torch.randn(2, length, SPEC.hidden_size, dtype=dtype, requires_grad=True)
    rotary = rotary_tables(SPEC, torch.arange(length).expand(2, length), dtype)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, tuple[torch.dtype, int]] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = (tensor.dtype, storage.nbytes() // tensor.dtype.itemsize)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden, rotary, MaskSpec())
    return sorted(seen.values(), key=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_block_saves_a_minimal_set_the_same_on_fake_tensors(dtype: torch.dtype) -> None:
    """What a planner reads off fake tensors is what a real step holds, in every data type."""
    n = 2 * 24
    d, f, q, kv = SPEC.hidden_size, SPEC.intermediate_size, 32, 16
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tables = [(dtype, n * SPEC.attention.head_dim // 2)] * 2
    norms = [(dtype, n * d), (wide, n)] * 2
    expected = [*tables, *norms]
    expected += [(dtype, n * d)]  # the normed input of q, k, v
    expected += [(dtype, n * q), (dtype, n * kv), (dtype, n * kv)]  # rotated q and k; v
    expected += [
        (dtype, n * q),
        (wide, n * SPEC.attention.num_attention_heads),
    ]  # attention's output, also the input of o; lse
    expected += [(dtype, n * d)]  # the normed input of gate and up
    expected += [(dtype, n * f)] * 3  # gate, up, and their product, the input of down
    real = random_model(SPEC, dtype=dtype)
    assert saved(real, real.layers[0], 24, dtype) == sorted(expected, key=str)
    with FakeTensorMode():
        fake = Decoder(SPEC)
        for module in fake.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().to(dtype)))
        assert saved(fake, fake.layers[0], 24, dtype) == sorted(expected, key=str)


@pytest.mark.matrix(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_block_compiles_whole(backend: str) -> None:
    """fullgraph: no break, and the same numbers to fp32 rounding."""
    torch._dynamo.reset()
    block = random_model(SPEC).layers[0]
    positions = torch.arange(20).expand(2, 20)
    rotary = rotary_tables(SPEC, positions, torch.float32)
    documents = torch.tensor([0, 7, 20, 40], dtype=torch.int32)
    mask = MaskSpec(documents=documents, longest=20)
    hidden = torch.randn(2, 20, SPEC.hidden_size)
    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend=backend)):
        x = hidden.clone().requires_grad_()
        block.zero_grad()
        out = run(x, rotary, mask)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())])
    for eager, compiled in zip(*results, strict=True):
        assert relative(compiled, eager) < 1e-5


def test_gradients_of_the_primitives() -> None:
    """Against finite differences in fp64."""
    torch.manual_seed(0)
    x, y = (torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    norm = RMSNorm(8, 1e-3).double()
    torch.nn.init.normal_(norm.weight)
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), (x, norm.weight)
    )
    shifted = RMSNorm(8, 1e-3, plus_one=True).double()
    torch.nn.init.normal_(shifted.weight)
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(shifted, {"weight": w}, (x,)), (x, shifted.weight)
    )
    assert torch.autograd.gradcheck(swiglu, (x, y)) and torch.autograd.gradcheck(geglu, (x, y))
    rotary = rotary_tables(SPEC, torch.randint(0, 90, (2, 5)), torch.float64)
    heads = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotary), (heads,))
    part = rotary_tables(with_fields(SPEC, partial_rotary_factor=0.5), torch.randint(0, 90, (2, 5)), torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, part), (heads,))
    assert torch.equal(rotate(heads, part)[..., 4:], heads[..., 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 12.0, 3072**0.5, 5376**0.5, 0.22])
def test_rounding_to_a_type_is_torchs(value: float, dtype: torch.dtype) -> None:
    """Gemma multiplies its embeddings by a number of the type that it computes in."""
    assert rounded(value, dtype) == float(torch.tensor(value, dtype=dtype))


def test_bf16_is_near_fp32() -> None:
    """Within a few roundings of 2^-8 a layer."""
    ids, positions = tokens(SPEC.vocab_size)
    model = random_model(SPEC)
    reference = model(ids, positions, MaskSpec())
    assert relative(model.bfloat16()(ids, positions, MaskSpec()).float(), reference) < 0.03


def test_a_norm_in_fp32_serves_bf16_activations() -> None:
    norm = RMSNorm(8, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    out = norm(x)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    assert relative(out.float(), F.rms_norm(x.float(), (8,), norm.weight, 1e-5)) < 0.01
