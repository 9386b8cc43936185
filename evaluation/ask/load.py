"""Load a model from a Hugging Face folder, a hub id, or a training run's folder (`opened`).

A run's folder means its newest whole checkpoint; RUN/checkpoints/step-00000100 means that step. Under a mesh each
process reads only its own share, as in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evaluation.ask.remember import VERSION
from evaluation.judge.results import Model
from training.checkpoint import layout, standalone
from training.checkpoint.layout import Origin
from training.experts import DEFAULT, SPECIFICATION
from training.model.decoder import Decoder
from training.model.moe import MoE
from training.parallel.mesh import ParallelMesh, check
from training.parallel.shard import dense_ffns, layers, parallelize
from upcycle import __version__
from upcycle.arch.spec import MoESpec
from upcycle.io import checkpoint, strict
from upcycle.io.checkpoint import COPIED
from upcycle.planning.size import dense_parameters
from upcycle.text import tokens as text

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
IRRELEVANT = (
    "_name_or_path",
    "transformers_version",
)  # keys of config.json that only say where the model is from


@dataclass(frozen=True)
class Loaded:
    model: Decoder
    about: Model
    tokenizer: Any
    stops: tuple[int, ...]  # end-of-text tokens of generation_config.json


def described(about: Model) -> dict[str, Any]:
    """Return the facts about a model that lm-eval writes into its results (`config`)."""
    return {
        "model_num_parameters": about.parameters,
        "model_active_parameters": about.active,
        "model_dtype": about.dtype,
        "model_type": about.kind,
        "model_sha": about.fingerprint,
        "model_identity": about.identity,
        "model_step": about.step,
    }


def opened(
    source: str, dtype: str, mesh: ParallelMesh, device: torch.device, *, expert_backend: str = DEFAULT,
    tokenizer: str = "",
) -> Loaded:  # fmt: skip
    run, step_folder = standalone.training_run(Path(source))
    with origin_of(source, run) as origin:
        encoder = load_tokenizer(source, origin, tokenizer)  # first, because a missing tokenizer is found fastest
        check(mesh.config, mesh.world, origin.spec, sequence=origin.dense.context)
        with torch.device("meta"):
            model = Decoder(origin.spec, experts=expert_backend, compute=getattr(torch, dtype))
            if run is not None:
                standalone.attach_adapters(model, run)
            else:  # a run's float32 masters stay as they are; each module casts its own weights
                narrow(model, getattr(torch, dtype))
        parallelize(model, mesh)
        model = model.to_empty(device=device).eval()
        step = fill(model, origin, run, step_folder)
        if len(encoder) > origin.dense.vocab and max(encoder.get_vocab().values()) >= origin.dense.vocab:
            raise ValueError(
                f"the tokenizer of {source} gives ids up to {max(encoder.get_vocab().values())} and the model has "
                f"{origin.dense.vocab} embeddings; write tokenizer=FOLDER with the model's own tokenizer"
            )
        total, active = parameters(origin)
        numbers, encoder_folder = fingerprint(model), tokenizer_folder(source, origin, tokenizer)
        about = Model(
            Path(source).resolve().name if Path(source).exists() else source, source, numbers,
            str(origin.config.get("model_type")), total, active, dtype, step,
            identity(numbers, origin, encoder_folder, dtype, expert_backend, device.type),
        )  # fmt: skip
        return Loaded(model, about, encoder, end_tokens(origin))


def narrow(model: Decoder, dtype: torch.dtype) -> None:
    """Cast all weights except routers and those that FSDP gathers together with them (shard.py), which stay float32."""
    parts: list[nn.Module | None] = [model.embed, model.final_norm, model.head]
    for layer in layers(model):
        parts += [layer.attention, *dense_ffns(layer)]
        if isinstance(layer.ffn, MoE):
            parts.append(layer.ffn.experts)
    for part in parts:
        if part is not None:
            part.to(dtype)


def origin_of(source: str, run: Path | None) -> AbstractContextManager[Origin]:
    return layout.opened(source) if run is None else nullcontext(standalone.kept(run))


def fill(model: Decoder, origin: Origin, run: Path | None, folder: Path | None) -> int | None:
    """Give the model the weights of its folder, or of its run; return the run's step."""
    if run is not None:
        return standalone.load_step(model, run, folder)
    layout.load(model, origin)
    return None


# ---- tokenizer, sizes, identity


def tokenizer_folder(source: str, origin: Origin, given: str) -> Path:
    own = next((f.parent for f in origin.files if f.name in TOKENIZERS), None)
    folder = checkpoint.tokenizer_folder(given) if given else own
    if folder is None or not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(
            f"{given or source} has no tokenizer ({', '.join(TOKENIZERS[:2])}, ...), and tasks need one; write "
            f"tokenizer=FOLDER, or a hub id, with the one that the model was trained with"
        )
    return folder


def load_tokenizer(source: str, origin: Origin, given: str) -> Any:
    from transformers import AutoTokenizer

    folder = tokenizer_folder(source, origin, given)
    if (folder / "tokenizer.json").is_file():
        text.load_tokenizer(folder)  # refuse files that would crash transformers
    with text.explained(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def encoded(tokenizer: Any, texts: Sequence[str], *, special: bool) -> dict[str, list[int]]:
    """Return the tokens of each text, made on all processors; `special`: with the tokens that begin or end a text."""
    if not texts:
        return {}
    if not tokenizer.is_fast:
        return dict(zip(texts, tokenizer(list(texts), add_special_tokens=special)["input_ids"], strict=True))
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    found = backend.encode_batch_fast(list(texts), add_special_tokens=special)
    return {text: each.ids for text, each in zip(texts, found, strict=True)}


def end_tokens(origin: Origin) -> tuple[int, ...]:
    """Return the end tokens that transformers' generate uses: generation_config.json's if it exists, else
    config.json's."""
    settings = generation(origin)
    ends = (origin.config if settings is None else settings).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    found: tuple[int, ...] = strict.held(ends, tuple[int, ...], "eos_token_id of the model's generation settings")
    return found


def generation(origin: Origin) -> dict[str, Any] | None:
    file = next((f for f in origin.files if f.name == "generation_config.json"), None)
    return strict.read_object(file) if file else None


def parameters(origin: Origin) -> tuple[int, int]:
    """Return (the number of all parameters, the number that a token uses)."""
    if not isinstance(origin.spec, MoESpec):
        count = dense_parameters(origin.dense)
        return count, count
    with torch.device("meta"):
        model = Decoder(origin.spec, experts=SPECIFICATION)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    widths = sorted(origin.spec.widths)
    unit = experts / (len(widths) * widths[-1])  # uneven experts are stored as wide as the widest
    kept, chosen = unit * sum(widths), unit * sum(widths[-origin.spec.top_k :])
    return round(total - experts + kept), round(total - experts + chosen)


def identity(weights: str, origin: Origin, tokenizer: Path, dtype: str, experts: str, device: str) -> str:
    """Return a digest of everything that may change the model's tokens or its answers.

    `weights` is their fingerprint. The same weights under another config.json are another model (experts a token,
    rotary base, epsilon of a norm), so the digest covers the whole config except IRRELEVANT, with keys that we do not
    know yet. It does not cover how ranks divide the work, which only changes rounding.
    """
    settings, beside = dict(origin.config), generation(origin)
    files = {file for pattern in COPIED for file in tokenizer.glob(pattern) if file.is_file()}
    files = {file for file in files if file.name != "generation_config.json"}
    parts = {
        "weights": weights,
        "config": {name: value for name, value in settings.items() if name not in IRRELEVANT},
        "generation": beside and {name: value for name, value in beside.items() if name not in IRRELEVANT},
        "tokenizer": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "how": [dtype, experts, device],
        "versions": [VERSION, __version__, *map(version, ("torch", "transformers", "tokenizers"))],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint(model: Decoder) -> str:
    """Return a digest of every weight by name: equal on any mesh and from any file, different if one weight differs."""
    named = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0])
    sums = hashlib.sha256()
    for name, tensor in named:
        sums.update(f"{name} {list(tensor.shape)} ".encode() + digest(whole(tensor)))
    return sums.hexdigest()


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def digest(tensor: Tensor) -> bytes:
    """Return a digest of the numbers and not of their dtype: a bfloat16 model read into float32 has the same one."""
    narrow = tensor.bfloat16()
    shortest = narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
    raw: Any = shortest.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(raw).digest()
