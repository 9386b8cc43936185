"""Quantise an MoE folder: FP8, NVFP4 and AWQ by llm-compressor, GGUF by llama.cpp's own converter.

Both losses are measured in float32. The second one uses the weights that lie on the disk: they are compressed, written
and decompressed, and llm-compressor rounds activations as its format says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upcycle import plugin
from upcycle.arch import engines, registry
from upcycle.arch.spec import MoESpec
from upcycle.arch.targets.upcycled import MODELING
from upcycle.converting import card
from upcycle.io import disk, publish, strict
from upcycle.io.checkpoint import INDEX, TERMS, Checkpoint, downloaded, hub_match, pinned
from upcycle.io.job import JOB, Worker, check_apart, check_first, explained, job
from upcycle.text import tokens as text
from upcycle.text.streamed import check_modeling, quiet
from upcycle.verifying.inspect import read_manifest

CARD = "README.md"  # not in the manifest, because its owner may edit it
SCHEMES = {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4", "awq": "W4A16_ASYM"}
CALIBRATED = ("nvfp4", "awq")
KEPT = ("lm_head", "re:.*gate$", "re:.*router.*")  # modules that keep their numbers: the head, and routers by any name
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # llm-compressor's names -> Mixtral's on disk
GROUPS = (128, 64, 32)  # weights that share a scale in AWQ
NVFP4_GROUP, Q8_GROUP = 16, 32
SEQUENCE, BATCH = 512, 4  # tokens of a sequence, and sequences in a forward pass
SHARD = 5_000_000_000  # bytes of a weight file
CONVERTER = "convert_hf_to_gguf.py"


@dataclass(frozen=True)
class Quantised:
    """The result: its folder, and the loss on the text before and after, if there was text."""

    folder: Path
    method: str
    text: card.Measured | None

    @property
    def sentence(self) -> str:
        return f"{self.method}: {card.change(self.text)}"


@dataclass(frozen=True)
class Stored:
    """A tensor to write, as disk.header wants it."""

    name: str
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return str(self.value.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.value.element_size()


def quantize(
    model: str, output: str, method: str, data: Sequence[str] = (), tokens: int = 4096, type: str = "q8_0",
    converter: str = "",
) -> Quantised:  # fmt: skip
    """Write the folder `output`; see `upcycle quantize --help`."""
    place = Path(output)
    with Checkpoint.open(model) as source:
        hub_id = hub_match(model) if source.config.get("auto_map") else None
        folder = downloaded(hub_id, ["*.py"]) if hub_id else source.folder
        moe = spec_of(source)
        check_apart("output", place, [folder, *data], f"-{method}")
        if place.exists() or place.is_symlink():
            if place.is_dir() and read_manifest(place):
                shutil.rmtree(place / JOB, ignore_errors=True)  # left if a kill came right after the rename
            raise ValueError(f"{place} exists already; remove it or choose another output")
        if method in CALIBRATED and not data:
            raise ValueError(f"method={method} calibrates on text; write data=[FILE]")
        if source.config["model_type"] == "upcycled":
            check_modeling(folder)
        rows = texts(source, data, tokens)
        if method == "gguf":
            script = check_gguf(source, moe, converter)
        else:
            check_groups(method, moe)
            need_llmcompressor()
        partial = place.with_name(f"{place.name}.partial")
        with unfinished(partial, place, {"quantize": method, "model": source.fingerprint()}), quiet():
            if method == "gguf":
                files, losses = gguf(script, source, partial, type, rows)
                config = dict[str, Any]()
            else:
                files, config, losses = compressed(source, moe, partial, method, rows)
            count = rows[0].numel() - len(rows[0]) if rows else 0
            said: dict[str, Any] = {"method": method if method != "gguf" else f"gguf {type}"}
            if losses:
                said["text"] = {"data": [Path(name).name for name in data], "tokens": count, "before": losses[0],
                                "after": losses[1]}  # fmt: skip
            said |= {"model": pinned(model, source.folder), "runs": runs_on(method, source.config, moe)}
            finish(source, folder, partial, place, config, files, said)
    return Quantised(place, said["method"], said.get("text"))


def spec_of(source: Checkpoint) -> MoESpec:
    """Return the model's sizes; raise a ValueError if it is not an MoE that we can quantise."""
    kind = source.config.get("model_type")
    if source.config.get("quantization_config"):
        raise ValueError(f"{source.folder} is quantised already; give the model that it was made from")
    known = plugin.names(registry.TARGETS)
    if kind not in known:
        raise ValueError(f"{source.folder} is a {strict.short(kind)}; quantize takes MoEs of {', '.join(known)}")
    return registry.readable(kind).read(source.config)


def texts(source: Checkpoint, data: Sequence[str], tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return token ids to measure on, and others to calibrate on, with an equal share of each file."""
    if not data:
        return None
    length = min(SEQUENCE, tokens, int(source.config.get("max_position_embeddings") or SEQUENCE))
    vocab = int(source.config["vocab_size"])
    try:
        rows = text.token_batches(source.folder, data, 2 * (tokens // length) * length, length, vocab)
    except ValueError as error:
        raise ValueError(str(error).replace("calibration.tokens", "tokens")) from None
    return rows[0::2], rows[1::2]


def check_groups(method: str, moe: MoESpec) -> None:
    """Raise a ValueError if a row of a matrix cannot be cut into the groups that share a scale."""
    if method == "awq":
        group_of(moe)
    if method == "nvfp4" and (odd := [size for size in row_sizes(moe) if size % NVFP4_GROUP]):
        raise ValueError(
            f"nvfp4 needs rows of whole {NVFP4_GROUP} numbers, and this model has rows of {odd[0]}; use fp8"
        )


def row_sizes(moe: MoESpec) -> list[int]:
    """Return the sizes of inputs of all matrices to quantise."""
    dense = [] if moe.all_layers else [moe.dense.ffn]
    return sorted(
        {moe.dense.hidden, moe.dense.heads * moe.dense.head_dim, *moe.widths, *dense, *[moe.shared] * bool(moe.shared)}
    )


def group_of(moe: MoESpec) -> int:
    """Return the largest group that divides all rows."""
    sizes = row_sizes(moe)
    found = [group for group in GROUPS if all(size % group == 0 for size in sizes)]
    if not found:
        raise ValueError(f"awq needs rows of whole {GROUPS[-1]} numbers, and this model has rows of {sizes}; use fp8")
    return found[0]


def runs_on(method: str, config: Mapping[str, Any], moe: MoESpec) -> str:
    """Return which engine reads the result, or why none that we tested does."""
    if method == "gguf":
        return "llama.cpp"
    right, wrong, untried = engines.fits(str(config["model_type"]), moe)
    why = next((each for each in (*wrong, *untried) if each.startswith("vLLM: ")), "")
    return "vLLM, where it has kernels for these numbers" if "vLLM" in right else f"not vLLM ({why[6:]})"


# ---- load and measure


def load(source: Checkpoint) -> Any:
    """Return the model in float32; of an `upcycled` folder, only our own modelling file runs."""
    import transformers

    # not from config.json: transformers fetches and runs kernels that it names
    more: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    kind: Any = transformers.AutoModelForCausalLM
    if source.config["model_type"] == "upcycled":
        from upcycle.arch.remote.modeling_upcycled import UpcycledForCausalLM

        kind = UpcycledForCausalLM
    else:
        more["trust_remote_code"] = False
    model, found = kind.from_pretrained(source.folder, local_files_only=True, use_safetensors=True, **more)
    if lacks := sorted(map(str, found["missing_keys"])):
        raise ValueError(
            f"{source.folder} lacks {len(lacks)} tensors of its model, the first is {strict.short(lacks[0])}"
        )
    return model.eval()


@torch.inference_mode()
def nats(model: Any, rows: Tensor) -> float:
    """Return the mean loss of each token but a sequence's first, in nats."""
    total = 0.0
    for ids in torch.split(rows, BATCH):
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    return total / (rows.numel() - len(rows))


# ---- llm-compressor


def need_llmcompressor() -> None:
    """Raise a ModuleNotFoundError if llm-compressor is missing; silence its reports."""
    if find_spec("llmcompressor") is None:
        raise ModuleNotFoundError(name="llmcompressor")
    from loguru import logger

    for package in ("llmcompressor", "compressed_tensors"):
        logger.disable(package)


def compressed(
    source: Checkpoint, moe: MoESpec, partial: Path, method: str, rows: tuple[Tensor, Tensor] | None
) -> tuple[dict[str, Any], dict[str, Any], tuple[float, float] | None]:
    """Quantise by llm-compressor and write the weights; return their files, config.json, and both losses."""
    from compressed_tensors.compressors import ModelCompressor
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes, linearize_moe

    model = load(source)
    before = nats(model, rows[0]) if rows else None
    if method in CALIBRATED and moe.layers and not get_non_linearized_moes(model):
        raise ValueError(
            f"method={method} calibrates every expert, for which llm-compressor needs gated SiLU experts of one width "
            "without biases; use method=fp8"
        )
    linearize_moe(model)
    names = names_on_disk(source, model)
    one_shot(model, moe, method, rows[1] if rows else None)
    dtype = getattr(torch, moe.dtype)
    for name, scale in [*model.named_parameters(), *model.named_buffers()]:
        if is_scale(name) and scale.dtype == torch.float32:
            scale.data = scale.to(dtype).float()  # weights are rounded by the scale that is written
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    files, index = write(partial, list(stored(source, model, names, dtype)))
    if index:
        disk.write_atomic(partial / INDEX, json.dumps(index, indent=2).encode())
    after = None
    if rows:
        compressor.decompress_model(model)  # activations are still rounded
        after = nats(model.float(), rows[0])
    quantisation = compressor.quantization_config.model_dump(mode="json", exclude=["quant_method"])
    # patterns too, because an engine's router may be a Linear and transformers' is not
    kept = (disk_name(str(source.config["model_type"]), name) for name in quantisation["ignore"])
    quantisation["ignore"] = sorted({*kept, *KEPT})
    config = {**source.config, "quantization_config": {
        "version": version("compressed-tensors"), "quant_method": "compressed-tensors", **quantisation,
        "quantization_status": "compressed",
    }}  # fmt: skip
    return files, config, None if before is None or after is None else (before, after)


def one_shot(model: Any, moe: MoESpec, method: str, rows: Tensor | None) -> None:
    """Attach scales to the model's matrices, calibrated on the rows if the method needs it."""
    from unittest.mock import patch

    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.entrypoints.oneshot import Oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    scheme = preset_name_to_scheme(SCHEMES[method], ["Linear"])
    recipe: list[Any] = []
    if method == "awq":
        from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

        scheme.weights.group_size = group_of(moe)
        # a norm in front of a router is not scaled, because that would change which experts are chosen
        mappings = []
        if moe.dense.block == "pre" and moe.dense.norm in ("rms", "layernorm"):
            mappings.append(AWQMapping("re:.*input_layernorm$", [f"re:.*self_attn.{name}_proj$" for name in "qkv"]))
        if moe.dense.gated:
            mappings.append(AWQMapping("re:.*up_proj$", ["re:.*down_proj$"]))
        recipe.append(AWQModifier(mappings=mappings, offload_device=None))
    recipe.append(QuantizationModifier(config_groups={"group_0": scheme}, ignore=list(KEPT)))
    keys: dict[str, Any] = {"pipeline": "datafree"}
    if method in CALIBRATED:
        assert rows is not None
        each = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
        keys = {"pipeline": "basic", "dataset": torch.utils.data.DataLoader(each, batch_size=1)}  # type: ignore[arg-type]
    with ExitStack() as stack:
        # it asks AutoConfig whether the folder is quantised, and AutoConfig would ask to run the folder's code
        stack.enter_context(patch.object(Oneshot, "validate_model", lambda self, model: None))
        if not torch.cuda.is_available():  # AWQ pins memory for a GPU, and torch refuses that without one
            stack.enter_context(patch.object(IntermediatesCache, "pin_memory", lambda self, index, names=None: None))
        oneshot(model=model, recipe=recipe, **keys)


def names_on_disk(source: Checkpoint, model: Any) -> dict[str, str]:
    """Return {the model's name of a tensor: its name on disk}; raise a ValueError if the source has other tensors."""
    kind, tied = source.config["model_type"], "lm_head.weight" not in source.entries
    names = {name: disk_name(kind, name) for name in model.state_dict() if not (tied and name == "lm_head.weight")}
    if strange := sorted(set(names.values()) ^ source.entries.keys()):
        raise ValueError(
            f"{source.folder} stores {strict.short(strange[0])} in another layout than a matrix for each expert, "
            "and engines read no quantised form of that; convert to another target"
        )
    return names


def disk_name(kind: str, name: str) -> str:
    """Return the name on disk of a tensor or module of the model, after its experts were made single modules."""
    if kind != "mixtral":
        return name
    name = name.replace(".mlp.", ".block_sparse_moe.")
    return re.sub(r"(experts\.\d+)\.(\w+_proj)", lambda found: f"{found[1]}.{MIXTRAL[found[2]]}", name)


def stored(source: Checkpoint, model: Any, names: Mapping[str, str], dtype: torch.dtype) -> Iterator[Stored]:
    """Yield the tensors to write: untouched ones in their own dtype, and what quantised ones have become."""
    for name, value in model.state_dict().items():
        module, _, part = name.rpartition(".")
        weight = names.get(f"{module}.weight", "")
        if name in names:
            on_disk, own = names[name], getattr(torch, source.entries[names[name]].dtype)
        elif weight:
            on_disk, own = f"{weight.rpartition('.')[0]}.{part}", dtype if is_scale(part) else value.dtype
        else:  # a tied head
            continue
        yield Stored(on_disk, (value.to(own) if value.dtype == torch.float32 else value).contiguous())


def is_scale(name: str) -> bool:
    """Return whether a tensor is a scale that engines read in the model's dtype."""
    return name.endswith("_scale") and not name.endswith("_global_scale")


def write(partial: Path, tensors: Sequence[Stored]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the weight files; return their sizes and sums, and the index if there are several."""
    groups, files = disk.shards(sorted(tensors, key=lambda stored: stored.name), SHARD), {}
    for name, group in groups:
        with disk.Stream(partial / name) as stream:
            stream.write(disk.header(group))
            for each in group:
                stream.write(each.value)
        files[name] = {"bytes": stream.bytes, "sha256": stream.sha256}
    if len(groups) == 1:
        return files, {}
    total = sum(each.bytes for each in tensors)
    return files, {"metadata": {"total_size": total}, "weight_map": {t.name: n for n, group in groups for t in group}}


# ---- llama.cpp


def check_gguf(source: Checkpoint, moe: MoESpec, converter: str) -> str:
    """Return the path of llama.cpp's converter; raise a ValueError if it is missing or llama.cpp misreads the model."""
    kind = str(source.config["model_type"])
    right, wrong, untried = engines.fits(kind, moe)
    if "llama.cpp" not in right:
        why = next(each for each in (*wrong, *untried) if each.startswith("llama.cpp: "))
        lacks = (
            "it has no class for this architecture"
            if not registry.readable(kind).can.stock
            else f"not tried: {why[11:]}"
        )
        raise ValueError(
            f"llama.cpp does not read this {kind} model ({why[11:] if why in wrong else lacks}); use method=fp8, or "
            "convert to a target that llama.cpp reads"
        )
    for name in ("config.json", "tokenizer_config.json"):  # the converter lets a tokenizer run code from its folder
        path = source.folder / name
        if path.is_file() and strict.read_object(path).get("auto_map"):
            raise ValueError(
                f"{path} names code to run (auto_map), and llama.cpp's converter would run it; remove that key"
            )
    found = converter or shutil.which(CONVERTER) or ""
    if not Path(found).is_file():
        raise ValueError(
            f"{converter or CONVERTER} is not there; get llama.cpp, and write converter=FOLDER/{CONVERTER}"
        )
    return found


def gguf(
    script: str, source: Checkpoint, partial: Path, type: str, rows: tuple[Tensor, Tensor] | None
) -> tuple[dict[str, Any], tuple[float, float] | None]:
    """Write a GGUF file by llama.cpp's converter; return its size and sum, and both losses.

    The second loss rounds the weights as the file does; llama.cpp also rounds activations and the cache.
    """
    file = partial / f"model-{type}.gguf"
    words = [sys.executable, script, str(source.folder), "--outtype", type, "--outfile", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode or not file.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1] if lines else f"exit code {done.returncode}"
        raise ValueError(
            f"llama.cpp's converter failed on {source.folder}: {said}; it needs its own requirements in this Python "
            "(pip install gguf sentencepiece)"
        )
    with open(file, "rb") as written:
        os.fsync(written.fileno())
    losses = None
    if rows:
        model = load(source)
        before = nats(model, rows[0])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1 and not re.search(r"gate\.weight$|router", name):
                    weight.copy_(rounded(weight, type))
        losses = before, nats(model, rows[0])
    return publish.listed([file]), losses


def rounded(weight: Tensor, type: str) -> Tensor:
    """Round weights as GGUF stores them; q8_0 has a float16 scale for each 32 numbers."""
    if type != "q8_0" or weight.shape[-1] % Q8_GROUP:
        return weight.to(torch.bfloat16 if type == "bf16" else torch.float16).float()
    block = weight.reshape(*weight.shape[:-1], -1, Q8_GROUP)
    scale = block.abs().amax(-1, keepdim=True) / 127
    return ((block / scale.clamp(min=1e-30)).round() * scale.half().float()).reshape(weight.shape)


# ---- publish


@contextmanager
def unfinished(partial: Path, output: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Let only this process write `partial`; remove the weights that a killed command left there."""
    with explained(partial), job(partial, identity, Worker(), lambda: None):
        check_first(partial, output)
        for path in (*partial.glob("model*.safetensors"), *partial.glob("model-*.gguf")):
            path.unlink()
        disk.sweep(partial)
        yield


def finish(
    source: Checkpoint, folder: Path, partial: Path, output: Path, config: Mapping[str, Any], files: Mapping[str, Any],
    said: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write all files except the weights `files`, and give the folder its name. `said`: how it was quantised."""
    is_gguf, beside = not config, list[Path]()
    if not is_gguf:
        beside.append(partial / "config.json")
        disk.write_atomic(beside[-1], json.dumps(config, indent=2).encode() + b"\n")
        beside += [path] if (path := partial / INDEX).is_file() else []
    code = [folder / MODELING.name] if "auto_map" in config else []
    for path in (*source.copied_files(), *code):
        if not is_gguf or path.name in TERMS:  # a GGUF file holds its tokenizer
            beside.append(partial / path.name)
            disk.copy(path, beside[-1])
    manifest = {
        **provenance(source),
        "quantised": dict(said),
        "versions": card.versions(),
        "files": {**files, **publish.listed(beside)},
    }
    terms, names = card.terms(source.folder), [*files, *(path.name for path in beside)]
    page = card.quantised(manifest, config or source.config, terms, names)
    disk.write_atomic(partial / CARD, page.encode())
    disk.write_atomic(partial / publish.MANIFEST, publish.signed(manifest))
    publish.rename(partial, output)
    shutil.rmtree(output / JOB, ignore_errors=True)


def provenance(source: Checkpoint) -> dict[str, Any]:
    """Return the part of the source's manifest that says where the model comes from; without one it is a base."""
    known = read_manifest(source.folder)
    if known is None:
        return {"format": 1, "from": "", "donors": [], "source": []}
    kept = ("format", "from", "donors", "source", "config", "trained")
    return {key: known[key] for key in kept if key in known}
