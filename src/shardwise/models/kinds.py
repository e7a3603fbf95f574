"""A record for each kind of part of a model's blocks: attention, latent attention, gated delta nets, positions,
experts. No torch.

Fields have the names that Hugging Face gives them where it has one, and no two records share a name: a family says them
without saying whose they are (:func:`shardwise.models.config.model_spec`). Each has a default that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.models.rope import RopeScaling


@dataclass(frozen=True)
class AttentionSpec:
    """Heads of queries, which share those of keys and values, and what a query sees.

    attention_output_bias: of o, where it differs from q, k and v. qk_norm: of queries and keys, over each head or over
    the whole projection. attention_scale: of scores, None for 1 / sqrt(head_dim). attention_sinks: a logit of each head
    that takes part in its softmax. attention_gate: what heads make is multiplied by the sigmoid of a product of its
    own. sliding_window: positions that a query of a sliding layer sees, its own included;
    all layers slide unless ``layer_types`` says which; it may also name another mixer than ``mixer`` for some layers
    (models/mixers.py). mixer_options: what a mixer of an installed package reads, by name.
    """

    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 2
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    qk_norm: Literal["head", "projection"] | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    mixer: str = "softmax"
    mixer_options: tuple[tuple[str, float], ...] = ()

    @property
    def output_bias(self) -> bool:
        """Return whether o has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias


@dataclass(frozen=True)
class PositionSpec:
    """The rotation through which positions enter: pairs of a head's elements are rotated.

    local_rope_theta: that of sliding layers, which are then not stretched. nope_layers: those without rotation.
    partial_rotary_factor: the share of a head that is rotated.
    """

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    nope_layers: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention, where the mixer is ``latent``: a head has ``qk_nope_head_dim`` elements and then
    ``qk_rope_head_dim``, which are rotated (rope_interleave: neighbours are pairs), and its values ``v_head_dim``. Keys
    and values are made of a vector of ``kv_lora_rank`` for each token, queries of one of ``q_lora_rank``; None: of the
    token itself. num_key_value_heads is the number of heads, head_dim what a head has in all.
    """

    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = True


@dataclass(frozen=True)
class DeltaSpec:
    """Gated delta nets, the mixer ``linear_attention``: heads of values ``linear_value_head_dim`` wide share those of
    queries and keys, ``linear_key_head_dim`` wide. Each channel of the three is the sum of ``linear_conv_kernel_dim``
    tokens, its own the last."""

    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 1
    linear_key_head_dim: int = 1
    linear_value_head_dim: int = 1
    linear_conv_kernel_dim: int = 4


@dataclass(frozen=True)
class GroupedRouting:
    """The way in which a router chooses within groups of experts: those with the largest scores, of the ``kept_groups``
    of ``groups`` whose best is the largest (DeepSeek-V2, arXiv 2405.04434). Their weights are the scores, times
    ``scale``."""

    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class SigmoidRouting(GroupedRouting):
    """The way in which a router chooses by sigmoids (DeepSeek-V3, arXiv 2412.19437): the experts with the largest
    sums of score and a correction that no gradient reaches, of the groups whose two best are the largest together.
    Their weights are the scores without it. ``bias_rate``: by how much a step raises the correction of an expert with
    fewer tokens than the mean, and lowers that of one with more (arXiv 2408.15664)."""

    bias_rate: float = 0.0


@dataclass(frozen=True)
class ExpertSpec:
    """Experts in the place of the MLP of each layer but the ``dense_layers``; false where there are none.

    num_experts: of a layer, each ``expert_size`` wide, of which a token goes to ``experts_per_token``;
    normalised_top_k: their weights add up to one. shared_expert_size: width of an MLP for all tokens beside them,
    shared_expert_gate: multiplied by the sigmoid of a product of its own. router_aux_loss_coef: of the loss that
    balances experts, router_z_loss_coef: of that which keeps a router's logits small (models/router_losses.py);
    output_router_logits: whether the first is added, as transformers names it. expert_capacity: how many times its even
    share of a row an expert takes at most in training; None: all of it. sigmoid: of a router that chooses by sigmoids;
    None: by a softmax. softmax_groups: of one that does so within groups, or scales weights.
    """

    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    normalised_top_k: bool = True
    shared_expert_size: int = 0
    shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    output_router_logits: bool = True
    expert_capacity: float | None = None
    sigmoid: SigmoidRouting | None = None
    softmax_groups: GroupedRouting | None = None

    def __bool__(self) -> bool:
        return self.num_experts > 0

    @property
    def router_losses(self) -> tuple[float, float]:
        """Return what the two losses of routers are multiplied by: that which balances experts, and the z-loss."""
        return self.router_aux_loss_coef if self.output_router_logits else 0.0, self.router_z_loss_coef
