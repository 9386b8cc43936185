"""upcycle estimate measure=FILE: measure this machine and write its hardware file.

  upcycle estimate measure=mine.yaml              # one card: products, attention, memory, host
  upcycle estimate measure=mine.yaml nproc=8      # also the links between the cards
  upcycle estimate my.yaml gpus=8 hardware=mine.yaml

The file takes the numbers that it cannot measure with so many processes from `like`, and names them under `sheet`. Each
number is the median of the slowest rank. All ranks work at the same time, as in training. On a CPU, for tests, the
shapes are tiny.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from training import experts
from training.config.schema import ModelConfig
from training.data.mixture import DataConfig
from training.dispatch import DEFAULT, create
from training.estimating import bench, hardware
from training.estimating.hardware import Hardware, Link
from training.kernels.products import products as grouped_products
from training.model.attention import BACKENDS
from training.observe.flops import peak_tflops
from training.parallel.processes import processes, rank
from upcycle.config.values import at_least, check_values
from upcycle.io import publish

# (groups, rows of each group, columns out, columns in) of a small model, of 30B-A3B, of 8B, and of experts of the three
PRODUCTS = (
    (1, 32768, 1536, 576), (1, 16384, 5120, 2048), (1, 16384, 2048, 4096), (1, 8192, 8192, 8192),
    (1, 16384, 28672, 4096), (1, 2048, 6144, 6144), (32, 4096, 768, 576), (32, 4096, 576, 384),
    (128, 1024, 1536, 2048), (128, 1024, 2048, 768), (32, 4096, 1536, 2048), (32, 4096, 2048, 768),
    (64, 512, 5120, 3584), (64, 512, 3584, 2560), (8, 2048, 28672, 4096), (8, 2048, 4096, 14336),
)  # fmt: skip
# head_dim, sequence, heads, heads of keys and values
ATTENTION = ((64, 1024, 9, 3), (64, 4096, 32, 8), (128, 2048, 32, 8), (128, 4096, 32, 4), (128, 8192, 32, 8))
SMALL = ((1, 64, 64, 64), (4, 16, 32, 32)), ((16, 64, 4, 2),)
TOKENS = 65536  # tokens of all sequences in one call of attention
AT_ONCE = 10  # how often a GPU repeats work between two readings of the clock, so that the host's time does not count
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
LAYERS = (2, 6)  # layers of two models; the difference of their times gives the host's time for a layer
TRIES = 5  # how often a difference that noise hides is measured again


@dataclass(frozen=True)
class MeasureConfig:
    measure: str = "hardware.yaml"  # the file to write; it must not exist
    like: str = "h200"  # source of the numbers that are not measured: h100 | h200 | b200, or a file
    node: int = 0  # number of GPUs that the fast link joins; 0: all of this machine
    device: str = ""  # cuda | cpu; "": cuda if this machine has it

    def __post_init__(self) -> None:
        check_values(self, "", {"node": at_least(0)})


def measure(asked: MeasureConfig) -> str:
    """Measure this machine, write its hardware file, and return a sentence for the user; "" on all ranks but the
    first."""
    base = hardware.read(asked.like)
    output = Path(asked.measure)
    if output.exists():
        raise ValueError(f"measure={output} exists already; remove it or choose another file")
    if not os.access(output.parent, os.W_OK):
        raise ValueError(f"measure={output} cannot be written: make the folder {output.parent}, or choose another")
    world = os.environ.get("WORLD_SIZE", "1")
    if world != os.environ.get("LOCAL_WORLD_SIZE", world):
        raise ValueError("measure runs on several machines, but it measures the links inside one; start it on one")
    alone = hosted(placed(asked.device))  # before the ranks are joined, so that FSDP's hooks do not count
    with processes(asked.device) as device:
        found = measured(device, base, alone, asked.node)
    if rank() > 0:
        return ""
    publish.write_own(output, written(found).encode())
    rest = f"; from {asked.like}: {', '.join(found.sheet)}" if found.sheet else ""
    return f"{output} has the numbers of {found.name}{rest}; use it with hardware={output}"


def placed(device: str) -> torch.device:
    """Return this process's device before `processes` sets it."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise ValueError(
            f"device is {kind}, which this machine cannot measure; write device=cpu or device=cuda, or leave it out"
        )
    found = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if kind == "cuda" else kind)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def measured(device: torch.device, base: Hardware, alone: tuple[float, float], node: int = 0) -> Hardware:
    """Return the measured Hardware of a device; `alone` is the result of `hosted` before the ranks were joined."""
    cuda = device.type == "cuda"
    shapes, attentions = (PRODUCTS, ATTENTION) if cuda else SMALL
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    products = tuple((*shape, *product(device, *shape)) for shape in shapes)
    found = replace(
        base,
        name=name,
        memory=round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1) if cuda else base.memory,
        node=node or (torch.cuda.device_count() if cuda else base.node),
        peak=peak_tflops(name) or max(max(row[4:]) for row in products),
        bandwidth=copied(device),
        products=products,
        attention=tuple((*shape[:2], *attended(device, *shape)) for shape in attentions),
        host=alone,
        source=f"upcycle estimate, torch {torch.__version__}",
        sheet=("network",) if cuda else ("memory", "node", "network"),
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        link, sent = linked(device), travelled(device, found.bandwidth)
        scale = sent / base.rows[DEFAULT][0]
        others = {name: (digits(scale * rate), more) for name, (rate, more) in base.rows.items()}
        return replace(found, link=link, rows=others)
    return replace(found, sheet=(*found.sheet, "link", "rows"))


def seconds(
    work: Callable[[], Any], device: torch.device, repeats: int = 7, warm: int = 2, at_once: int | None = None
) -> float:
    """Return the median seconds of `work` on the slowest rank; `at_once` is how often it runs between two readings."""
    often = at_once or (AT_ONCE if device.type == "cuda" else 1)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(warm + repeats):
        wait()
        start = time.perf_counter()
        for _ in range(often):
            work()
        wait()
        times.append((time.perf_counter() - start) / often)
    middle = torch.tensor(statistics.median(times[warm:]), dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(middle, dist.ReduceOp.MAX)
    return float(middle)


def longer(what: str, times: Callable[[], tuple[float, float]], by: float = 1.0) -> tuple[float, float]:
    """Measure until the second of the two times is more than `by` times the first, and return both.

    Noise can hide the difference. It would then look as if a host or a link took no time, and every plan would be too
    good."""
    for _ in range(TRIES):
        short, long = times()
        if long > by * short:
            return short, long
    raise ValueError(
        f"{what} cannot be measured: {TRIES} times in a row the longer run ({long * 1e3:.3g} ms) was not more than "
        f"{by:g} times the shorter one ({short * 1e3:.3g} ms); measure again when the machine is idle"
    )


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def product(device: torch.device, groups: int, rows: int, out: int, inner: int) -> tuple[float, float, float]:
    """Return TFLOP/s of a product, of its input's gradient and of its weight's, computed as in experts or
    projections."""
    x, y, w = (
        random(device, groups * rows, inner),
        random(device, groups * rows, out),
        random(device, groups, out, inner),
    )
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
    if groups == 1:
        ways: tuple[Callable[[], Tensor], ...] = (lambda: x @ w[0].T, lambda: y @ w[0], lambda: y.T @ x)
    else:
        ways = (
            lambda: grouped_products(x, w.transpose(1, 2), ends),
            lambda: grouped_products(y, w, ends),
            lambda: grouped_products(y.T, x, ends),
        )
    work = 2 * groups * rows * out * inner
    first, second, third = (round(work / seconds(way, device) / 1e12, 6) for way in ways)
    return first, second, third


def attended(device: torch.device, head_dim: int, sequence: int, heads: int, of_keys: int) -> tuple[float, float]:
    batch = max(1, TOKENS // sequence) if device.type == "cuda" else 1
    q = random(device, batch, heads, sequence, head_dim).requires_grad_()
    k, v = (random(device, batch, of_keys, sequence, head_dim).requires_grad_() for _ in range(2))
    back = random(device, batch, heads, sequence, head_dim)

    def forward() -> Tensor:
        with sdpa_kernel(BACKENDS, set_priority=True):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    work = 2 * batch * heads * head_dim * sequence**2  # FLOPs of half of the square
    alone = seconds(forward, device)
    both = seconds(lambda: torch.autograd.grad(forward(), (q, k, v), back), device)
    return round(work / alone / 1e12, 6), round(3 * work / both / 1e12, 6)


def copied(device: torch.device) -> float:
    """Return GB/s of a copy in memory, reads and writes added."""
    there = torch.empty(1 << (31 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    return round(2 * there.numel() / seconds(lambda: other.copy_(there), device) / 1e9, 1)


def hosted(device: torch.device) -> tuple[float, float]:
    """Return the host's milliseconds for a dense and for a MoE layer, forward and backward.

    It times layers with tiny kernels in steps of the bench, which runs the same code as training."""
    world = dist.get_world_size() if dist.is_initialized() else 1

    def stepped(more: dict[str, Any], layers: int) -> float:
        on_gpu = device.type == "cuda"
        model = ModelConfig(
            expert_backend=experts.DEFAULT if on_gpu else experts.SPECIFICATION,
            dtype="bfloat16" if on_gpu else "float32",
        )
        asked = bench.BenchConfig(
            architecture={**TINY, **more, "num_hidden_layers": layers}, data=DataConfig(sequence=64), batch=world,
            micro_batch=1, warmup=2, steps=4, model=model, weights=model.dtype,
        )  # fmt: skip
        return float(bench.measured(asked, bench.spec_of(asked), device)["seconds"])

    def of_a_layer(kind: str, more: dict[str, Any]) -> float:
        few, many = longer(
            f"the host's time for a {kind} layer", lambda: (stepped(more, LAYERS[0]), stepped(more, LAYERS[1]))
        )
        return digits((many - few) / (LAYERS[1] - LAYERS[0]) * 1e3)

    sparse = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    return of_a_layer("dense", {"model_type": "llama"}), of_a_layer("MoE", sparse)


def linked(device: torch.device) -> Link:
    """Return latency and rate of an all-gather between all ranks."""
    world = dist.get_world_size()
    few, many = 1 << 10, 0  # bytes that each rank sends
    first = 27 if device.type == "cuda" else 20
    sizes = iter([1 << power for power in range(first, first + TRIES)])  # a larger one at each try

    def gathered(size: int) -> float:
        own = torch.empty(size, dtype=torch.uint8, device=device)
        whole = torch.empty(size * world, dtype=torch.uint8, device=device)
        return seconds(lambda: dist.all_gather_into_tensor(whole, own), device)

    def both() -> tuple[float, float]:
        nonlocal many
        many = next(sizes)
        return gathered(few), gathered(many)

    short, long = longer("the rate of the links between ranks", both, by=2)
    rate = (many - few) * (world - 1) / (long - short) / 1e9
    return Link(latency=digits(short / (world - 1) * 1e6), rate=digits(rate))


def travelled(device: torch.device, bandwidth: float) -> float:
    """Return GB/s of rows to other ranks by dispatch and combine with random experts, without the local copies."""
    world, (tokens, hidden) = dist.get_world_size(), (16384, 2048) if device.type == "cuda" else (64, 16)
    count, k = 32 * world, 8
    own = create(DEFAULT, count, dist.group.WORLD)
    chosen = torch.rand(tokens, count, device=device).topk(k).indices
    x, weight = random(device, tokens, hidden), torch.ones(tokens, k, device=device) / k

    def both() -> None:
        there = own.dispatch(x, weight, chosen)
        own.combine(there.x_RD, there.handle)

    size = x.element_size() * hidden * tokens
    local = 2 * size * (1 + k + 2 * k) / (bandwidth * 1e9)  # there and back: leaving and arriving rows are sorted
    _, whole = longer("the rate of rows to other ranks", lambda: (local, seconds(both, device)))
    return digits(2 * size * k * (1 - 1 / world) / (whole - local) / 1e9)


def digits(number: float) -> float:
    """Round to four digits that count, so that the rate of a slow link does not become zero."""
    return float(f"{number:.4g}")


def written(found: Hardware) -> str:
    """Return the text of the hardware file, with one line for each row of a table."""
    values = asdict(found)
    lines = []
    for name, value in values.items():
        if name in ("products", "attention"):
            lines += [
                f"{name}:",
                *(f"- {yaml.safe_dump(list(row), default_flow_style=True, width=200).strip()}" for row in value),
            ]
        else:
            value = {key: list(each) for key, each in value.items()} if name == "rows" else value
            value = list(value) if isinstance(value, tuple) else value
            flow = isinstance(value, dict | list)
            lines.append(yaml.safe_dump({name: value}, default_flow_style=None if flow else False, width=200).strip())
    return "\n".join(lines) + "\n"
