"""Models that the decoder does not support, in transformers' own modules, which take the decoder's place.

Attention goes through our operation, by the seam that transformers leaves for it, so that documents are kept apart, no
dense mask exists, and planner and recomputation know it. Layers that have their weight as [in, out] become linear ones,
so that their files alone differ (models/hf.py). :func:`examine` runs a model once on the meta device to learn where its
parts are, and refuses by name what could not be taken over: another kind of mask, logits that pass through more than an
output layer, blocks that differ or hold more than linear layers and norms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ConfigError
from shardwise.models.attention import MaskSpec, attention
from shardwise.models.blocks import tie
from shardwise.models.config import TOKENS, ModelSpec, model_spec
from shardwise.models.decoder import Decoder
from shardwise.models.hf_spec import HFModel, check_supported, refuse
from shardwise.models.layers import Finish, Head, Part, soft_cap
from shardwise.models.roles import is_linear, role
from shardwise.models.token_mixing import TokenMixing

NAME = "shardwise"
"""The name under which our attention is registered with transformers."""


class HFDecoder(Part):
    """A causal language model of transformers with the parts and the call of :class:`Decoder`. Outside of the blocks
    its parts have transformers' names, but for ``embed`` and ``head``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert spec.hf_model is not None
        whole, _ = _build(json.loads(spec.hf_model.config), NAME)
        whole.config.pad_token_id = None  # or it warns of such tokens in a batch, which documents keep apart
        self._whole, self._inner = (whole,), (whole.get_submodule(spec.hf_model.inner),)  # tuples: no parts of this one
        for name, path in spec.hf_model.places:
            self.add_module(name, whole.get_submodule(path))
        self.head = Head(spec.hidden_size, spec.vocab_size)
        if spec.tie_word_embeddings:
            tie([self])

    def forward(self, ids: Tensor, positions: Tensor, mask: MaskSpec, finish: Finish | None = None) -> Tensor:
        """As :meth:`Decoder.forward`."""
        hidden = self.normed(ids, positions, mask)
        if finish is not None:
            return self.head(hidden, finish)
        return soft_cap(self.head(hidden), self.spec.final_soft_cap)

    def normed(self, ids: Tensor, positions: Tensor, mask: MaskSpec) -> Tensor:
        """The input of the output layer, [b,s,d]."""
        mask = replace(mask, kernel=self.kernel)
        hidden: Tensor = self._inner[0](input_ids=ids, position_ids=positions, use_cache=False, shardwise=mask)[0]
        return hidden if self.spec.logits_scaling == 1.0 else hidden / self.spec.logits_scaling

    def restore_buffers(self) -> None:
        """Recompute buffers, which follow from the config: moving from the meta device leaves them without values."""
        for module in self.modules():
            if next(module.buffers(recurse=False), None) is not None:
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # leaves it alone
                self._whole[0]._init_weights(module)


Model = Decoder | HFDecoder


def model_of(
    spec: ModelSpec, numbers: Iterable[int] | None = None, *, embedding: bool = True, head: bool = True
) -> Model:
    """The module that a spec describes, with uninitialised parameters; or the part of it with the blocks of these
    ``numbers``, with or without embedding (``embedding``) and last norm and output layer (``head``). Raises ValueError
    for a part of transformers' own modules."""
    if spec.hf_model is None:
        return Decoder(spec, numbers, embedding=embedding, head=head)
    if numbers is not None or not (embedding and head):
        raise ValueError(f"{spec.name} runs in transformers' own modules, which are not cut into parts")
    return HFDecoder(spec)


def read(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of a model that transformers can build from ``config``. Raises ConfigError MOD001 where it cannot, or
    the model does what is not served here."""
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        refuse(name, f"model_type {kind!r} is not a causal language model of transformers")
    try:
        settled = CONFIG_MAPPING[kind].from_dict(config).to_dict()
        check_supported(config | settled, name)
        return examine(settled, name)
    except ConfigError:
        raise
    except Exception as error:  # code of some hundred models, of which any may fail in its own way
        if isinstance(error, KeyError) and error.args == (f"{NAME}-examined",):
            refuse(name, f"{kind} of transformers {__version__} chooses its attention from a table of its own")
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        refuse(name, f"{kind} of transformers {__version__} fails when it is run once without weights ({said})")


def _build(config: dict[str, Any], attend: str) -> tuple[Any, list[str]]:
    """The model of transformers, in the default type, with dropout off: no layout could draw it alike. And the names
    there of the weights that it would have transposed."""
    from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, _attend)
    drops = {key: 0.0 for key, value in config.items() if re.search("drop", key) and isinstance(value, float)}
    made = CONFIG_MAPPING[config["model_type"]].from_dict(config | drops)
    whole = AutoModelForCausalLM.from_config(made, attn_implementation=attend, dtype=torch.get_default_dtype())
    return whole, _transpose(whole)


def _transpose(whole: Any) -> list[str]:
    """Replace every Conv1D, whose weight is [in, out], by a linear layer; returns the names of their weights."""
    from transformers.pytorch_utils import Conv1D

    found = {name: module for name, module in whole.named_modules() if isinstance(module, Conv1D)}
    for name, module in found.items():
        whole.set_submodule(name, nn.Linear(module.nx, module.nf))
    return [f"{name}.weight" for name in found]


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, dense: Any, **given: Any) -> tuple[Tensor, None]:
    """transformers' interface: q [b,h,s,e], k and v [b,hk,s,e] -> [b,s,h,e]. ``dense`` is None: what may be seen is
    told by ``shardwise``, which the model hands down as it is, and ``sliding_window``."""
    mask: MaskSpec = given["shardwise"]
    tensors = (mask.documents, None, mask.positions)
    window, length = given.get("sliding_window"), mask.longest or q.shape[2]
    rules = (True, window if window is not None and window < length else None, mask.longest)
    out, _ = attention(q, k, v, *tensors, *rules, given.get("softcap"), given.get("scaling"), mask.kernel)
    return out.transpose(1, 2), None


class _Window:
    """Stands in for a dense mask; a model that computes with its mask is refused."""

    def __init__(self, refuse: Callable[[str], NoReturn], local_size: int | None) -> None:
        self.refuse, self.local_size = refuse, local_size

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, such as how to copy it
            raise AttributeError(name)
        self._computed()

    def _computed(self, *_: Any) -> NoReturn:
        self.refuse("its attention computes with its own dense mask")

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __invert__ = _computed


class _Seen:
    """Records what one run on the meta device does."""

    def __init__(self, name: str) -> None:
        self.refuse = partial(refuse, name)
        self.order: list[str] = []
        self.windows: list[int | None] = []
        self.heads: tuple[int, int, int] = (0, 0, 0)
        self.layers: list[nn.Module] = []
        self.transposed: list[str] = []
        self.mixing = TokenMixing()

    def mask(self, *, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Any:
        """Returns a window in place of a mask; refuses masks that are neither causal nor a sliding window."""
        query = (local_size or 14) + 3
        keys, zero = torch.arange(query + 3, device="cpu"), torch.zeros((), dtype=torch.int64, device="cpu")
        seen = mask_function(zero, zero, torch.tensor(query, device="cpu"), keys).reshape(-1)
        if not torch.equal(seen.bool(), (keys <= query) & (keys > query - (local_size or query + 1))):
            self.refuse("its mask is neither causal nor a sliding window")
        return _Window(self.refuse, local_size)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, dense: Any, **given: Any
    ) -> tuple[Tensor, None]:
        known = {"sliding_window", "softcap", "scaling", "shardwise", "position_ids", "cache_position"}
        if odd := [key for key, value in given.items() if key not in known and isinstance(value, Tensor)]:
            self.refuse(f"its attention takes {', '.join(odd)}")
        window = given.get("sliding_window")
        told = dense is None or (isinstance(dense, _Window) and dense.local_size == window)
        if "shardwise" not in given or given.get("dropout") or not told:
            self.refuse("its attention does not take the document mask")
        if q.shape[-1] != v.shape[-1] or q.shape[1] % k.shape[1]:
            self.refuse("its values have heads of another size or number than its queries")
        if len(self.windows) >= len(self.layers) or module not in set(self.layers[len(self.windows)].modules()):
            self.refuse("it has attention outside its blocks, or twice in one block")
        self.windows.append(window)
        self.heads = (q.shape[1], k.shape[1], q.shape[-1])
        self.mixing.pause = True
        out = _attend(module, q, k, v, None, **given)
        self.mixing.pause = False
        return out


class _Operations(TorchDispatchMode):
    """Lists the operations that are not views: name, float arguments, and storage and size of the first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[tuple[str, list[float], tuple[int, int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            place = _place(args[0]) if args and isinstance(args[0], Tensor) else (0, 0)
            self.listed.append((func.__name__.partition(".")[0], [x for x in args if type(x) is float], place))
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, tensor.numel()


def examine(config: dict[str, Any], name: str) -> ModelSpec:
    """Run the model of a settled ``config`` on the meta device; its spec. Raises ConfigError MOD001."""
    from transformers import AttentionInterface, AttentionMaskInterface

    seen = _Seen(name)
    AttentionInterface.register(f"{NAME}-examined", seen.attend)
    AttentionMaskInterface.register(f"{NAME}-examined", seen.mask)
    with torch.device("meta"):
        whole, seen.transposed = _build(config, f"{NAME}-examined")
    text = whole.config.get_text_config()
    lists = [(path, list(module)) for path, module in whole.named_modules() if isinstance(module, nn.ModuleList)]
    lists = [(path, blocks) for path, blocks in lists if len(blocks) == text.num_hidden_layers]
    if len(lists) != 1:
        seen.refuse("it does not have exactly one list of blocks")
    (path, seen.layers), embed, head = lists[0], whole.get_input_embeddings(), whole.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or not isinstance(embed, nn.Embedding):
        seen.refuse("its embedding or output layer is of another class, or has a bias")
    kinds = [{key: value.shape for key, value in block.named_parameters()} for block in seen.layers]
    lists_inside = any(isinstance(module, nn.ModuleList) for module in seen.layers[0].modules())
    if any(kind != kinds[0] for kind in kinds) or lists_inside or any(len(shape) > 2 for shape in kinds[0].values()):
        seen.refuse("its blocks differ, or hold lists of modules or stacked matrices, such as experts")
    paths = {module: where for where, module in whole.named_modules()}
    rest = _rest(whole, path, (embed, head), seen)
    scaling, cap = _run(whole, path.rpartition(".")[0], seen)
    first = seen.order.index("layers")
    before, after = (list(dict.fromkeys(part)) for part in (seen.order[:first], seen.order[first + 1 :]))
    if sorted([*before, *after]) != sorted(rest):
        seen.refuse("one of its modules does not run exactly once")
    named = [(where.rpartition(".")[2], where) for where in before]
    places = [("embed", paths[embed]), *named, ("layers", path)]
    places += [*((where.rpartition(".")[2], where) for where in after), ("head", paths[head])]
    windows = {window for window in seen.windows if window is not None}
    if len(dict(places)) < len(places) or len(windows) > 1:
        seen.refuse("two of its modules have the same name, or its windows have two sizes")
    tied = head.weight is embed.weight
    described = _described(whole, config, places, tied, seen)
    heads, kv_heads, head_dim = seen.heads
    mixed = windows and None in seen.windows
    return model_spec(
        name,
        vocab_size=embed.num_embeddings,
        hidden_size=embed.embedding_dim,
        intermediate_size=max(
            shape[0] for key, _, shape, _ in described.parameters if key.startswith("layers.") and len(shape) == 2
        ),
        num_hidden_layers=len(seen.layers),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        family=config["model_type"],
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=tied,
        initializer_range=text.to_dict().get("initializer_range") or 0.02,
        **{key: tuple(ids) if isinstance(ids := text.to_dict().get(key), list) else ids for key in TOKENS},
        sliding_window=max(windows, default=None),
        layer_types=tuple(f"{'full' if w is None else 'sliding'}_attention" for w in seen.windows) if mixed else (),
        logits_scaling=scaling,
        final_soft_cap=cap,
        hf_model=described,
    )


def _rest(whole: Any, blocks: str, edges: tuple[nn.Module, ...], seen: _Seen) -> list[str]:
    """The paths of all other modules that hold tensors; a hook on each records when it runs."""

    def note(where: str) -> Callable[..., None]:
        return lambda *_: seen.order.append(where)

    def returned(block: nn.Module, given: Any, out: Any) -> None:
        if not isinstance(out, Tensor) or out._base is not None:  # of a view FSDP2 may lose the gradient
            seen.refuse("its blocks return more than a tensor, or a view of one")

    found = []
    for block in seen.layers:
        seen.mixing.watch(block)
    seen.layers[0].register_forward_pre_hook(note("layers"))
    seen.layers[0].register_forward_hook(returned)
    for where, module in whole.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and module not in edges and not where.startswith(f"{blocks}."):
            found.append(where)
            module.register_forward_pre_hook(note(where))
    inner = blocks.rpartition(".")[0]
    if any(where == inner or not where.startswith(f"{inner}.") for where in found):
        seen.refuse(f"it has parameters or buffers outside its modules ({', '.join(found)})")
    return found


def _run(whole: Any, inner: str, seen: _Seen) -> tuple[float, float | None]:
    """The divisor and the cap of the logits; a model that does anything else to them is refused."""
    ids = torch.zeros((2, 8), dtype=torch.int64, device="meta")
    with _Operations() as operations:
        whole.get_submodule(inner).register_forward_hook(lambda *_: operations.listed.clear())
        whole(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, shardwise=MaskSpec())
    if seen.mixing.found or len(seen.windows) != len(seen.layers):
        how = ", ".join(dict.fromkeys(seen.mixing.found)) or "a block without attention"
        seen.refuse(f"its blocks mix tokens by more than attention ({how}), and packed documents would run together")
    names, copies = [name for name, *_ in operations.listed], ("clone", "_to_copy", "_unsafe_view")
    match [(name, *numbers[:1]) for name, numbers, _ in operations.listed if name not in copies]:
        case [("mm",)]:
            return 1.0, None
        case [("mm",), ("div", divisor)]:
            return divisor, None
        case [("mm",), ("mul", factor)]:
            return 1.0 / factor, None
        case [("mm",), ("div", cap), ("tanh",), ("mul", again)] if cap == again:
            return 1.0, cap
    seen.refuse(f"its logits pass through {', '.join(names)}")


def _described(whole: Any, config: dict[str, Any], places: list[tuple[str, str]], tied: bool, seen: _Seen) -> HFModel:
    found: dict[str, tuple[int, ...]] = {}
    first = dict(seen.layers[0].named_parameters())
    for name, path in places:
        inside = "layers.{}" if name == "layers" else name
        for key, value in first.items() if name == "layers" else whole.get_submodule(path).named_parameters():
            found[f"{inside}.{key}"] = tuple(value.shape)
    if tied:
        del found["head.weight"]
    kept = set(whole.state_dict()) - {key for key, _ in whole.named_parameters(remove_duplicate=False)}
    linear = {f"layers.{{}}.{key}" for key, module in seen.layers[0].named_modules() if isinstance(module, nn.Linear)}
    odd = [name for name in found if is_linear(name) and name.removesuffix(".weight") not in linear]
    odd += [name for name, shape in found.items() if not _plain(name, shape) and name not in odd]
    if kept or odd:
        seen.refuse(f"it holds more than linear layers and norms ({', '.join(odd or sorted(kept))[:60]})")
    named = _names_in_files(whole, dict(places), list(found), seen)
    inner = dict(places)["layers"].rpartition(".")[0]
    ignored = sorted(whole._keys_to_ignore_on_load_unexpected or ())  # a set in some
    draws = _drawn(whole)

    def drawn(name: str) -> tuple[float, float] | None:
        each = {draws[_path(name, dict(places), layer)] for layer in range(len(seen.layers))}
        return each.pop() if len(each) == 1 else None

    parameters = tuple((name, named[name], shape, drawn(name)) for name, shape in found.items())
    transposed = tuple(name for name in found if _path(name, dict(places)) in seen.transposed)
    return HFModel(json.dumps(config, sort_keys=True), inner, tuple(places), parameters, transposed, tuple(ignored))


def _drawn(whole: Any) -> dict[str, tuple[float, float] | None]:
    """Return how transformers initialises each parameter: mean and deviation of a normal distribution (deviation 0 for
    a constant), or None for any other way. Changes to a part of it (a row of zeros for padding) are ignored."""
    with _Operations() as operations, torch.no_grad():
        for module in reversed(list(whole.modules())):  # as it does itself: what is inside comes first
            whole._init_weights(module)
    noted = {}
    for name, numbers, place in operations.listed:
        known = {"normal_": (*numbers, 0.0, 1.0)[:2], "fill_": (*numbers[:1], 0.0), "zero_": (0.0, 0.0)}
        if name.endswith("_"):
            noted[place] = known.get(name)
    return {path: noted.get(_place(value)) for path, value in whole.state_dict().items()}


def _plain(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a matrix, or the weight or bias of a norm or a layer."""
    word = name.rpartition(".")[2]
    return word in ("weight", "bias") and (len(shape) == 1) == (role(name) in ("norm", "bias"))


def _names_in_files(whole: Any, places: dict[str, str], names: list[str], seen: _Seen) -> dict[str, str]:
    """The name under which transformers saves each parameter, by our name; {} is the number of the block in both."""
    from transformers.core_model_loading import revert_weight_conversion

    state = whole.state_dict()
    saved = {id(value): name for name, value in revert_weight_conversion(whole, dict(state)).items()}
    found = {}
    for name in names:
        theirs = saved.get(id(state[_path(name, places)]))
        theirs = theirs or seen.refuse(f"its files store {name} in another form")
        found[name] = theirs.replace(".0.", ".{}.", 1) if name.startswith("layers.") else theirs
    return found


def _path(name: str, places: dict[str, str], layer: int = 0) -> str:
    """The path in transformers' model of our parameter ``name``, in block ``layer``."""
    part, _, rest = name.partition(".")
    return f"{places[part]}.{rest}".format(layer)
