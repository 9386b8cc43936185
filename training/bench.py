"""bench: tokens/s, TFLOP/s and memory of training steps with random weights and random tokens. A measurement, no test.

    python -m training.bench bench-qwen3-30b-4l                       a stack of blocks, forward and backward
    python -m training.bench bench-qwen3-30b-4l routing=balanced      every expert the same number of rows
    python -m training.bench my.yaml stack=false optimizer=true       head, loss and optimiser too

FLOPs by the half-square convention (upcycle.size): 6 a weight a token, half the square of attention, no router, no
recomputation; without the head when only the blocks run. One JSON row, with versions, is the last line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from training.config import READY
from training.data import Mock
from training.flops import model_flops, peak_tflops
from training.model.decoder import Decoder
from training.model.moe import MoE, Routing
from training.optim import OptimConfig, Optimizer
from upcycle import plugin
from upcycle.config import read
from upcycle.spec import DenseSpec, MoESpec

BLOCKS = 3  # of `steps` steps; the row has their median
KERNELS = 25  # listed by name with profile=true
# kernels by what they are for; the first that matches
PHASES: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "sdpa"),
    "grouped gemm": ("grouped", "GroupProblemShape"),
    "gemm": ("gemm", "nvjet", "cutlass", "sm90_xmma", "ampere_"),
    "sort and index": ("sort", "radix", "scatter", "gather", "index", "scan"),
    "copy": ("copy", "memcpy", "memset", "cat"),
    "triton": ("triton",),
    "elementwise and reduce": ("elementwise", "reduce", "norm", "softmax"),
}


@dataclass(frozen=True)
class BenchConfig:
    architecture: Any = None  # a config.json, as keys and values or as a file
    layers: int = 0  # instead of the architecture's own
    stack: bool = False  # blocks alone: no head, no loss
    sequence: int = 4096
    batch: int = 4  # sequences a step
    routing: str = "natural"  # natural | balanced
    experts: str = "grouped"
    weights: str = "bfloat16"  # dtype of parameters and gradients: bfloat16 | float32
    compute: str = "bfloat16"
    compile: bool = False
    optimizer: bool = False  # also AdamW's step
    warmup: int = 5
    steps: int = 10
    profile: bool = False  # also the time by kind of kernel, from the profiler


def spec_of(config: BenchConfig) -> DenseSpec | MoESpec:
    given = config.architecture
    keys = json.loads(Path(given).read_text()) if isinstance(given, str) else given
    if not isinstance(keys, Mapping) or "model_type" not in keys:
        raise ValueError("architecture must be a config.json: its path, or keys and values with model_type among them")
    keys = {**keys, **({"num_hidden_layers": config.layers} if config.layers else {})}
    package = "families" if keys["model_type"] in plugin.names("upcycle.families") else "targets"
    spec: DenseSpec | MoESpec = plugin.load(f"upcycle.{package}", keys["model_type"]).read(keys)
    return spec


def bench(config: BenchConfig) -> dict[str, Any]:
    if config.routing not in ("natural", "balanced"):
        raise ValueError(f"routing is {config.routing!r}; write natural or balanced")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = spec_of(config)
    dense = spec.dense if isinstance(spec, MoESpec) else spec
    model = build(config, spec, device)
    optimizer = Optimizer(OptimConfig(clip=1.0), model.named_parameters()) if config.optimizer else None
    batch = Mock(dense.vocab, config.sequence).batch(0, config.batch).to(device)

    def step() -> None:
        if config.stack:
            model.hidden(batch.tokens).float().square().mean().backward()  # type: ignore[no-untyped-call]
        else:
            (model.loss(batch.tokens, batch.labels) / batch.tokens.numel()).backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.clip()
            optimizer.step(1e-5)
        model.zero_grad(set_to_none=True)

    for _ in range(config.warmup):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step, device, config.steps) for _ in range(BLOCKS)]
    middle = statistics.median(seconds)
    tokens = config.batch * config.sequence
    flops = model_flops(spec, config.sequence) - (6 * dense.vocab * dense.hidden if config.stack else 0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = peak_tflops(name)
    tflops = flops * tokens / middle / 1e12
    return {
        "device": name,
        "torch": torch.__version__,
        **{k: v for k, v in asdict(config).items() if k != "architecture"},
        "model_type": dense.family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens,
        "seconds": middle,
        "seconds_least_most": [min(seconds), max(seconds)],
        "tokens_per_s": tokens / middle,
        "gflop_per_token": flops / 1e9,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "phases_ms": phases(step) if config.profile and device.type == "cuda" else None,
    }


def build(config: BenchConfig, spec: DenseSpec | MoESpec, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec, experts=config.experts, compute=getattr(torch, config.compute))
    if config.stack and model.head is not None:
        model.head = None
    model = model.to(getattr(torch, config.weights)).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or tensor.ndim == 1:
                tensor.fill_(0.0 if name.endswith("bias") or model.dense.norm.endswith("1p") else 1.0)
            else:
                tensor.normal_(std=0.02, generator=generator)
    for block in model.modules():
        if isinstance(block, MoE) and config.routing == "balanced":
            block.balance = balanced
    if config.compile:
        model.compile_parts()
    return model.train()


def balanced(routing: Routing) -> Routing:
    """Tokens to experts in turn: all experts as many rows, a token's experts next to each other."""
    count, k = routing.expert_TK.shape
    experts = routing.logits_TN.shape[1]
    expert_TK = (torch.arange(count * k, device=routing.expert_TK.device) % experts).view(count, k)
    return replace(routing, expert_TK=expert_TK)


def timed(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Seconds a step, steps one after the other as in training: the host may run ahead of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def phases(step: Callable[[], None], repeats: int = 3) -> dict[str, float]:
    """Milliseconds of device time a step, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    out: dict[str, float] = {}
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:KERNELS]:  # the names behind the phases, for whoever wants to make one faster
        spent, calls = event.self_device_time_total / 1e3 / repeats, event.count / repeats
        print(f"{spent:8.3f} ms {calls:6.0f} x  {event.key[:100]}", file=sys.stderr)
    for event in events:
        spent = event.self_device_time_total / 1e3 / repeats
        phase = next((p for p, words in PHASES.items() if any(w.lower() in event.key.lower() for w in words)), "other")
        out[phase] = out.get(phase, 0.0) + spent
    return {phase: round(ms, 3) for phase, ms in sorted(out.items(), key=lambda item: -item[1])}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    file, words = (words[0], words[1:]) if words and "=" not in words[0] else ("", words)
    try:
        row = bench(read(BenchConfig, file, words, READY))
    except ValueError as error:
        print(f"training.bench: {error}", file=sys.stderr)
        return 2
    print(
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['tflops']:.4g} TFLOP/s"
        + (f" ({row['mfu']:.1%} of the card's peak)" if row["mfu"] is not None else "")
        + (f", {row['peak_gib']:.1f} GiB" if row["peak_gib"] is not None else "")
        + f", {row['seconds'] * 1e3:.1f} ms a step on {row['device']}"
    )
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
