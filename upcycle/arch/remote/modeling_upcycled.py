"""A decoder with mixture-of-experts layers, for models that no architecture of transformers can hold.

A conversion copies this one file into the output folder, and transformers imports it (trust_remote_code=True), so it
needs only torch and transformers. It covers all features of the dense families: four block layouts, four norms, biases,
q/k norms, partial rotary, windows, layers with another rope or without one, soft caps and multipliers. It combines them
with experts of any widths, in any layers, with or without a shared expert. Without `moe_layers` the model is dense.

Shapes: T tokens, D hidden size, N experts, K experts per token.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, attr-defined"
# ruff: noqa: RUF012
# (transformers has no types, and it reads lists and dicts that are plain class attributes)

import copy
from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations.moe import use_experts_implementation
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

# the name that transformers gives the cache of keys and values; 5.24 changed it
CACHE = "cache" if "cache" in MoeModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class UpcycledConfig(PretrainedConfig):
    model_type = "upcycled"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128  # the FFN width of dense layers
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    hidden_act: str = "silu"
    gated: bool = True  # True: act(gate) * up; False: act(up)
    max_position_embeddings: int = 2048
    block: str = "pre"  # pre | post | parallel | sandwich
    norm: str = "rms"  # rms | rms1p | layernorm | layernorm1p (1p: the stored weight is the gain minus one)
    norm_eps: float = 1e-6
    qk_norm: str = "none"  # none | head | full
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None  # full_attention | sliding_attention
    sliding_window: int | None = None
    sliding_rope_parameters: dict[str, Any] | None = None  # for sliding_attention layers, if they differ
    nope_layers: list[int] = field(default_factory=list)  # layers without rotation
    attn_logit_softcapping: float | None = None  # cap * tanh(x / cap) of the scaled q.k
    final_logit_softcapping: float | None = None  # the same for the scaled logits
    attention_dropout: float = 0.0
    attention_multiplier: float | None = None  # multiplies q.k; None means head_dim ** -0.5
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # multiplies the outputs of attention and FFN
    logit_multiplier: float = 1.0
    moe_layers: list[int] = field(default_factory=list)
    expert_widths: list[int] = field(default_factory=list)  # neurons of each routed expert
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    num_experts_per_tok: int = 2
    scoring_func: str = "softmax"  # softmax | sigmoid
    router_order: str = "softmax-then-topk"  # softmax-then-topk | topk-then-softmax
    expert_slices: int = 1  # expert e is in class e % expert_slices; the router chooses equally from each class
    norm_topk_prob: bool = True  # divide the chosen weights by their sum
    routed_scaling_factor: float = 1.0  # multiplies the routed sum
    output_router_logits: bool = False  # also return router logits and the balance loss, and add it to the loss
    router_aux_loss_coef: float = 0.01  # the balance loss sums over MoE layers; a balanced layer adds 1
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.attention_multiplier is None:
            self.attention_multiplier = self.head_dim**-0.5
        self.base_model_tp_plan = self.tensor_parallel_plan()  # type: ignore[misc]  # vLLM may set it
        super().__post_init__(**kwargs)

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts in a layer, under the name that TRL and vLLM read."""
        return len(self.expert_widths)

    @property
    def logit_scale(self) -> float:
        """Return the multiplier of the logits, under the name that vLLM reads."""
        return self.logit_multiplier

    @property
    def moe_intermediate_size(self) -> int:
        """Return the number of neurons in the widest expert, under the name that vLLM reads."""
        return max(self.expert_widths, default=0)

    @property
    def has_stacked_experts(self) -> bool:
        """Return whether fused kernels can compute the experts: gated SiLU, one width, no biases, rows of 16 bytes."""
        sizes = {*self.expert_widths, self.hidden_size}
        gated_silu = self.gated and self.hidden_act == "silu" and not self.mlp_bias
        return gated_silu and len({*self.expert_widths}) == 1 and all(size % 8 == 0 for size in sizes)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return how transformers and vLLM divide each matrix among devices."""
        experts, plan = "layers.*.mlp.experts", dict[str, str]()
        if self.qk_norm != "full":  # this norm needs all heads, so each device computes the whole attention
            plan |= {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
            plan["layers.*.self_attn.o_proj"] = "rowwise"
        ffns = {
            "layers.*.mlp": len(self.moe_layers) < self.num_hidden_layers,
            "layers.*.mlp.shared_experts": self.moe_layers and self.shared_expert_intermediate_size,
            f"{experts}.*": self.moe_layers and not self.has_stacked_experts,
        }
        for ffn in (name for name, present in ffns.items() if present):
            names = {"gate_proj", "up_proj"} if self.gated else {"up_proj"}
            plan |= {f"{ffn}.{name}": "colwise" for name in sorted(names)} | {f"{ffn}.down_proj": "rowwise"}
        if self.moe_layers and self.has_stacked_experts:
            plan |= {f"{experts}.gate_up_proj": "packed_colwise", f"{experts}.down_proj": "rowwise"}
            plan[experts] = "moe_tp_experts"
        return plan

    @property
    def base_model_ep_plan(self) -> dict[str, str]:  # type: ignore[override]
        """Return how transformers divides stacked experts among devices; it is empty for others and before 5.21."""
        if not self.has_stacked_experts or "ep_dispatch_experts" not in ALL_PARALLEL_STYLES:
            return {}
        experts = "layers.*.mlp.experts"
        plan = {f"{experts}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
        return plan | {experts: "ep_dispatch_experts"}


class UpcycledNorm(nn.Module):
    bias: nn.Parameter | None

    def __init__(self, config: UpcycledConfig, size: int, kind: str) -> None:
        super().__init__()
        self.kind, self.eps, self.rounds_last = kind, config.norm_eps, config.block == "post" or kind == "rms1p"
        self.weight = nn.Parameter(torch.empty(size))
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if kind.startswith("layernorm") else None)
        self.reset()

    def reset(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.kind.endswith("1p") else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("layernorm"):
            gain = self.weight + 1.0 if self.kind == "layernorm1p" else self.weight
            return functional.layer_norm(x, self.weight.shape, gain, self.bias, self.eps)
        x_32 = x.float()
        x_32 = x_32 * torch.rsqrt(x_32.square().mean(-1, keepdim=True) + self.eps)
        gain = 1.0 + self.weight.float() if self.kind == "rms1p" else self.weight  # in bf16, 1 + w would lose most of w
        # the order of gain and rounding changes the last bit in bf16: Gemma and OLMo 2 apply the gain first
        return (x_32 * gain).to(x.dtype) if self.rounds_last else x_32.to(x.dtype) * gain


class UpcycledRotaryEmbedding(nn.Module):
    """Angles for every rope_type of transformers, whose base class looks for this name and these buffers."""

    inv_freq: Tensor

    def __init__(self, config: UpcycledConfig, kind: str = "full_attention") -> None:
        """Compute the angles for layers of the type `kind`."""
        super().__init__()
        if kind == "sliding_attention" and config.sliding_rope_parameters is not None:
            config = copy.copy(config)  # because transformers' functions read rope_parameters
            config.rope_parameters = config.sliding_rope_parameters
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = (config.rope_parameters or {})["rope_type"]
        default = self.compute_default_rope_parameters
        start = default if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = start(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: UpcycledConfig, *_: Any, **__: Any) -> tuple[Tensor, float]:
        rope = config.rope_parameters or {}
        size = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotary_embeddings(config: UpcycledConfig) -> nn.ModuleDict:
    """Return a module of angles for each type in config.layer_types."""
    kinds = dict.fromkeys(config.layer_types or [])
    return nn.ModuleDict({kind: UpcycledRotaryEmbedding(config, kind) for kind in kinds})


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] elements of each head and keep the rest (partial rotary)."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    score = capped(query @ key.transpose(2, 3) * scaling, softcap)
    if attention_mask is not None:
        score = score + attention_mask
    weight = functional.softmax(score, dim=-1, dtype=torch.float32).to(query.dtype)
    weight = functional.dropout(weight, p=dropout, training=module.training)
    return (weight @ value).transpose(1, 2).contiguous(), weight


class UpcycledAttention(nn.Module):
    def __init__(self, config: UpcycledConfig, layer_idx: int) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config, self.layer_idx, self.head_dim = config, layer_idx, size
        # attention backends read these three
        self.is_causal, self.num_key_value_groups, self.scaling = True, heads // kv_heads, config.attention_multiplier
        sliding = (config.layer_types or [])[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=config.out_bias)
        if config.qk_norm != "none":
            kind = "rms1p" if config.norm == "rms1p" else "rms"
            full = config.qk_norm == "full"
            self.q_norm = UpcycledNorm(config, heads * size if full else size, kind)
            self.k_norm = UpcycledNorm(config, kv_heads * size if full else size, kind)

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache: Cache | None = kwargs.pop(CACHE, None)
        by_head = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.config.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.view(by_head), k.view(by_head), v.view(by_head)
        if self.config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.layer_idx not in self.config.nope_layers:
            cos, sin = (part.unsqueeze(1) for part in position_embeddings)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        name = self.config._attn_implementation
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        window, softcap = self.sliding_window, self.config.attn_logit_softcapping
        if softcap is not None:
            kwargs["softcap"] = softcap
        # vLLM reads scaling=self.scaling from this source
        y, weight = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, sliding_window=window, **kwargs
        )
        return self.o_proj(y.reshape(*x.shape[:-1], -1).contiguous()), weight


class UpcycledMLP(nn.Module):
    """A dense FFN, an expert or a shared expert."""

    def __init__(self, config: UpcycledConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias) if config.gated else None
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        y: Tensor = self.down_proj(self.act(up) if self.gate_proj is None else self.act(self.gate_proj(x)) * up)
        return y


class UpcycledRouter(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, config: UpcycledConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(len(config.expert_widths), config.hidden_size))
        if config.scoring_func == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.empty(len(config.expert_widths)))
        self.reset()

    def reset(self) -> None:
        nn.init.normal_(self.weight, std=self.config.initializer_range)
        if self.config.scoring_func == "sigmoid":
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logit_TN, weight_TK, expert_TK)."""
        config, sigmoid = self.config, self.config.scoring_func == "sigmoid"
        # At least float32, also under autocast, because bf16 rounds different logits to the same number.
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            logit_TN = functional.linear(x_TD.to(wide), self.weight.to(wide))
        # The correction bias affects the choice of experts but not their weights.
        choice_TN = logit_TN.sigmoid() + self.e_score_correction_bias if sigmoid else logit_TN
        # This sort must be stable, because topk may break ties in any order. The experts of a virtual group share one
        # router row and are neighbours, so "lower index first" takes one whole group before the next. With slices, the
        # router chooses the best copies of each slice: expert e is a copy of slice e % slices.
        slices = config.expert_slices
        choice_TSC = choice_TN.unflatten(1, (-1, slices)).transpose(1, 2)
        best = torch.sort(choice_TSC, dim=-1, descending=True, stable=True).indices
        best = best[..., : config.num_experts_per_tok // slices]
        expert_TK = (best * slices + torch.arange(slices, device=best.device)[:, None]).flatten(1)
        if sigmoid:
            weight_TK = logit_TN.sigmoid().gather(1, expert_TK)
        elif config.router_order == "topk-then-softmax":
            weight_TK = logit_TN.gather(1, expert_TK).softmax(-1)
        else:
            weight_TK = logit_TN.softmax(-1).gather(1, expert_TK)
        if config.norm_topk_prob:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be zero
        return logit_TN, weight_TK * config.routed_scaling_factor, expert_TK


def sum_of_experts(
    run: Callable[[int, Tensor], Tensor], experts: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """Return the weighted sum of run(e, rows) over each token's experts e; numbers from `experts` on add nothing."""
    flat, per_token = expert_TK.flatten(), expert_TK.shape[1]
    count = flat.bincount(minlength=experts)[:experts].tolist()
    order = flat.argsort(stable=True)[: sum(count)]  # the rows of one expert become neighbours
    y_TD = torch.zeros_like(x_TD, dtype=weight_TK.dtype)  # add up in float32 and round once
    for index, rows in enumerate(order.split(count)):
        if len(rows):
            token = rows // per_token
            y_TD = y_TD.index_add(0, token, run(index, x_TD[token]) * weight_TK.flatten()[rows, None])
    return y_TD.to(x_TD.dtype)


@use_experts_implementation
class UpcycledExperts(nn.Module):
    """The routed experts of a layer, stacked, so that transformers and vLLM can run them with their fused kernels."""

    def __init__(self, config: UpcycledConfig) -> None:
        super().__init__()
        self.num_experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        def run(index: int, x_RD: Tensor) -> Tensor:
            gate, up = functional.linear(x_RD, self.gate_up_proj[index]).chunk(2, dim=-1)
            return functional.linear(self.act_fn(gate) * up, self.down_proj[index])

        return sum_of_experts(run, self.num_experts, x_TD, expert_TK, weight_TK)


class UpcycledLooseExperts(nn.Module):
    """Experts that fused kernels refuse or, in vLLM, compute wrongly, because these assume gated SiLU and one width.

    vLLM does not replace a module that is neither a list nor stacked. The weights have the names of the checkpoint.
    """

    def __init__(self, config: UpcycledConfig) -> None:
        super().__init__()
        for index, width in enumerate(config.expert_widths):
            self.add_module(str(index), UpcycledMLP(config, width))

    def forward(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        def run(index: int, x_RD: Tensor) -> Tensor:
            y_RD: Tensor = self.get_submodule(str(index))(x_RD)
            return y_RD

        return sum_of_experts(run, len(self._modules), x_TD, expert_TK, weight_TK)


class UpcycledMoE(nn.Module):
    def __init__(self, config: UpcycledConfig) -> None:
        super().__init__()
        self.gate = UpcycledRouter(config)
        self.experts = (UpcycledExperts if config.has_stacked_experts else UpcycledLooseExperts)(config)
        shared = config.shared_expert_intermediate_size
        self.shared_experts = UpcycledMLP(config, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        _, weight_TK, expert_TK = self.gate(x_TD)
        y: Tensor = self.experts(x_TD, expert_TK, weight_TK).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class UpcycledDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: UpcycledConfig, layer_idx: int) -> None:
        super().__init__()
        self.block, self.residual_multiplier = config.block, config.residual_multiplier
        self.self_attn = UpcycledAttention(config, layer_idx)
        is_moe = layer_idx in config.moe_layers
        self.mlp = UpcycledMoE(config) if is_moe else UpcycledMLP(config, config.intermediate_size)
        self.input_layernorm = UpcycledNorm(config, config.hidden_size, config.norm)
        self.post_attention_layernorm = UpcycledNorm(config, config.hidden_size, config.norm)
        if self.block == "sandwich":
            self.attention_out_layernorm = UpcycledNorm(config, config.hidden_size, config.norm)
            self.mlp_out_layernorm = UpcycledNorm(config, config.hidden_size, config.norm)

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.residual_multiplier == 1.0 else y * self.residual_multiplier

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return the output of the layer; kwargs are the arguments of UpcycledAttention."""
        attn_norm, ffn_norm = self.input_layernorm, self.post_attention_layernorm
        if self.block == "post":
            x = x + self.scaled(attn_norm(self.self_attn(x, **kwargs)[0]))
            return x + self.scaled(ffn_norm(self.mlp(x)))
        if self.block == "sandwich":
            x = x + self.scaled(self.attention_out_layernorm(self.self_attn(attn_norm(x), **kwargs)[0]))
            return x + self.scaled(self.mlp_out_layernorm(self.mlp(ffn_norm(x))))
        attended = self.scaled(self.self_attn(attn_norm(x), **kwargs)[0])
        if self.block == "parallel":
            return self.scaled(self.mlp(ffn_norm(x))) + attended + x
        x = x + attended
        return x + self.scaled(self.mlp(ffn_norm(x)))


def layer_masks(config: UpcycledConfig, x: Tensor, mask: Any, positions: Tensor, cache: Any = None) -> dict[str, Any]:
    """Return a mask for each type in config.layer_types; generate() may have made them already."""
    if isinstance(mask, dict):
        return mask
    make: dict[str, Callable[..., Any]] = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    known = {"inputs_embeds": x, "attention_mask": mask, CACHE: cache, "position_ids": positions}
    return {kind: make[kind](config=config, **known) for kind in dict.fromkeys(config.layer_types or [])}


def balance_loss(config: UpcycledConfig, logits: Any, choices: Any, attention_mask: Any) -> Tensor | None:
    """Return the sum over MoE layers of N * sum(f * P), where a balanced layer adds 1; None without MoE layers.

    f is an expert's share of the choices, and P its mean probability. Neither counts tokens that a mask [batch, token]
    hides.
    """
    if not logits:
        return None
    device = logits[0].device
    seen_T1 = torch.ones_like(logits[0][:, :1])
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        new = len(seen_T1) // len(attention_mask)  # with a cache the mask also covers earlier tokens
        seen_T1 = attention_mask[:, -new:].reshape(-1, 1).to(seen_T1)
    total = torch.zeros((), dtype=seen_T1.dtype, device=device)
    for logit_TN, expert_TK in zip(logits, choices, strict=True):
        logit_TN = functional.logsigmoid(logit_TN) if config.scoring_func == "sigmoid" else logit_TN
        probability_TN = logit_TN.to(device).softmax(-1)
        chosen_TN = torch.zeros_like(probability_TN).scatter_(1, expert_TK.to(device), 1 / expert_TK.shape[1])
        share_N, mean_N = ((each * seen_T1).sum(0) / seen_T1.sum() for each in (chosen_TN, probability_TN))
        total = total + len(share_N) * (share_N * mean_N).sum()
    return total


class UpcycledPreTrainedModel(PreTrainedModel):
    config: UpcycledConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["UpcycledDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": UpcycledDecoderLayer,
        "attentions": UpcycledAttention,
        "router_logits": OutputRecorder(UpcycledRouter, index=0),
        "router_choices": OutputRecorder(UpcycledRouter, index=2),  # with a bias, logits do not determine them
    }

    @property
    def _supports_sdpa(self) -> bool:  # type: ignore[override]
        return self.config.attn_logit_softcapping is None  # SDPA has no soft cap

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, UpcycledNorm | UpcycledRouter):
            module.reset()
        elif isinstance(module, UpcycledExperts):
            nn.init.normal_(module.gate_up_proj, std=self.config.initializer_range)
            nn.init.normal_(module.down_proj, std=self.config.initializer_range)


class UpcycledModel(UpcycledPreTrainedModel):
    def __new__(cls, config: UpcycledConfig, *_: Any, **__: Any) -> "UpcycledModel":
        made: UpcycledModel = super().__new__(UpcycledStackedModel if config.has_stacked_experts else cls)
        return made

    def __init__(self, config: UpcycledConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(UpcycledDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = UpcycledNorm(config, config.hidden_size, config.norm)
        self.rotary_emb = rotary_embeddings(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        cache = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("the model got both or neither of input_ids and inputs_embeds; give exactly one")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.embedding_multiplier != 1.0:  # rounded to the model's dtype, as in Gemma's training
            x = x * float(torch.tensor(self.config.embedding_multiplier).to(x.dtype))
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device).unsqueeze(0)
        masks = layer_masks(self.config, x, attention_mask, position_ids, cache)
        angles = {kind: rotary(x, position_ids) for kind, rotary in self.rotary_emb.items()}
        for layer, kind in zip(self.layers, self.config.layer_types or [], strict=True):
            kwargs |= {"attention_mask": masks[kind], "position_embeddings": angles[kind]}
            x = layer(x, **{CACHE: cache}, **kwargs)
        held: dict[str, Any] = {CACHE: cache}
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x), **held)


class UpcycledStackedModel(UpcycledModel):
    """A model with UpcycledExperts: when transformers or peft load weights, they stack the matrices of the experts."""


register_checkpoint_conversion_mapping(
    UpcycledStackedModel.__name__, get_checkpoint_conversion_mapping("qwen2_moe"), overwrite=True
)


class UpcycledForCausalLM(UpcycledPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: UpcycledConfig) -> None:
        super().__init__(config)
        self.model = UpcycledModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Drop the cache when longrope passes its original context, because all keys then rotate by other angles."""
        rope, past = self.config.rope_parameters or {}, kwargs.get(CACHE)
        original = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else input_ids.shape[1]
        if past is not None and past.get_seq_length() <= original < input_ids.shape[1]:
            # drop the cache and, if the caller says how many tokens are new, that too: all of them are new
            kwargs |= dict.fromkeys(kwargs.keys() & {CACHE, "next_sequence_length"})
        return super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        routers = self.config.output_router_logits if output_router_logits is None else output_router_logits
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=past_key_values if cache is None else cache,
            output_router_logits=routers,
            output_router_choices=routers,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept, :])
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        logits = capped(logits, self.config.final_logit_softcapping)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        aux_loss = None
        if routers:
            aux_loss = balance_loss(self.config, out.router_logits, out.router_choices, attention_mask)
        if loss is not None and aux_loss is not None:
            loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            **{CACHE: out.get(CACHE)},
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            router_logits=out.router_logits,
        )
