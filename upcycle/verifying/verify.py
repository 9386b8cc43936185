"""Check that a converted folder keeps the promise of its plan (`verify`).

There are two independent checks. The first rebuilds the plan from the dense model and the manifest, and compares the
folder's files, numbers and names with it, and random slices of weights bit for bit (rebuild). The second runs both
models in stock transformers, layer by layer (streamed), in float64 throughout (wide): for an exact plan it compares the
logits, for an inexact plan the error, gain and cosine of each layer's FFN with the plan's prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from upcycle import plugin
from upcycle.arch.siblings import text_of
from upcycle.cli.frame import printable
from upcycle.io.checkpoint import Checkpoint
from upcycle.io.publish import MANIFEST
from upcycle.planning import rng
from upcycle.planning.plan import UpcyclePlan
from upcycle.planning.promise import Estimate, compare
from upcycle.text import tokens as text
from upcycle.text.streamed import Streamed
from upcycle.verifying import rebuild
from upcycle.verifying.inspect import read_whole_manifest
from upcycle.verifying.wide import Float64

# the bound on the logit difference of an exact plan, relative to the largest logit, by the dtype of the computation; a
# manifest cannot change it. Rounding alone reaches 1e-13 in float64 and 4e-5 in float32 (SmolLM2-135M). In half
# precision router ties also split some virtual groups.
BOUNDS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
# in float64, for targets whose router is not exactly normalised: lfm2_moe divides by the sum of scores + 1e-6
INEXACT_ROUTERS = {"lfm2_moe": 1e-4}
FEW = 32  # tokens to compute if files or weights have faults already, and tokens that try transformers' kernels
CHUNK = 16 << 20  # bytes of logits of one model at a time
TAPPED = 64 << 20  # bytes of FFN inputs kept, all layers together
# how far an FFN may be from the plan's own experts (cosine difference, factor of the norm). NEAR allows for rounding;
# TIED is for routers that take only a part of a copy: its rows tie, so the parts they take are arbitrary
NEAR, TIED = (0.05, 1.15), (0.2, 1.5)
# attribute names of the FFN in stock decoder layers; a layer's parts are added
FFNS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")


@dataclass(frozen=True)
class Report:
    tokens: int
    max_difference: float  # of logits
    mean_difference: float
    relative: float  # max_difference over the largest dense logit
    kl: float  # dense || MoE, nats a token, mean
    top1_agreement: float  # share of tokens
    promised: str
    tolerance: float | None  # of `relative`; None: no bound was promised
    held: bool  # False if the promise is broken, or if nothing was promised
    nothing: bool = False  # True if nothing was promised and no fault was found
    blocks: str = ""  # measured and predicted error of the converted FFNs
    rebuilt: str = ""
    kernels: str = ""
    computed: str = ""  # the dtype
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        bound = f" (relative difference up to {self.tolerance:g})" if self.tolerance is not None else ""
        logits = f"max difference {self.max_difference:.3g}, mean {self.mean_difference:.3g}"
        lines = [
            ("tokens", f"{self.tokens}"),
            ("logits", f"{logits}, relative {self.relative:.3g}"),
            ("KL", f"{self.kl:.3g} nats a token"),
            ("top-1", f"{self.top1_agreement:.2%} agree"),
            ("FFNs", self.blocks),
            ("made again", self.rebuilt),
            ("kernels", self.kernels),
            ("computed in", self.computed),
            ("promised", self.promised + bound),
            *(("fault", fault) for fault in self.faults[:8]),
            ("fault", f"and {len(self.faults) - 8} more" if len(self.faults) > 8 else ""),
            ("verdict", "held" if self.held else "nothing to hold; logits are finite" if self.nothing else "BROKEN"),
        ]
        return "\n".join(f"{name:<12} {printable(value)}" for name, value in lines if value)


# ---- tokens


def tokens(dense: Checkpoint, texts: Sequence[str], count: int, sequence: int) -> list[Tensor]:
    """Return `count` token ids in sequences of up to `sequence`: from the texts, or random if there are none."""
    vocab = vocabulary(dense)
    context = text_of(dense.config).get("max_position_embeddings")
    sequence = min(sequence, context) if isinstance(context, int) else sequence
    if count < 2 or sequence < 2:
        raise ValueError(f"tokens={count} and sequence={sequence} leave nothing to compare; both must be at least 2")
    if texts:
        return list(text.token_batches(dense.folder, texts, count, sequence, vocab))
    return list(torch.split(torch.randint(0, vocab, (count,), generator=rng.generator(0, "verify")), sequence))


def vocabulary(checkpoint: Checkpoint) -> int:
    """Return the number of logits of a model."""
    size = text_of(checkpoint.config).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"config.json of {checkpoint.folder} has vocab_size={size!r}; it must be at least 1")
    return size


# ---- the comparison


def verify(
    dense: Any,
    moe: Any,
    texts: Sequence[str] = (),
    count: int = 256,
    sequence: int = 256,
    dtype: str = "float64",
    tolerance: float | None = None,
    device: str = "cpu",
) -> Report:
    """Compare a dense model with its MoE; with `tolerance`, compare the logits of any two models of one vocabulary."""
    if not math.isfinite(tolerance or 0):
        raise ValueError(f"tolerance is {tolerance}; give a number")
    check_computing(dtype, device)
    with Checkpoint.open(dense) as a, Checkpoint.open(moe) as b, ExitStack() as stack:
        if vocabulary(a) != vocabulary(b):
            raise ValueError(
                f"the two models have {vocabulary(a)} and {vocabulary(b)} logits; they do not share a vocabulary"
            )
        rows = tokens(a, texts, count, sequence)
        manifest = read_whole_manifest(b.folder) if tolerance is None else None
        if manifest is None:
            check_order(a, b)
            return Pair(a, b, rows, device, tolerance).compared(dtype, [])
        checkpoints = stack.enter_context(rebuild.sources(a, manifest))
        plan = rebuild.plan_of(b.folder, manifest, checkpoints)
        again = rebuild.weights(plan, checkpoints, b)
        faults = [*rebuild.faults(plan, checkpoints, b, manifest), *again.wrong]
        rebuilt = f"{again.tensors} of {len(plan.outputs)} tensors, {100 * again.share:.3g} % of the bytes, bit for bit"
        if faults:
            rows = [rows[0][:FEW]]  # the verdict is clear, and a few tokens show by how much the models differ
        return Pair(a, b, rows, device, tolerance, plan, checkpoints, rebuilt).compared(dtype, faults)


def check_computing(dtype: str, device: str) -> None:
    """Raise a ValueError if verify does not support this dtype or device."""
    if dtype not in BOUNDS:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(BOUNDS)}")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device is {device!r}; write cpu, cuda or cuda:1") from None
    if kind == "mps" and dtype == "float64":
        raise ValueError("device mps has no float64, in which verify computes; write device=cpu or dtype=float32")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, and this machine has no CUDA device; write device=cpu, or leave it out")


def check_order(dense: Checkpoint, moe: Checkpoint) -> None:
    """Raise a ValueError if the converted folder was given as the dense model, and the dense model as the MoE."""
    if (dense.folder / MANIFEST).is_file() and moe.config.get("model_type") in plugin.names("upcycle.arch.families"):
        raise ValueError(
            f"{dense.folder} is a converted model and {moe.folder} is dense; give the dense model first: "
            f"upcycle verify {moe.folder} {dense.folder}"
        )


@dataclass(frozen=True)
class Pair:
    """A dense model and its MoE, with the plan if there is one."""

    dense: Checkpoint
    moe: Checkpoint
    rows: list[Tensor]
    device: str
    tolerance: float | None
    plan: UpcyclePlan | None = None
    checkpoints: Sequence[Checkpoint] = ()
    rebuilt: str = ""

    def compared(self, dtype: str, faults: list[str]) -> Report:
        """Run both models in this dtype and report their differences; `faults` are faults found before."""
        plan, tolerance = self.plan, self.tolerance
        exact = plan is not None and plan.promise.exact
        if exact:
            assert plan is not None
            tolerance = max(BOUNDS[dtype], INEXACT_ROUTERS.get(plan.target, 0.0))
        taps = Taps(plan, self.checkpoints, getattr(torch, dtype)) if plan is not None else None
        numbers, kernels = self.run(getattr(torch, dtype), taps)
        if not numbers.dense_finite:
            raise ValueError(
                f"the dense model {self.dense.folder} gives NaN or infinite logits in {dtype}; try dtype=float32"
            )
        blocks, off = judged(taps) if taps else ("", [])
        faults = faults + ([] if numbers.finite else ["its logits are NaN or infinite"]) + off
        if tolerance is not None and not numbers.relative <= tolerance:
            faults.append(f"logits differ by {numbers.relative:.3g} of the largest, but {tolerance:g} was promised")
        nothing = plan is None and tolerance is None
        return Report(
            **numbers.result(),
            promised=said(plan, tolerance),
            tolerance=tolerance,
            held=not faults and not nothing,
            nothing=nothing and not faults,
            blocks=blocks,
            rebuilt=self.rebuilt,
            kernels=kernels,
            computed=dtype,
            faults=tuple(faults),
        )

    def run(self, dtype: torch.dtype, taps: Taps | None) -> tuple[Numbers, str]:
        """Return the differences of the logits, and a sentence on kernels that failed ('' if none)."""
        exact, wide = self.plan is not None and self.plan.promise.exact, dtype == torch.float64
        change = rebuild.Rounded(self.plan, dtype) if exact and self.plan is not None else None
        kernels = self.tried() if wide else ""
        with Float64() if wide else nullcontext():
            first = Streamed(self.dense, dtype, self.device, change, experts="eager" if wide else "")
            first, want, _ = hidden(first, self.rows, "dense", taps.listen if taps else None)
            second = Streamed(self.moe, dtype, self.device, experts="eager" if wide else "")
            second, have, failed = hidden(second, self.rows, "MoE", taps.measure if taps else None)
            numbers, step = Numbers(), max(1, CHUNK // (want.element_size() * vocabulary(self.dense)))
            with first.with_head() as want_logits, second.with_head() as have_logits:
                for w, h in zip(torch.split(want, step), torch.split(have, step), strict=True):
                    numbers.add(want_logits(w).double(), have_logits(h).double())
        return numbers, kernels or failed

    def tried(self) -> str:
        """Run the first layers by transformers' default kernels, which have no float64; say why they failed, or ''."""

        def stop(*_: Any) -> None:
            raise Enough

        last = min(self.plan.moe.layers) if self.plan is not None and self.plan.moe.layers else 0
        model = Streamed(self.moe, torch.float32, self.device)
        model.model.base_model.layers[last].register_forward_hook(stop)
        try:
            model.hidden([self.rows[0][:FEW]], "kernels")
        except ValueError:  # raised by our own checks
            raise
        except Exception as error:
            return "" if isinstance(error, Enough) else eager(error)
        return ""


class Enough(Exception):
    """Stops a forward pass after the layer that was wanted."""


def eager(error: Exception) -> str:
    """Say that transformers' default kernels failed, and what to use instead."""
    return f"transformers' default fails ({short(error)}); load it with experts_implementation='eager', as verify did"


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def said(plan: UpcyclePlan | None, tolerance: float | None) -> str:
    """Return the promise in words."""
    if plan is None:
        return "the given tolerance" if tolerance is not None else "nothing: no manifest of a conversion"
    return "exact" if plan.promise.exact else f"not exact: {'; '.join(plan.promise.reasons)}"


def hidden(
    model: Streamed, rows: list[Tensor], label: str, at_layer: Callable[[int, nn.Module], None] | None
) -> tuple[Streamed, Tensor, str]:
    """Return the model that ran, its last hidden states, and why it used eager kernels ('' if it did not)."""
    try:
        return model, model.hidden(rows, label, at_layer), ""
    except ValueError:  # raised by our own checks
        raise
    except Exception as error:
        plain = Streamed(model.checkpoint, model.dtype, model.device, model.change, experts="eager")
        try:
            out = plain.hidden(rows, label, at_layer)
        except ValueError:
            raise
        except Exception:
            raise ValueError(f"transformers cannot run {model.checkpoint.folder} ({short(error)})") from error
        return plain, out, eager(error)


class Numbers:
    """Differences of logits, accumulated chunk by chunk."""

    def __init__(self) -> None:
        self.tokens, self.largest, self.dense_largest = 0, 0.0, 0.0
        self.difference = self.kl = self.same = 0.0
        self.finite = self.dense_finite = True

    def add(self, want: Tensor, have: Tensor) -> None:
        difference = (have - want).abs()
        log_p, log_q = want.log_softmax(-1), have.log_softmax(-1)
        self.tokens += len(want)
        self.largest = max(self.largest, float(difference.max()))
        self.dense_largest = max(self.dense_largest, float(want.abs().max()))
        self.difference += float(difference.mean()) * len(want)
        self.kl += float((log_p.exp() * (log_p - log_q)).sum())
        self.same += float((want.argmax(-1) == have.argmax(-1)).sum())
        self.finite &= bool(torch.isfinite(have).all())
        self.dense_finite &= bool(torch.isfinite(want).all())

    @property
    def relative(self) -> float:
        return self.largest / self.dense_largest if self.dense_largest else math.inf * self.largest

    def result(self) -> Mapping[str, Any]:
        return {
            "tokens": self.tokens,
            "max_difference": self.largest,
            "mean_difference": self.difference / self.tokens,
            "relative": self.relative,
            "kl": self.kl / self.tokens,
            "top1_agreement": self.same / self.tokens,
        }


# ---- the FFNs of an inexact plan


class Taps:
    """Compare FFN outputs on the same inputs: the dense FFN, the MoE's block, and the block that the plan predicts."""

    def __init__(self, plan: UpcyclePlan, checkpoints: Sequence[Checkpoint], dtype: torch.dtype) -> None:
        self.plan, self.layers = plan, frozenset(plan.moe.layers)
        self.reference = (rebuild.FewerExperts if plan.grown else rebuild.Reference)(plan, checkpoints, dtype)
        self.count = max(16, TAPPED // (4 * plan.dense.hidden * len(self.layers)))  # tokens per layer
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.found: dict[int, Estimate] = {}
        self.predicted: dict[int, Estimate] = {}

    def listen(self, layer: int, module: nn.Module) -> None:
        """Keep the first tokens that pass through the dense FFN of this layer."""
        ffn = ffn_of(module)
        if layer not in self.layers or layer in self.kept or len(ffn) > 1:  # several modules: FFN and shared expert
            return

        def keep(_: nn.Module, given: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
            y_TD = out if isinstance(out, Tensor) else out[0]  # MoE blocks may also return router logits
            x_TD, y_TD = given[0].flatten(0, -2), y_TD.flatten(0, -2)
            self.kept[layer] = (x_TD[: self.count].clone(), y_TD[: self.count].clone())
            hook.remove()

        hook = ffn[0].register_forward_hook(keep)

    def measure(self, layer: int, module: nn.Module) -> None:
        """Run the MoE's FFN on the kept tokens, and compare its output with the dense output and the plan's."""
        if layer in self.kept and layer not in self.found:
            x_TD, want_TD = self.kept[layer]
            outs = [part(x_TD[None]) for part in ffn_of(module)]
            y_TD = torch.stack([out[0] if isinstance(out, Tensor) else out[0][0] for out in outs]).sum(0)
            self.found[layer] = compare(y_TD.double(), want_TD.double())
            if not self.plan.promise.exact and self.reference.may_make(layer):
                self.predicted[layer] = compare(self.reference(layer, x_TD.cpu()).double(), want_TD.cpu().double())


def ffn_of(layer: nn.Module) -> list[nn.Module]:
    return [part for name in FFNS if isinstance(part := getattr(layer, name, None), nn.Module)]


def judged(taps: Taps) -> tuple[str, list[str]]:
    """Return a summary of the FFN comparison, and the faults.

    Each FFN is compared with the plan's own experts, computed again, on the same tokens. The summary also shows the
    plan's estimate for Gaussian weights and tokens.
    """
    if not taps.found:
        return "", []
    plan, values = taps.plan, list(taps.found.values())
    error, gain, cosine = (median([getattr(m, k) for m in values]) for k in ("error", "gain", "cosine"))
    text, want = f"error {error:.2g}, gain {gain:.3g}, cosine {cosine:.3g} (median of layers)", plan.promise.estimate
    faults = [] if all(math.isfinite(m.error) for m in values) else ["the output of an FFN is NaN or infinite"]
    if want is not None and not plan.promise.exact:
        text += f"; the plan estimates {want.error:.2g}, {want.gain:.3g}, {want.cosine:.3g}"
    cosine, factor = TIED if plan.moe.copies_of_slices and plan.moe.top_k % plan.moe.granularity else NEAR
    for layer, right in taps.predicted.items():
        m = taps.found[layer]
        if not (abs(m.cosine - right.cosine) <= cosine and norm(right) / factor <= norm(m) <= norm(right) * factor):
            faults.append(
                f"the FFN of layer {layer} has error {m.error:.2g}, gain {m.gain:.3g}, cosine {m.cosine:.3g}; the plan "
                f"has {right.error:.2g}, {right.gain:.3g}, {right.cosine:.3g}"
            )
    return text, faults


def norm(e: Estimate) -> float:
    """Return the norm of the output relative to the dense output."""
    return math.sqrt(max(e.error**2 - 1 + 2 * e.gain, 0.0))
