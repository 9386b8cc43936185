"""Measure the expert backends in TFLOP/s and the fused activation in GB/s, on one GPU.

usage: python -m benchmarks.kernels

  python -m benchmarks.kernels

The data is random and in bfloat16, and experts have uneven counts, as without balancing. A row is the median of 10
runs, after 3 runs that do not count. FLOPs are those of the matrix products: 2 for a multiply-add; the backward has
twice those of the forward. Bytes are those that the activation must read and write.
"""

from __future__ import annotations

from upcycle.cli import frame as cli

if __name__ == "__main__":  # before the imports below, which take seconds
    cli.program("benchmarks.kernels")

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.experts import ExpertWeights
from training.kernels import swiglu
from upcycle import plugin

WARM, COUNTED = 3, 10


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    width: int
    hidden: int
    rows: int

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.rows * 3 * self.width * self.hidden


SHAPES = [
    Shape("Qwen3-30B-A3B", experts=128, width=768, hidden=2048, rows=131_072),
    Shape("Llama-3-8B E8T2", experts=8, width=14_336, hidden=4096, rows=32_768),
]


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for i in range(WARM + COUNTED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= WARM:
            times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def natural_counts(shape: Shape) -> Tensor:
    """Return the rows of each expert as a router without balancing spreads them: by a softmax over normal logits."""
    generator = torch.Generator().manual_seed(0)
    share_E = (0.5 * torch.randn(shape.experts, generator=generator)).softmax(0)
    chosen_R = torch.multinomial(share_E, shape.rows, replacement=True, generator=generator)
    return torch.bincount(chosen_R, minlength=shape.experts).to(torch.int32)


def normal(*sizes: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()


def backends(shape: Shape, count_E: Tensor) -> Iterator[tuple[str, Callable[[], str]]]:
    x_RD, weight_R = normal(shape.rows, shape.hidden), torch.rand(shape.rows, device="cuda").requires_grad_()
    up_EFD = normal(shape.experts, 2 * shape.width, shape.hidden, scale=shape.hidden**-0.5)
    down_EDF = normal(shape.experts, shape.hidden, shape.width, scale=shape.width**-0.5)
    w, inputs = ExpertWeights(up_EFD, down_EDF, gated=True), (x_RD, weight_R, up_EFD, down_EDF)
    d_y_RD = torch.randn_like(x_RD)

    def row(name: str) -> str:
        module = plugin.load("training.experts", name)
        why_not: str = module.available()
        if why_not:
            return why_not

        def forward() -> Tensor:
            y_RD: Tensor = module.experts(x_RD, weight_R, count_E, w, "silu")
            return y_RD

        with torch.no_grad():
            ahead = milliseconds(forward)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both = milliseconds(lambda: torch.autograd.grad(forward(), inputs, d_y_RD))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rate = [f * shape.forward_flops / ms * 1e-9 for f, ms in ((1, ahead), (3, both), (2, both - ahead))]
        return f"{ahead:8.2f} {both:8.2f} ms   {rate[0]:6.0f} {rate[1]:6.0f} ({rate[2]:.0f}) TFLOP/s   {peak:5.1f} GiB"

    for name in plugin.names("training.experts"):
        yield name, lambda name=name: row(name)  # type: ignore[misc]


def grouped_products(shape: Shape, count_E: Tensor) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the six products of `grouped` one by one, at whose speed the whole would run if nothing else cost time."""
    from training.kernels.products import products

    ends_E, two = count_E.cumsum(0, dtype=torch.int32), 2 * shape.width
    with torch.no_grad():
        x_RD, h_RH, a_RF = (normal(shape.rows, n) for n in (shape.hidden, two, shape.width))
        up_EHD, down_EDF = normal(shape.experts, two, shape.hidden), normal(shape.experts, shape.hidden, shape.width)

    def row(a: Tensor, b: Tensor, width: int) -> str:
        with torch.no_grad():
            ms = milliseconds(lambda: products(a, b, ends_E))
        return f"{ms:8.2f} ms   {2e-9 * shape.rows * width * shape.hidden / ms:6.0f} TFLOP/s"

    operands = {
        "up forward": (x_RD, up_EHD.transpose(1, 2), two),
        "down forward": (a_RF, down_EDF.transpose(1, 2), shape.width),
        "down to rows": (x_RD, down_EDF, shape.width),
        "down to weights": (x_RD.t(), a_RF, shape.width),
        "up to rows": (h_RH, up_EHD, two),
        "up to weights": (h_RH.t(), x_RD, two),
    }
    for name, given in operands.items():
        yield name, lambda given=given: row(*given)  # type: ignore[misc]


def activations(shape: Shape, count_E: Tensor) -> Iterator[tuple[str, Callable[[], str]]]:
    h_RH = normal(shape.rows, 2 * shape.width).detach()
    d_a_RF, weight_R = normal(shape.rows, shape.width).detach(), torch.rand(shape.rows, device="cuda")
    ends_E, options = count_E.cumsum(0, dtype=torch.int32), ("silu", True)
    matrix = shape.rows * shape.width * 2e-6  # MB of one (R, F) matrix in bfloat16

    def row(work: Callable[[], object], matrices: int) -> str:
        ms = milliseconds(work)
        return f"{ms:8.3f} ms" + (f"   {matrices * matrix / ms:6.0f} GB/s" if matrices else "")

    yield "copy of h", lambda: row(h_RH.clone, 4)
    yield "kernel forward", lambda: row(lambda: swiglu.forward(h_RH, weight_R, ends_E, *options), 3)
    yield "torch forward", lambda: row(lambda: swiglu.forward_reference(h_RH, weight_R, ends_E, *options), 3)
    yield "kernel backward", lambda: row(lambda: swiglu.backward(d_a_RF, h_RH, weight_R, ends_E, *options), 6)
    yield "torch backward", lambda: row(lambda: swiglu.backward_reference(d_a_RF, h_RH, weight_R, ends_E, *options), 6)
    yield "zeros, no tail", lambda: row(lambda: swiglu.zero_tail(h_RH, ends_E), 0)


def matmul() -> str:
    a, b = normal(8192, 8192).detach(), normal(8192, 8192).detach()
    ms = milliseconds(lambda: a @ b)
    return f"{ms:8.2f} ms   {2e-9 * 8192**3 / ms:6.0f} TFLOP/s"


def show(name: str, measure: Callable[[], str]) -> None:
    """Print one row of the table. The row of a backend that fails is its error, and the next backend still runs."""
    try:
        row = measure()
    except Exception as error:
        row = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    torch.cuda.empty_cache()
    print(f"  {name:<18} {row}", flush=True)


@cli.command()
def main(words: Sequence[str]) -> int:
    if words:
        raise ValueError(f"benchmarks.kernels takes no words and got {words[0]!r}; remove it")
    if not torch.cuda.is_available():
        raise ValueError("benchmarks.kernels needs a CUDA device, and there is none; run it on a machine with a GPU")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    show("matmul 8192^3", matmul)
    for shape in SHAPES:
        count_E = natural_counts(shape)
        most = int(count_E.max()) * shape.experts / shape.rows
        print(f"\n{shape.name}: {shape.experts} experts of {shape.width}, hidden {shape.hidden}, {shape.rows:,} rows,")
        print(f"rows an expert {int(count_E.min()):,} to {int(count_E.max()):,} ({most:.2f} times the mean)")
        for title, rows in (
            ("experts: forward, forward + backward (backward alone), and memory in addition to the inputs", backends),
            ("grouped_mm, product by product", grouped_products),
            ("silu(gate) * up * weight", activations),
        ):
            print(title)
            for name, measure in rows(shape, count_E.cuda()):
                show(name, measure)
    return 0
