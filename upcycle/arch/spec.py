"""Describe a model's architecture by numbers and names (DenseSpec, MoESpec), and give the shape of each tensor.

A family reads a config.json into a DenseSpec, and a target writes an MoESpec as a config.json. The code in between
knows neither families nor targets, so F families and T targets need F + T files, not F * T.

Tensors have neutral names, called roles:

    embed.weight  final_norm.{weight,bias}  head.weight
    layers.L.{attn_norm,ffn_norm}.{weight,bias}        L counts from 0
    layers.L.{attn_out_norm,ffn_out_norm}.{weight,bias}   only in block "sandwich"
    layers.L.{q,k,v,o}.{weight,bias}  layers.L.{q_norm,k_norm}.weight
    layers.L.{q_a,q_a_norm,q_b,kv_a,kv_a_norm,kv_b}.weight   only with Latent, instead of q, k, v; q_a may be absent
    layers.L.{gate,up,down}.{weight,bias}              only in dense layers; gate only if gated
    layers.L.router.{weight,bias}                      bias: zeros, for the choice only (sigmoid routers)
    layers.L.router.offset  layers.L.sinks.weight      offset: added to the router's logits; see DenseSpec.sinks
    layers.L.experts.I.{gate,up,down}.{weight,bias}
    layers.L.shared.{gate,up,down}.{weight,bias}  layers.L.shared_gate.weight
    carried.NAME                                       a tensor that keeps the NAME it has on disk (siblings.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

# gated: down(act(gate(x)) * up(x)); not gated: down(act(up(x))).  gelu is exact (erf); relu2 is relu squared.
# clamped_swiglu: always gated, and clamps both gate and up; see ffn.gated_product.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
# 1p: the stored weight is the gain minus one. Every norm is computed in float32. In a lower dtype the last bit depends
# on the order: rms in block "pre" rounds and then multiplies by the gain; rms1p, and rms in block "post", multiply
# first.
Norm = Literal["rms", "rms1p", "layernorm", "layernorm1p"]
# pre: x += attn(norm(x)); x += ffn(norm(x)).  post: x += norm(attn(x)); x += norm(ffn(x)) (OLMo 2).
# parallel: x += attn(attn_norm(x)) + ffn(ffn_norm(x)), both from the same x, each with its own norm (GPT-NeoX).
# sandwich: x += out_norm(attn(norm(x))); x += out_norm(ffn(norm(x))), four norms a layer (Gemma 2 and 3).
Block = Literal["pre", "post", "parallel", "sandwich"]
# An rms norm on q and on k, with norm_eps, after the projection (with its bias) and before the rotation. head: over
# each head, with one weight for all heads (Qwen 3). full: over all heads at once (OLMo 2).
QKNorm = Literal["none", "head", "full"]
Score = Literal["softmax", "sigmoid"]
Order = Literal["softmax-then-topk", "topk-then-softmax"]
Choice = Literal["any", "each-slice"]

SCORES: tuple[Score, ...] = get_args(Score)
ORDERS: tuple[Order, ...] = get_args(Order)
MAX_EXPERTS = 16384  # in a layer; a higher number is a typing error, and its plan would fill the memory
MAX_EXPERTS_IN_ALL = 1 << 18  # in all layers together
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Carried:
    """All of a model except its FFNs; it is copied by name (siblings.py)."""

    config: Mapping[str, Any]  # the whole config.json
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # name -> shape, dtype
    prefix: str = "model."  # how the names of the decoder's tensors begin

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape, _ in self.tensors.values())

    @property
    def matrix_weights(self) -> int:
        """Return the number of weights in the matrices of the decoder's layers."""
        layers = f"{self.prefix}layers."
        return sum(prod(s) for name, (s, _) in self.tensors.items() if len(s) == 2 and name.startswith(layers))

    @property
    def attention_layers(self) -> int:
        layers = f"{self.prefix}layers."
        found = {name.removeprefix(layers).split(".")[0] for name in self.tensors if ".self_attn." in name}
        return sum(number.isdecimal() for number in found)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V3): queries, keys and values are made from narrow vectors with norms.

    kv_a makes the latent vector of keys and values, and also one part of the keys that all heads share. Only this part
    is rotated. kv_b makes each head's own part of the keys, and its values. The queries and keys of a head are its own
    part followed by the rotated part.
    """

    q_rank: int  # size of the queries' latent; 0: q_b reads the hidden states, and there is no q_a
    kv_rank: int
    rope: int  # number of rotated dimensions, the last ones of head_dim
    value: int  # size of a head's values
    norm_eps: float = 1e-6  # epsilon of the norms of the two latents
    pairs: bool = True  # in the stored weights dimension 2i rotates with 2i + 1; False: i with i + rope / 2


@dataclass(frozen=True)
class DenseSpec:
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    activation: Activation = "silu"
    gated: bool = True
    norm: Norm = "rms"
    norm_eps: float = 1e-5  # the same for every norm
    block: Block = "pre"
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False  # on q, k and v
    out_bias: bool = False
    ffn_bias: bool = False  # on gate (if gated), up and down
    # rope_parameters as transformers 5 stores them: rope_theta, rope_type (default, linear, dynamic, yarn, longrope or
    # llama3), factor and so on. yarn, longrope and llama3 always have original_max_position_embeddings. The share p of
    # each head that is rotated, partial_rotary_factor, is there only if p is not 1. The first n = int(head_dim * p)
    # dimensions of a head rotate, i with i + n/2 (not i with i + 1), with the frequencies of a head that has n
    # dimensions. The factor of a longrope is context / original_max_position_embeddings unless it is stated.
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tied: bool = False
    # In window_layers a token sees itself and the window - 1 tokens before it; in other layers it sees all tokens
    # before it.
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    # The rope of window_layers, in the form of `rope`, if it differs from `rope` (Gemma 3, OLMo 3). Its type is neither
    # dynamic nor longrope, because their frequencies depend on the length. None: all layers have `rope`.
    window_rope: Mapping[str, Any] | None = None
    nope_layers: tuple[int, ...] = ()  # layers without rotation, which know no positions (SmolLM 3)
    # Soft caps, after every scale: x becomes cap * tanh(x / cap); 0 means no cap. They apply to q.k before the mask,
    # and
    # to the logits (Gemma 2).
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    attention_scale: float = 0.0  # multiplies q.k; 0 means head_dim ** -0.5
    # Multiplies the embeddings, not a tied head (Gemma, Granite). Gemma rounds it to the weights' dtype first; Granite
    # does not, but its values are whole numbers in practice.
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies the outputs of attention and FFN, not the residual stream (Granite)
    logit_scale: float = 1.0  # multiplies the logits (Granite: 1 / logits_scaling)
    # each head has one more logit next to the logits of its keys; it takes a share of the softmax and adds no value
    sinks: bool = False
    latent: Latent | None = None  # None: plain queries, keys and values; with a Latent, kv_heads equals heads
    dtype: str = "bfloat16"  # read from config.json; plan.build replaces it by the dtype of the files
    tokens: Mapping[str, Any] = field(default_factory=dict)  # bos_, eos_ and pad_token_id; None: no such token
    init_std: float = 0.02
    # Not None: the spec knows only the FFNs, and the sizes above for counting; all else is copied by name.
    carried: Carried | None = None

    def __post_init__(self) -> None:
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    def check(self) -> None:
        """Raise a ValueError if sizes contradict each other; families.common.Family.read calls this."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"config.json has {self.heads} heads and {self.kv_heads} key/value heads; "
                "the second must divide the first"
            )

    @property
    def partial_rotary(self) -> float:
        return float(self.rope.get("partial_rotary_factor", 1.0))

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence that the positions support, with the stretching of the rope."""
        first = self.rope.get("original_max_position_embeddings") or self.context
        return max(self.context, int(first * (self.rope.get("factor") or 1)))

    @property
    def rotary_dim(self) -> int:
        """Return the number of dimensions of a head to which the share partial_rotary refers."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value

    def rope_of(self, layer: int) -> Mapping[str, Any] | None:
        """Return the rope of a layer, the same object for all layers that share it; None: the layer does not rotate."""
        if layer in self.nope_layers:
            return None
        return self.window_rope if self.window_rope is not None and layer in self.window_layers else self.rope

    @property
    def norm_has_bias(self) -> bool:
        return self.norm.startswith("layernorm")

    @property
    def ffn_matrices(self) -> tuple[str, ...]:
        """Return the names of the matrices of this model's FFN, as ffn.FFN uses them."""
        names = ("gate", "up", "down") if self.gated else ("up", "down")
        return names + tuple(f"{n}_bias" for n in names) if self.ffn_bias else names

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's tensors except its FFN, by role without 'layers.L.'."""
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        norms = ("attn_norm", "ffn_norm") + (("attn_out_norm", "ffn_out_norm") if self.block == "sandwich" else ())
        kinds = ("weight", "bias") if self.norm_has_bias else ("weight",)
        shapes: dict[str, tuple[int, ...]] = {f"{norm}.{kind}": (d,) for kind in kinds for norm in norms}
        if self.latent is not None:
            return shapes | self.latent_shapes(self.latent)
        shapes |= {"q.weight": (q, d), "k.weight": (kv, d), "v.weight": (kv, d), "o.weight": (d, q)}
        if self.qkv_bias:
            shapes |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
        if self.out_bias:
            shapes |= {"o.bias": (d,)}
        if self.sinks:
            shapes |= {"sinks.weight": (self.heads,)}
        if self.qk_norm == "head":
            shapes |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        elif self.qk_norm == "full":
            shapes |= {"q_norm.weight": (q,), "k_norm.weight": (kv,)}
        return shapes

    def latent_shapes(self, latent: Latent) -> dict[str, tuple[int, ...]]:
        rank, d, heads = latent.kv_rank, self.hidden, self.heads
        queries = {"q_a.weight": (latent.q_rank, d), "q_a_norm.weight": (latent.q_rank,)} if latent.q_rank else {}
        return {
            **queries,
            "q_b.weight": (heads * self.head_dim, latent.q_rank or d),
            "kv_a.weight": (rank + latent.rope, d),
            "kv_a_norm.weight": (rank,),
            "kv_b.weight": (heads * (self.head_dim - latent.rope + latent.value), rank),
            "o.weight": (d, heads * latent.value),
        }

    def ffn_shapes(self, width: int | None = None) -> dict[str, tuple[int, ...]]:
        f, d = self.ffn if width is None else width, self.hidden
        shapes: dict[str, tuple[int, ...]] = {"gate.weight": (f, d)} if self.gated else {}
        shapes |= {"up.weight": (f, d), "down.weight": (d, f)}
        if self.ffn_bias:
            shapes |= ({"gate.bias": (f,)} if self.gated else {}) | {"up.bias": (f,), "down.bias": (d,)}
        return shapes

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, self.hidden)}
        shapes["final_norm.weight"] = (self.hidden,)
        if self.norm_has_bias:
            shapes["final_norm.bias"] = (self.hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab, self.hidden)
        return shapes

    def roles(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the role and shape of every dense tensor."""
        rest = self.global_shapes() if self.carried is None else {}
        if self.carried is not None:
            rest = {f"carried.{name}": shape for name, (shape, _) in self.carried.tensors.items()}
        yield from rest.items()
        for layer in range(self.layers):
            attention = self.attention_shapes() if self.carried is None else {}
            for role, shape in (attention | self.ffn_shapes()).items():
                yield f"layers.{layer}.{role}", shape


@dataclass(frozen=True)
class MoESpec:
    """A dense model with some of its FFNs replaced by routed (and shared) experts."""

    dense: DenseSpec
    layers: tuple[int, ...]  # the layers that are MoE
    widths: tuple[int, ...]  # neurons of each routed expert
    top_k: int
    copies: int  # E: how often each dense neuron is copied
    granularity: int = 1  # G: the number of experts that one copy is cut into
    shared: int = 0  # neurons of the shared expert
    shared_gate: bool = False  # sigmoid(shared_gate x) multiplies the shared expert's output; only in Qwen2-MoE
    score: Score = "softmax"
    order: Order = "softmax-then-topk"
    # any: choose the best top_k of all experts | each-slice: choose the best top_k / granularity copies of each slice
    choice: Choice = "any"
    # Experts form `groups` equal groups of neighbours, and only the group_top_k best groups are considered. The score
    # of a group is the sum of its best two experts' scores (DeepSeek-V3).
    groups: int = 1
    group_top_k: int = 1
    router_offset: bool = False  # the router's logits have a bias, which is trained like the router's rows
    normalize: bool = True  # the chosen experts' weights are divided by their sum
    output_scale: float = 1.0  # multiplies the sum of the routed experts inside the model (routed_scaling_factor)
    dtype: str = "bfloat16"
    disjoint: bool = False  # no neuron is in two experts: the experts are parts of one FFN, not copies
    equal: bool = True  # the copies begin equal; False: the method makes them differ on purpose
    # Neurons of zeros at the end of each routed expert and of the shared expert. They change no output; `widths` and
    # `shared` count them. They make each row a multiple of 16 bytes, as grouped kernels require.
    padding: int = 0
    shared_padding: int = 0
    # Name and copies of each part, in the order of the copies. Copy 0 is then the anchor: the dense FFN, whose router
    # rows are zero, and which never learns. (): the model has none.
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def cut_widths(self) -> tuple[int, ...]:
        """Return the number of neurons in each routed expert that come from the dense FFN."""
        return tuple(width - self.padding for width in self.widths) if self.padding else self.widths

    @property
    def cut_shared(self) -> int:
        return self.shared - self.shared_padding

    @property
    def experts(self) -> int:
        return len(self.widths)

    @property
    def anchors(self) -> int:
        """Return the number of experts that are the anchor's slices and never learn; they come first."""
        return self.granularity if self.parts else 0

    @property
    def copies_of_slices(self) -> bool:
        """Return True if expert e * G + g is slice g of copy e, so that top-k may choose parts of a copy."""
        return self.granularity > 1 and self.copies > 1

    @property
    def uniform(self) -> bool:
        return len(set(self.widths)) == 1

    @property
    def width(self) -> int:
        assert self.uniform
        return self.widths[0]

    @property
    def slices(self) -> int:
        """Return the number of classes of experts (e % slices); the router chooses equally from each class."""
        return self.granularity if self.choice == "each-slice" else 1

    @property
    def choosable(self) -> int:
        """Return the number of experts from which a token may choose."""
        return self.experts // self.groups * self.group_top_k

    @property
    def weights_sum_to_one(self) -> bool:
        """Return True if the chosen experts' weights add up to 1 for any values of the router."""
        return self.normalize or (self.score == "softmax" and self.order == "topk-then-softmax")

    @property
    def all_layers(self) -> bool:
        return self.layers == tuple(range(self.dense.layers))

    @property
    def first_dense(self) -> int | None:
        """Return k if the MoE layers are exactly the layers from k to the last, else None."""
        k = self.dense.layers - len(self.layers)
        return k if self.layers == tuple(range(k, self.dense.layers)) else None

    def shape(self, role: str) -> tuple[int, ...]:
        """Return the shape of a role, dense or MoE."""
        d, hidden = self.dense, self.dense.hidden
        path = role.split(".")
        if path[0] != "layers":
            return d.global_shapes()[role] if role != "head.weight" else (d.vocab, hidden)
        part, kind = path[2], path[-1]
        if part == "router":
            return (self.experts, hidden) if kind == "weight" else (self.experts,)
        if part == "shared_gate":
            return (1, hidden)
        if path[-2] in ("gate", "up", "down"):
            width = self.widths[int(path[3])] if part == "experts" else self.shared if part == "shared" else d.ffn
            rows, columns = (hidden, width) if path[-2] == "down" else (width, hidden)
            return (rows,) if kind == "bias" else (rows, columns)
        if part in ("q", "k", "v") and kind == "bias":
            return ((d.heads if part == "q" else d.kv_heads) * d.head_dim,)
        return (hidden,) if kind == "bias" else d.attention_shapes()[".".join(path[2:])]
