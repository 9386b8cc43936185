"""Any other architecture of transformers: its own modelling code, with our MoE blocks instead of its MoE blocks.

    model = Stock(spec).to_empty(device=device)

transformers computes what our decoder cannot (linear attention, state spaces, convolutions); router, dispatch, experts
and balance are ours. This model is slower than the decoder and stores all logits of a micro-batch. probe.py reads the
settings of the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from training.experts import DEFAULT, Backend, backend
from training.model.decoder import Decoder
from training.model.loss import Lesson
from training.model.moe import MoE
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.io.strict import short

LAYER = re.compile(r"(.*\.)?layers\.([0-9]+)\.")
STACKED = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})  # parameter names of experts that we can read


def dense_of(spec: DenseSpec | MoESpec) -> DenseSpec:
    return spec.dense if isinstance(spec, MoESpec) else spec


def with_dense(spec: DenseSpec | MoESpec, **changes: Any) -> DenseSpec | MoESpec:
    """Return the spec with changes to its dense part."""
    return (
        replace(spec, dense=replace(spec.dense, **changes)) if isinstance(spec, MoESpec) else replace(spec, **changes)
    )


def model_of(
    spec: DenseSpec | MoESpec,
    *,
    part: range | None = None,
    experts: str = DEFAULT,
    compute: torch.dtype = torch.float32,
) -> Decoder:
    """Return our own decoder, or transformers' model if our decoder does not know the architecture."""
    if dense_of(spec).carried is not None:
        return Stock(spec, experts=experts, compute=compute)
    return Decoder(spec, part=part, experts=experts, compute=compute)


# ---- transformers' model


def known(model_type: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def on_meta(config: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config.json on the meta device, built only from transformers' own classes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = str(config.get("model_type"))
    for key in ("text_config", "quantization_config"):
        if config.get(key) is not None:
            raise ValueError(
                f"config.json of this {short(model_type)} model has {key!r}, and training needs a plain language model "
                "with weights that are not quantized; give the language model alone, dequantized"
            )
    if not known(model_type):
        raise ValueError(f"transformers has no language model of model_type {short(model_type)}")
    own = {key: plain(value) for key, value in config.items() if key not in ("model_type", "auto_map")}
    try:
        with torch.device("meta"):
            settings = AutoConfig.for_model(model_type, **own)
            settings.output_router_logits = settings.use_cache = False
            count = int(getattr(settings, "num_hidden_layers", 0))
            if not 1 <= count <= 1024:
                raise ValueError(f"num_hidden_layers is {count}; it must be 1 to 1024")
            if getattr(settings, "is_decoder", True) is False or settings.is_encoder_decoder:
                raise ValueError("it is not a decoder-only model, in which tokens see only the tokens before them")
            return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # a stranger's config.json can raise anything in transformers' code
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"transformers cannot build a {short(model_type)} model from this config.json ({said:.200})"
        ) from error


def plain(value: Any) -> Any:
    """Return a value of a config.json with floats for the objects that transformers writes for infinity."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: plain(v) for k, v in value.items()}
    return value


@dataclass(frozen=True)
class Block:
    """The names of the parts of a stock MoE block."""

    experts: str
    weight: str  # the router's weight, [experts, hidden]
    bias: str  # added to the scores only to choose experts, and not trained by gradients; "": none
    shared: tuple[str, ...]  # children that compute every token
    gate: str  # a child with one output; its sigmoid multiplies the sum of the shared children; "": none

    @property
    def roles(self) -> dict[str, str]:
        """Return our names of the router's weight and bias, by their names in the stock block."""
        return {self.weight: "router.weight"} | ({self.bias: "router.bias"} if self.bias else {})


def blocks(stock: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each block that holds stacked experts."""
    for name, module in list(stock.named_modules()):
        if any({n for n, p in module.named_parameters(recurse=False) if p.ndim == 3} == names for names in STACKED):
            parent = name.rpartition(".")[0]
            yield parent, stock.get_submodule(parent)


def parts(name: str, block: nn.Module) -> Block:
    """Return the names of a stock block's parts; raise a ValueError if it has other parts."""
    found = [n for n, child in block.named_children() if "down_proj" in dict(child.named_parameters(recurse=False))]
    stacked = [n for n in found if block.get_submodule(n).get_parameter("down_proj").ndim == 3]
    if len(stacked) != 1:
        raise ValueError(f"{name} has {len(stacked)} sets of experts")
    down = block.get_submodule(stacked[0]).get_parameter("down_proj")
    experts, hidden = down.shape[0], down.shape[1]
    shared, gate, weights, biases = list[str](), "", list[str](), list[str]()
    for child_name, child in block.named_children():
        own = {f"{child_name}.{n}": t for n, t in [*child.named_parameters(), *child.named_buffers()]}
        if child_name == stacked[0] or not own:
            continue
        if all(tensor.shape in ((experts, hidden), (experts,), (1, experts)) for tensor in own.values()):
            weights += [n for n, tensor in own.items() if tensor.ndim == 2 and tensor.shape[0] == experts]
            biases += [n for n, tensor in own.items() if n not in weights]
        elif [tuple(tensor.shape) for tensor in own.values()] == [(1, hidden)] and not gate:
            gate = child_name
        else:
            shared.append(child_name)
    direct = {**dict(block.named_parameters(recurse=False)), **dict(block.named_buffers(recurse=False))}
    biases += [n for n, tensor in direct.items() if tensor.numel() == experts]
    strangers = [n for n, tensor in direct.items() if tensor.numel() != experts]
    if len(weights) != 1 or len(biases) > 1 or strangers:
        raise ValueError(
            f"{name} has {len(weights)} routers and {len(biases)} router biases"
            + (f", and also {strangers[0]}" if strangers else "")
        )
    return Block(stacked[0], weights[0], "".join(biases), tuple(shared), gate)


# ---- ours


class StockMoE(MoE):
    """Compute our MoE block plus transformers' own shared experts, which keep their names."""

    def __init__(self, spec: MoESpec, experts: Backend, found: Block, stock: nn.Module) -> None:
        super().__init__(spec, experts)
        self.found = found
        self.router.register_buffer("bias", torch.zeros(spec.experts) if found.bias else None)
        for name in (*found.shared, *filter(None, [found.gate])):
            self.add_module(name, stock.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.reshape(1, -1, x.shape[-1])).view_as(x)
        if not self.found.shared:
            return y
        beside: Tensor = sum(self.get_submodule(name)(x) for name in self.found.shared)
        return y + (beside * self.get_submodule(self.found.gate)(x).sigmoid() if self.found.gate else beside)


class Tied(nn.Module):
    """Compute the output head with the weight of the embedding, which owns it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table: tuple[Any] = (table,)  # a tuple, so that it is not a child: the parameter keeps one name

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.table[0].weight)


class Place(nn.Module):
    """Wrap an FFN so that it can be read like a layer of the decoder."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn


class Stock(Decoder):
    """Train transformers' model through the interface of a Decoder.

    Parameters keep transformers' names, except `router` and `experts` of the blocks. The model is created on the meta
    device and stays in eval mode: nothing is dropped out."""

    stock: Any
    casts: bool  # each forward casts parameters to `compute`; replaced by shard, because FSDP casts what it gathers

    def __init__(
        self, spec: DenseSpec | MoESpec, *, experts: str = DEFAULT, compute: torch.dtype = torch.float32
    ) -> None:
        nn.Module.__init__(self)
        self.moe = spec if isinstance(spec, MoESpec) else None
        self.dense = dense_of(spec)
        self.compute, self.casts, self.first, self.last = compute, True, True, True
        assert self.dense.carried is not None
        stock = on_meta(self.dense.carried.config).eval()
        chosen = None if self.moe is None else backend(experts)
        places: dict[str, nn.Module] = {}
        for name, block in blocks(stock):
            assert self.moe is not None and chosen is not None
            with torch.device("meta"):
                ours = StockMoE(self.moe, chosen, parts(name, block), block)
            stock.set_submodule(name, ours)
            places[layer_of(name)] = Place(ours)
        if self.dense.tied:
            head = next(n for n, module in stock.named_modules() if module is stock.get_output_embeddings())
            stock.set_submodule(head, Tied(stock.get_input_embeddings()))
        vars(self)["stock"], vars(self)["layers"] = stock, nn.ModuleDict(places)  # not as children, so that names stay
        for name, child in stock.named_children():
            self.add_module(name, child)
        self.exact_words = tuple(getattr(stock, "_keep_in_fp32_modules_strict", None) or ())

    def stock_layers(self) -> Iterator[nn.Module]:
        """Yield transformers' decoder layers."""
        for name, module in self.stock.named_modules():
            if (found := LAYER.match(f"{name}.")) and found.end() == len(name) + 1:
                yield module

    def train(self, mode: bool = True) -> Stock:
        super().train(False)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> Stock:
        """Allocate the parameters, and fill the buffers that no checkpoint holds as transformers does."""
        super().to_empty(device=device, recurse=recurse)
        for tensor in self.parameters():
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it as it is
        for name, module in self.stock.named_modules():
            own = [getattr(module, each) for each in module._non_persistent_buffers_set]
            made = [buffer for buffer in own if isinstance(buffer, Tensor)]
            with torch.no_grad():
                for buffer in made:
                    buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
                if made:
                    self.stock._init_weights(module)
            if any(buffer.is_floating_point() and not buffer.isfinite().all() for buffer in made):
                raise ValueError(f"transformers does not say how to fill the buffers of {name}; train another model")
        return self

    def exact(self, name: str) -> bool:
        """Return whether computations use a parameter in float32, whatever the dtype of activations is."""
        words = name.split(".")
        return "router" in words or any(word in words for word in self.exact_words)

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers by name."""
        fleeting = {
            f"{name}.{each}".removeprefix(".")
            for name, module in self.named_modules()
            for each in module._non_persistent_buffers_set
        }
        return {n: t for n, t in [*self.named_parameters(), *self.named_buffers()] if n not in fleeting}

    def forward(
        self,
        x: Tensor,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        length: int | None = None,
        lesson: Lesson | None = None,
    ) -> Tensor:
        """Return the loss of the labels, or the logits without labels; positions count from 0 across documents."""
        assert documents_BS is None and lesson is None, "check_stock"
        logits = self.logits(x)
        if labels_BS is None:
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        label_T = labels_BS.flatten().where(labels_BS.flatten() >= 0, -100)
        return functional.cross_entropy(logits.flatten(0, 1).to(wide), label_T, ignore_index=-100, reduction="sum")

    def logits(self, tokens_BS: Tensor) -> Tensor:
        inputs = {"input_ids": tokens_BS, "use_cache": False}
        cast = {
            name: parameter.to(self.compute)
            for name, parameter in (self.named_parameters() if self.casts else ())
            if parameter.dtype != self.compute and ".experts." not in name and not self.exact(name)
        }  # experts cast their own weights
        found = functional_call(self.stock, cast, kwargs=inputs) if cast else self.stock(**inputs)
        logits: Tensor = found.logits
        return logits


def layer_of(name: str) -> str:
    found = LAYER.match(name + ".")
    if not found:
        raise ValueError(f"{name} is not in a layer")
    return found[2]
