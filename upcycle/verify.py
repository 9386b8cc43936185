"""`verify`: compare the logits of two checkpoints on the same tokens, with one model in memory at a time.

The check must not depend on the converter, so stock transformers loads both folders. A folder that ships our modelling
file is loaded with the package's own copy, after the two were found equal byte for byte: no remote code runs.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from upcycle import rng, text
from upcycle.checkpoint import Checkpoint
from upcycle.inspect import read_manifest
from upcycle.targets import upcycled


@dataclass(frozen=True)
class Report:
    tokens: int
    max_difference: float  # of logits
    mean_difference: float
    relative: float  # max_difference over the largest dense logit
    kl: float  # dense || MoE, nats a token, mean
    top1_agreement: float  # share of tokens
    promised: str
    tolerance: float | None  # None: nothing was promised
    held: bool

    def __str__(self) -> str:
        lines = {
            "tokens": f"{self.tokens}",
            "logits": f"max difference {self.max_difference:.3g}, mean {self.mean_difference:.3g}, "
            f"relative {self.relative:.3g}",
            "KL": f"{self.kl:.3g} nats a token",
            "top-1": f"{self.top1_agreement:.2%} agree",
            "promised": self.promised
            + (f" (relative difference up to {self.tolerance:g})" if self.tolerance is not None else ""),
            "verdict": "held"
            if self.held and self.tolerance is not None
            else "nothing to hold; logits are finite"
            if self.held
            else "BROKEN",
        }
        return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def load_model(folder: str | Path, dtype: torch.dtype) -> Any:
    """Load the causal LM of a folder or hub id on the CPU, without remote code. A ValueError if a weight is missing."""
    import transformers

    with Checkpoint.open(folder) as checkpoint:  # our header checks run before other parsers see the files
        path, model_type = checkpoint.folder, checkpoint.config.get("model_type")
    kind: Any = transformers.AutoModelForCausalLM
    if model_type == "upcycled":
        shipped = path / upcycled.MODELING.name
        if not shipped.is_file() or shipped.read_bytes() != upcycled.MODELING.read_bytes():
            raise ValueError(
                f"{shipped} is not the modelling file of this version of upcycle; it is not run. Convert again, "
                "or load it yourself with trust_remote_code=True"
            )
        from upcycle.remote import modeling_upcycled

        kind = modeling_upcycled.UpcycledForCausalLM
    hf_logging: Any = transformers.logging  # no report or bars between ours; what it would report is checked below
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            str(path), dtype=dtype, output_loading_info=True, trust_remote_code=False, experts_implementation="eager"
        )
    except Exception as error:  # a config.json that does not fit the weights raises errors of any type
        reason = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"transformers cannot load {folder} ({type(error).__name__}: {reason})") from error
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()
    problems = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if problems:
        what, names = next(iter(problems.items()))
        raise ValueError(
            f"transformers reports {what} in {folder}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        )
    return model.eval()


@torch.no_grad()
def logits(folder: str | Path, ids: Tensor, dtype: torch.dtype, label: str) -> Tensor:
    model = load_model(folder, dtype)
    out: list[Tensor] = [
        model(input_ids=row[None], use_cache=False).logits[0].float() for row in tqdm(ids, desc=label, delay=2)
    ]
    del model
    gc.collect()
    return torch.cat(out)


def tokens(dense: Checkpoint, texts: Sequence[str], count: int, length: int) -> Tensor:
    vocab = vocabulary(dense)
    context = dense.config.get("max_position_embeddings")
    length = min(length, context) if isinstance(context, int) else length
    if count < 2 or length < 2:
        raise ValueError(f"--tokens {count} and --length {length} leave nothing to compare; give at least 2 of each")
    if texts:
        return text.token_batches(dense.folder, texts, count, length, vocab)
    sequences = max(1, -(-count // length))
    return torch.randint(0, vocab, (sequences, min(length, count)), generator=rng.generator(0, "verify"))


def vocabulary(checkpoint: Checkpoint) -> int:
    size = checkpoint.config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"config.json of {checkpoint.folder} has vocab_size={size!r}; it must be at least 1")
    return size


def verify(
    dense: str | Path,
    moe: str | Path,
    texts: Sequence[str] = (),
    count: int = 1024,
    length: int = 256,
    dtype: str = "float32",
    tolerance: float | None = None,
) -> Report:
    with Checkpoint.open(dense) as a, Checkpoint.open(moe) as b:
        if vocabulary(a) != vocabulary(b):
            raise ValueError(
                f"the two models have {vocabulary(a)} and {vocabulary(b)} logits; they do not share a vocabulary"
            )
        ids = tokens(a, texts, count, length)
        manifest = read_manifest(b.folder)
        promise = manifest["promise"] if manifest else None
    want = logits(dense, ids, getattr(torch, dtype), "dense")
    have = logits(moe, ids, getattr(torch, dtype), "MoE")
    if not bool(torch.isfinite(want).all()):
        raise ValueError(f"{dense} itself gives NaN or infinite logits in {dtype}; try --dtype float32")
    return judge(want, have, promise, dtype, tolerance)


def judge(want: Tensor, have: Tensor, promise: dict[str, Any] | None, dtype: str, tolerance: float | None) -> Report:
    difference = (have - want).abs()
    relative = float(difference.max() / want.abs().max())
    log_p, log_q = want.double().log_softmax(-1), have.double().log_softmax(-1)
    if tolerance is None and promise is not None and promise["exact"]:
        # in half precision the two models round differently, and router ties split some virtual groups: a real but
        # small difference
        tolerance = promise["tolerance"] if dtype in ("float32", "float64") else max(promise["tolerance"], 0.1)
    promised = (
        "nothing: no manifest"
        if promise is None
        else "exact"
        if promise["exact"]
        else f"not exact: {'; '.join(promise['reasons'])}"
    )
    finite = bool(torch.isfinite(have).all())
    return Report(
        tokens=want.shape[0],
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        relative=relative,
        kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        top1_agreement=float((want.argmax(-1) == have.argmax(-1)).double().mean()),
        promised=promised,
        tolerance=tolerance,
        held=finite and (tolerance is None or relative <= tolerance),
    )
