"""Read folders of architectures that our decoder does not have: their spec and their tensors.

Tensors keep their names on disk, with experts one by one or stacked, by transformers' own table of names. An export
writes the same names again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from torch import nn

from training.model.stock import model as modelling
from training.model.stock.model import Block, parts
from training.model.stock.probe import read_blocks
from upcycle.arch.spec import BYTES, Carried, DenseSpec, MoESpec
from upcycle.io.strict import short

Entries = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype
Roles = tuple[str, ...]


Found = tuple[str, tuple[int, ...], str, Roles]  # name, shape and dtype of a tensor, and the roles stacked in it


def read(config: Mapping[str, Any], entries: Entries) -> tuple[DenseSpec | MoESpec, tuple[Found, ...]]:
    """Return the spec and tensors of such a folder; raise a ValueError if it cannot be trained."""
    model_type = short(str(config.get("model_type")))
    stock = modelling.on_meta(config)
    try:
        dense = numbers(stock, config)
        spec = read_blocks(stock, dense)
        found = tuple(placed(stock, dense.tied, entries))
    except (ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{model_type} runs in transformers' own code, where this model cannot be trained: "
            f"{' '.join(said.split()):.300}; train it with other tools, or start from another model"
        ) from error
    # weights per token outside of routed experts and routers
    blocks = re.compile(r"\.(experts|router)\.")
    weighed = {n: (shape, dtype) for n, shape, dtype, held in found if not any(map(blocks.search, held))}
    dense = modelling.dense_of(spec)
    own = Carried(config, weighed, dense.carried.prefix if dense.carried else "model.")
    return modelling.with_dense(spec, carried=own), found


def numbers(stock: Any, config: Mapping[str, Any]) -> DenseSpec:
    """Return the sizes for counting and checks; everything else stays in transformers."""
    settings = stock.config
    heads = int(getattr(settings, "num_attention_heads", None) or 1)
    hidden, table = int(settings.hidden_size), stock.get_input_embeddings()
    head = stock.get_output_embeddings()
    groups: dict[int, list[str]] = {}
    for name, parameter in stock.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    shared = [names for names in groups.values() if len(names) > 1]
    tied = head is not None and head.weight is table.weight
    if head is None or len(shared) > tied or (tied and getattr(head, "bias", None) is not None):
        said = f"{shared[-1][0]} and {shared[-1][1]} are one parameter" if shared else "it has no head"
        raise ValueError(said)
    stated = str(config.get("dtype", config.get("torch_dtype")))
    prefix = next((m[1] or "" for n, _ in stock.named_modules() if (m := modelling.LAYER.match(n + "."))), "model.")
    return DenseSpec(
        family=str(settings.model_type),
        layers=int(settings.num_hidden_layers),
        hidden=hidden,
        ffn=0,
        heads=heads,
        kv_heads=int(getattr(settings, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(settings, "head_dim", None) or hidden // heads),
        vocab=table.weight.shape[0],
        context=int(getattr(settings, "max_position_embeddings", None) or 4096),
        tied=tied,
        dtype=stated if stated in BYTES else "float32",
        tokens={f"{name}_token_id": getattr(settings, f"{name}_token_id", None) for name in ("bos", "eos", "pad")},
        carried=Carried(config, prefix=prefix),
    )


def placed(stock: Any, tied: bool, entries: Entries) -> Iterator[Found]:
    """Yield the tensors on disk in their order. Warn about tensors that the model lacks, and skip them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    roles = roles_of(stock, tied)
    transforms = get_model_conversion_mapping(stock)
    renames = [each for each in transforms if not isinstance(each, WeightConverter)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    base = stock.base_model_prefix
    missing = {role for _, _, held in roles.values() for role in held}
    left = list[str]()
    for name, (shape, dtype) in entries.items():
        target, pattern, converter = name, None, None
        for each in renames:
            target, _ = each.rename_source_key(target)
        for each in converters:
            target, pattern = each.rename_source_key(target)
            if pattern is not None:
                converter = each
                break
        target = next((t for t in (target, f"{base}.{target}", target.removeprefix(f"{base}.")) if t in roles), target)
        if target not in roles:
            left.append(name)
            continue
        kind, size, held = roles[target]
        if converter is not None:
            held = of_expert(name, target, pattern or "", converter, kind, held)
        if dtype not in BYTES or (converter is None and prod(shape) != prod(size)):
            raise ValueError(f"{name} is {list(shape)} {dtype} on disk, and {target} is {list(size)}")
        missing -= set(held)
        yield name, shape, dtype, held
    if missing:
        raise ValueError(f"there is no tensor for {min(missing)}")
    if left:
        warnings.warn(
            f"{len(left)} tensors ({left[0]} first) are read by no model of transformers, and are not trained or "
            "exported",
            stacklevel=2,
        )


def roles_of(stock: Any, tied: bool) -> dict[str, tuple[str, tuple[int, ...], Roles]]:
    """Return kind, shape and stacked roles of each of transformers' tensors."""
    found: dict[str, tuple[str, tuple[int, ...], Roles]] = {}
    where = {name: (parts(name, block), block) for name, block in modelling.blocks(stock)}
    fleeting = {
        f"{name}.{each}" for name, module in stock.named_modules() for each in module._non_persistent_buffers_set
    }
    for name, tensor in [*stock.named_parameters(remove_duplicate=False), *stock.named_buffers()]:
        if name in fleeting:
            continue
        block = next((each for each in where if name.startswith(f"{each}.")), None)
        kind, held = ("plain", (name,)) if block is None else of_part(name, block, *where[block])
        found[name] = kind, tuple(tensor.shape), held
    if tied:
        by_id = {id(parameter): name for name, parameter in stock.named_parameters()}
        for name, parameter in stock.named_parameters(remove_duplicate=False):
            if by_id[id(parameter)] != name:
                found[name] = "plain", tuple(parameter.shape), (by_id[id(parameter)],)
    return found


def of_part(name: str, prefix: str, found: Block, block: nn.Module) -> tuple[str, Roles]:
    own = name.removeprefix(f"{prefix}.")
    if own in found.roles:
        return "plain", (f"{prefix}.{found.roles[own]}",)
    if not own.startswith(f"{found.experts}."):
        return "plain", (name,)
    kind = own.rpartition(".")[2]
    names = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}[kind]
    count = block.get_submodule(found.experts).get_parameter(kind).shape[0]
    return kind, tuple(f"{prefix}.experts.{i}.{part}.weight" for i in range(count) for part in names)


def of_expert(name: str, target: str, pattern: str, converter: Any, kind: str, held: Roles) -> Roles:
    """Return the roles of one expert's tensor, which transformers would stack with the others."""
    numbered = re.findall(r"\.experts\.([0-9]+)\.", name)
    did = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    sources, each = list(converter.source_patterns), {"gate_up_proj": 2}.get(kind, 1)
    stacks = did[:1] == [("MergeModulelist", 0)] and len(did) == (2 if len(sources) > 1 else 1)
    joins = len(did) < 2 or did[1] == ("Concatenate", 1)
    if kind == "plain" or len(numbered) != 1 or not (stacks and joins) or len(sources) not in (1, each):
        raise ValueError(f"{name} becomes {target} by {', '.join(did_name for did_name, _ in did)}, which is not known")
    first = int(numbered[0]) * each
    if first >= len(held):
        raise ValueError(f"{name} belongs to an expert that the model does not have")
    own = held[first : first + each]
    return own if len(sources) == 1 else own[sources.index(pattern) : sources.index(pattern) + 1]
