"""Run a stock transformers model with the weights of one layer in memory at a time.

The model is built as from_pretrained does it, but with parameters on the meta device. When a layer (or the embedding,
the last norm, the head) is called, a hook reads its tensors, transformers' own loader converts and places them, and a
second hook puts them back on the meta device. A model of any size then needs memory for its largest layer and the
hidden states. A folder that ships our modelling file runs with the package's own copy, if both are equal byte for byte,
so no remote code runs.

Parts of the loader are imported by name, because from_pretrained would hold the whole model or copy it to disk.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from tqdm import tqdm

from upcycle.arch.targets import upcycled
from upcycle.io.checkpoint import Checkpoint

BATCH = 8192  # tokens in one forward, which reads all layers once
AtLayer = Callable[[int, nn.Module], None]  # called with a loaded layer, before it runs


@dataclass
class Unit:
    """A module that is loaded at once: a decoder layer, or another module with its own parameters."""

    path: str
    module: nn.Module
    names: list[str] = field(default_factory=list)  # of the checkpoint's tensors
    keep: bool = False  # stays loaded between calls


class Streamed:
    """The causal LM of an open checkpoint; raises a ValueError if folder and model do not fit.

    `change(name, tensor)` is applied to each tensor read; `experts` is transformers' experts_implementation.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str = "cpu",
        change: Callable[[str, Tensor], Tensor] | None = None,
        experts: str = "",
    ) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.change = change or (lambda _, tensor: tensor)
        self.at_layer: AtLayer = lambda *_: None
        try:
            with quiet(), empty_parameters():
                self.model: Any = built(checkpoint, dtype, experts)
            if dtype == torch.float64:
                self.model.to(dtype)  # some classes create routers in float32 whatever the dtype
        except Exception as error:  # a wrong config.json raises errors of any type
            raise self.refused(error) from error
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.units = self.divided()
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: None if unit.keep else self.load(unit))
            unit.module.register_forward_hook(lambda *_, unit=unit: None if unit.keep else free(unit.module))

    def refused(self, error: Exception) -> ValueError:
        reason = " ".join(str(error).split()) or "no reason given"
        return ValueError(f"transformers cannot load {self.checkpoint.folder} ({type(error).__name__}: {reason})")

    def divided(self) -> list[Unit]:
        """Return the modules that are loaded at once; raise a ValueError if a tensor of the folder is in none."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        from transformers.modeling_utils import LoadStateDictConfig

        model: Any = self.model
        mapping: list[Any] = get_model_conversion_mapping(model)
        self.config = LoadStateDictConfig(
            dtype=self.dtype,
            device_map={"": self.device},
            weight_mapping=mapping,
            dtype_plan=model._get_dtype_plan(self.dtype),
        )
        base, start = model.base_model_prefix, f"{model.base_model_prefix}.layers."
        units = {f"{start}{i}": Unit(f"{start}{i}", module) for i, module in enumerate(model.base_model.layers)}
        for path, module in model.named_modules():
            if not path.startswith(start) and any(True for _ in module.parameters(recurse=False)):
                units[path] = Unit(path, module)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        state, unexpected = model.state_dict(), []
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        for name in self.checkpoint.entries:
            key, _ = rename_source_key(name, renamings, converters, base, state)
            path = next((p for p in (prefix(key), key.rpartition(".")[0]) if p in units), None)
            if path is not None and key in state:
                units[path].names.append(name)
            elif not any(re.search(pattern, name) for pattern in ignored):
                unexpected.append(name)
        self.refuse("unexpected_keys", unexpected)
        self.tied = {
            target.rpartition(".")[0]: source.rpartition(".")[0]
            for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        }
        return list(units.values())

    def refuse(self, what: str, names: list[str]) -> None:
        """Raise a ValueError if there are names."""
        if names:
            shown = f"{', '.join(sorted(names)[:3])}{' ...' if len(names) > 3 else ''}"
            raise ValueError(f"transformers reports {what} in {self.checkpoint.folder}: {shown}")

    # ---- the weights of one layer

    def load(self, unit: Unit) -> None:
        if not unit.names and unit.path in self.tied:
            (source,) = (u for u in self.units if u.path == self.tied[unit.path])
            self.fill(source)
            unit.module.weight = source.module.weight
            free(source.module)
        else:
            self.fill(unit)
        layer = re.search(r"\.layers\.(\d+)$", unit.path)
        if layer:
            self.at_layer(int(layer[1]), unit.module)
            self.bar.update()

    def fill(self, unit: Unit) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        tensors = {name: self.change(name, self.checkpoint.read(name)) for name in unit.names}
        try:
            with quiet():
                info, _ = convert_and_load_state_dict_in_model(self.model, tensors, self.config)
        except Exception as error:
            raise self.refused(error) from error
        own = {f"{unit.path}.{name}" for name in unit.module.state_dict()}
        self.refuse("mismatched_keys", [name for name, *_ in info.mismatched_keys])
        self.refuse("conversion_errors", list(info.conversion_errors))
        self.refuse("missing_keys", list(own & info.missing_keys))

    # ---- running the model

    @torch.no_grad()
    def hidden(self, rows: list[Tensor], label: str, at_layer: AtLayer | None = None) -> Tensor:
        """Return the last hidden states [token, hidden] of these sequences."""
        self.at_layer = at_layer or self.at_layer
        out, parts = [], list(batches(rows))
        total = len(parts) * len(self.model.base_model.layers)
        with tqdm(total=total, desc=f"{label} in {str(self.dtype)[6:]}", unit="layer", delay=2) as self.bar:
            for batch in parts:
                self.output = self.model.base_model(input_ids=batch.to(self.device), use_cache=False)
                out.append(self.output.last_hidden_state.flatten(0, 1))
        return torch.cat(out)

    @contextmanager
    def with_head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield the stock model's function from hidden states [token, hidden] to logits [token, vocabulary]."""
        base = self.model.base_model
        heads = [u for u in self.units if u.module is self.model.get_output_embeddings()]

        @torch.no_grad()
        def logits(hidden_TD: Tensor) -> Tensor:
            self.output.last_hidden_state = hidden_TD[None]
            out: Tensor = self.model(input_ids=torch.zeros(1, len(hidden_TD), dtype=torch.long), use_cache=False).logits
            return out[0]

        base.forward = lambda *_, **__: self.output
        for unit in heads:
            self.load(unit)
            unit.keep = True
        try:
            yield logits
        finally:
            del base.forward
            for unit in heads:
                unit.keep = False
                free(unit.module)


def prefix(key: str) -> str:
    """Return `model.layers.3` for `model.layers.3.mlp.up_proj.weight`."""
    found = re.match(r"(.*?\.layers\.\d+)\.", key)
    return found[1] if found else ""


def batches(rows: list[Tensor]) -> Iterator[Tensor]:
    """Yield sequences of one length stacked, BATCH tokens at most (or one longer sequence)."""
    at = 0
    while at < len(rows):
        length = len(rows[at])
        stop = at + 1
        while stop < len(rows) and len(rows[stop]) == length and (stop + 1 - at) * length <= BATCH:
            stop += 1
        yield torch.stack(rows[at:stop])
        at = stop


def built(checkpoint: Checkpoint, dtype: torch.dtype, experts: str) -> Any:
    """Build the model without its weights."""
    import transformers

    path = str(checkpoint.folder)
    if checkpoint.config.get("quantization_config"):
        raise ValueError(f"{path} is quantised, so only engines read its weights; give the model that it was made from")
    # not from config.json: transformers fetches and runs kernels that it names
    more: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": experts or None}
    if checkpoint.config.get("model_type") != "upcycled":
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        kind: Any = transformers.AutoModelForCausalLM
        return kind.from_config(config, dtype=dtype, trust_remote_code=False, **more).eval()
    check_modeling(checkpoint.folder)
    from upcycle.arch.remote import modeling_upcycled as ours

    own: Any = ours.UpcycledForCausalLM
    return own._from_config(ours.UpcycledConfig.from_pretrained(path), dtype=dtype, **more).eval()


def check_modeling(folder: Path) -> None:
    """Raise a ValueError if the modelling file of an `upcycled` folder is not ours, byte for byte."""
    shipped = folder / upcycled.MODELING.name
    if not shipped.is_file() or shipped.read_bytes() != upcycled.MODELING.read_bytes():
        raise ValueError(
            f"{shipped} is not the modelling file of this version of upcycle; it is not run. Convert again, "
            "or load it yourself with trust_remote_code=True"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence reports and progress bars of transformers; this module checks what they would say."""
    import transformers

    hf_logging: Any = transformers.logging
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Create parameters on the meta device; buffers stay real, because they are computed and not read."""
    hook: Any = lambda _module, _name, parameter: emptied(parameter)  # noqa: E731 - of another type than torch states
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def emptied(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


def free(module: nn.Module) -> None:
    """Put a module's parameters on the meta device again, and return their memory to the system.

    glibc keeps an arena for each loader thread; without this, arenas would grow with the number of layers.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, emptied(parameter))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
