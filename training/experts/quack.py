"""QuACK's products (package quack-kernels, the kernels of SonicMoE), on Hopper. bfloat16, no biases.

The kernels of products also compute the activation and its gradient, and read rows directly from tokens on this device.

`experts` takes rows that a dispatcher brings; `ffn` goes from tokens to tokens, keeps the first product of each row for
backward, and applies weights when it sums the rows of a token. The package's h interleaves gate and up of each neuron;
our weights have all gates first, which `concat_layout` tells the package."""

# Written for quack-kernels 0.6.5 on nvidia-cutlass-dsl 4.8.1, signatures compared with 0.6.2. The package's autotuner
# would tune again for each number of rows, so each call names its tiles (`gemm` has no argument for them). The package
# keeps about 17 kB of the host's memory for each number of rows that it has seen.

from __future__ import annotations

import importlib
import importlib.metadata
import re
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from training.experts import DEFAULT, SPECIFICATION, Capabilities, ExpertWeights, Need, TokenFunction, _narrow
from training.experts.common import check, missing, narrow, need_of, recomputed
from training.kernels import permute, router, swiglu

PACKAGE, FIRST, BEYOND = "quack-kernels", (0, 6, 2), (0, 7)
GATED = {"silu": "swiglu", "gelu_tanh": "geglu"}  # ours: theirs
ALIGNED = 8  # elements, 16 bytes

# rows and columns of a tile, whether two tiles alternate on a multiprocessor, and how many tiles share their loads
# along rows and along columns; these were the fastest of those tried on an H200 (docs/performance.md), and since 0.6.5
# on an H100 (benchmarks/results/2026-11-27-h100.md)
Tile = tuple[int, int, bool, int, int]
PLAIN, TALL = (128, 192, True, 2, 1), (192, 128, True, 1, 2)
SMALL, FLAT, SQUARE = (128, 128, True, 1, 2), (256, 128, False, 1, 2), (128, 128, True, 2, 1)
LIMITS = 1024, 4096  # hidden sizes from which the second and the third column of TILES are used
TILES: dict[str, tuple[Tile, Tile, Tile | None]] = {
    "up": (PLAIN, PLAIN, SMALL),
    "up of tokens": ((128, 256, False, 2, 1), (128, 224, False, 2, 1), None),  # None: tokens are copied first
    "down": ((256, 192, False, 2, 1), (128, 208, True, 1, 2), FLAT),
    "back": (SQUARE, SQUARE, SMALL),
    "back of tokens": (SQUARE,) * 3,  # gathering rows needs 1 tile along columns
    "rows": (PLAIN, TALL, TALL),
    "sum up": (TALL, TALL, FLAT),
    "sum down": (PLAIN, PLAIN, TALL),
}


def available() -> str:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return f"expert_backend=quack needs a Hopper GPU, which its tiles are for, and this is another; use {DEFAULT}"
    found = next((each.version for each in importlib.metadata.distributions(name=PACKAGE)), "")
    if found and not FIRST <= tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < BEYOND:
        least, limit = (".".join(map(str, version)) for version in (FIRST, BEYOND))
        wanted = f"{PACKAGE} at least {least} and before {limit}"
        return f"expert_backend=quack needs {wanted}, and {found} is installed; use {DEFAULT}"
    return missing("quack", "quack.epilogue.library").replace("the quack package", f"the {PACKAGE} package")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it cannot trace QuACK's launches
def experts(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, w: ExpertWeights, activation: str) -> Tensor:
    check(x_RD, weight_R, count_E, w)
    if why := refuses(need_of(x_RD, w, activation)):
        raise ValueError(why)
    begins_E1 = functional.pad(count_E.cumsum(0, dtype=torch.int32), (1, 0))
    y_RD: Tensor = _Rows.apply(  # type: ignore[no-untyped-call]
        x_RD.contiguous(), weight_R.contiguous(), begins_E1, w.up_EFD.contiguous(), w.down_EDF.contiguous(), activation
    )
    return y_RD


def refuses(need: Need) -> str:
    if why := narrow("quack", need):
        return why
    if not need.gated or need.activation not in GATED:
        got = need.activation if need.gated else f"experts without a gate, with {need.activation}"
        return f"expert_backend=quack computes gated {' and '.join(GATED)}, and got {got}; use {DEFAULT}"
    if need.hidden % ALIGNED or need.width % ALIGNED:
        return (
            f"expert_backend=quack needs a hidden size and an expert width that are multiples of {ALIGNED}, and got "
            f"{need.hidden} and {need.width}; use {SPECIFICATION}"
        )
    return ""


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_R: Tensor, begins_E1: Tensor, up_EHD: Tensor, down_EDF: Tensor, activation: str
    ) -> Tensor:
        h_RH, a_RF = up(x_RD, None, begins_E1, up_EHD, activation)
        ctx.save_for_backward(x_RD, weight_R, begins_E1, up_EHD, down_EDF, h_RH)
        ctx.activation = activation
        if recomputed():
            return torch.empty_like(x_RD)
        return products("down", a_RF.mul_(weight_R[:, None]), down_EDF.mT, begins_E1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_R, begins_E1, up_EHD, down_EDF, h_RH = ctx.saved_tensors
        needs_x, _, _, needs_up, needs_down, _ = ctx.needs_input_grad
        d_y_RD = d_y_RD.contiguous()
        d_h_RH, a_RF, d_weight_R = back(d_y_RD, None, begins_E1, down_EDF, h_RH, weight_R, ctx.activation)
        d_weight_R = torch.where(swiglu.live(begins_E1[1:], len(weight_R)), d_weight_R, 0).to(weight_R.dtype)
        d_up_EHD = sum_up(d_h_RH, x_RD, begins_E1) if needs_up else None
        d_down_EDF = sum_down(a_RF, d_y_RD, begins_E1) if needs_down else None
        d_x_RD = products("rows", d_h_RH, up_EHD, begins_E1, ("B",)) if needs_x else None
        return d_x_RD, d_weight_R, None, d_up_EHD, d_down_EDF, None


# ---- from tokens to tokens


def fits(x_TD: Tensor, up: Tensor, down: Tensor, activation: str) -> bool:
    """Return whether `ffn` can compute with these weights, (E, 2, F, D) and (E, D, F)."""
    aligned = down.shape[1] % ALIGNED == down.shape[2] % ALIGNED == 0
    able = not torch.compiler.is_compiling() and x_TD.is_cuda and x_TD.dtype == torch.bfloat16
    return able and aligned and activation in GATED


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, up_EHD: Tensor, down_EDF: Tensor, activation: str,
        onto_TD: Tensor | None, rows: router.Rows | None,
    ) -> Tensor:  # fmt: skip
        x_TD, k = x_TD.contiguous(), expert_TK.shape[1]
        back_R, ends_E, token_R, weight_R = permute.sorted_rows(expert_TK, weight_TK, len(down_EDF))
        begins_E1 = functional.pad(ends_E, (1, 0))
        direct = tile("up of tokens", x_TD.shape[1]) is not None
        rows_x, of = (x_TD, token_R) if direct else (permute.spread(x_TD, back_R, k), None)
        h_RH, a_RF = up(rows_x, of, begins_E1, up_EHD, activation)
        ctx.save_for_backward(x_TD, weight_R, back_R, token_R, begins_E1, up_EHD, down_EDF, h_RH)
        ctx.options = activation, k, rows
        if recomputed():
            return torch.empty_like(x_TD)
        return permute.gather(products("down", a_RF, down_EDF.mT, begins_E1), back_R, k, onto_TD, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_R, back_R, token_R, begins_E1, up_EHD, down_EDF, h_RH = ctx.saved_tensors
        needs_x, needs_weight, _, needs_up, needs_down, _, needs_onto, _ = ctx.needs_input_grad
        activation, k, rows = ctx.options
        d_y_TD = d_y_TD.contiguous()
        if of_long_sums(x_TD, down_EDF):
            d_h_RH, a_RF, d_weight_R = back(d_y_TD, token_R, begins_E1, down_EDF, h_RH, weight_R, activation)
            d_up_EHD, d_down_EDF = long_sums(
                d_h_RH if needs_up else None, x_TD, a_RF if needs_down else None, d_y_TD, token_R, begins_E1
            )
        else:  # tokens are copied first, because a sum that gathers its rows takes longer
            d_y_RD = permute.spread(d_y_TD, back_R, k)
            d_h_RH, a_RF, d_weight_R = back(d_y_RD, None, begins_E1, down_EDF, h_RH, weight_R, activation)
            d_down_EDF = sum_down(a_RF, d_y_RD, begins_E1) if needs_down else None
            del d_y_RD, a_RF
            d_up_EHD = sum_up(d_h_RH, permute.spread(x_TD, back_R, k), begins_E1) if needs_up else None
        d_weight_TK = d_weight_R[back_R].view(-1, k).to(weight_R.dtype) if needs_weight else None
        d_x_TD = None
        if needs_x:
            d_x_RD = products("rows", d_h_RH, up_EHD, begins_E1, ("B",))
            if rows is None:
                d_x_TD = permute.gather(d_x_RD, back_R, k)
            else:
                rows.give(d_x_RD, back_R, k)
        return d_x_TD, d_weight_TK, None, d_up_EHD, d_down_EDF, None, d_y_TD if needs_onto else None, None


ffn = partial(_narrow.ffn, function=_Tokens)


def fused(x_TD: Tensor, up: Tensor, down: Tensor, activation: str) -> TokenFunction | None:
    return ffn if fits(x_TD, up, down, activation) else None


def kept(tokens: int, experts: int, hidden: int, width: int, matrices: int) -> int | None:
    """Return how many numbers of each row stay for backward: only its first product, because tokens hold x."""
    return matrices * width


CAPABILITIES = Capabilities(
    speed=2, refuses=refuses, waitless=True, opaque=True, fused=fused, kept=kept, kernels=("quackgemm",)
)


def of_long_sums(x_TD: Tensor, down_EDF: Tensor) -> bool:
    """Return whether our kernels for narrow experts compute the sums over rows, in pieces."""
    experts, hidden, width = down_EDF.shape
    return _narrow.near(len(x_TD), experts, hidden, width)


def long_sums(
    d_h_RH: Tensor | None, x_TD: Tensor, a_RF: Tensor | None, d_y_TD: Tensor, token_R: Tensor, begins_E1: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return (d_up_EHD, d_down_EDF), computed by our kernels for narrow experts."""
    from training.kernels.triton import narrow as narrow_triton  # here, because a machine without a GPU has no triton

    ends_E, size = begins_E1[1:], narrow_triton.long_piece(len(token_R))
    pieces = narrow_triton.cut(ends_E, len(token_R), size, 1)
    d_up_EHD = d_down_EDF = None
    if d_h_RH is not None:
        d_up_EHD = narrow_triton.sums(d_h_RH, x_TD, token_R, ends_E, pieces, size, False, paired=True)
    if a_RF is not None:
        d_down_EDF = narrow_triton.sums(a_RF, d_y_TD, token_R, ends_E, pieces, size, True)
    return d_up_EHD, d_down_EDF


# ---- the package's products


def up(x: Tensor, token_R: Tensor | None, begins_E1: Tensor, up_EHD: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return (h_RH, a_RF) without routing weights; `token_R` is each row's token in x (None: x holds the rows)."""
    rows, both = len(x if token_R is None else token_R), up_EHD.shape[1]
    h_RH, a_RF = x.new_empty(rows, both), x.new_empty(rows, both // 2)
    if rows:
        package().gemm_gated(
            x, up_EHD.mT, preact_out=h_RH, postact_out=a_RF, activation=GATED[activation], cu_seqlens_m=begins_E1,
            A_idx=token_R, config=tile("up" if token_R is None else "up of tokens", x.shape[1]), concat_layout=("B",),
        )  # fmt: skip
    return h_RH, a_RF


def back(
    d_y: Tensor, token_R: Tensor | None, begins_E1: Tensor, down_EDF: Tensor, h_RH: Tensor, weight_R: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (d_h_RH, a_RF times the routing weight, d_weight_R in float32)."""
    d_h_RH, a_RF = torch.empty_like(h_RH), h_RH.new_empty(len(h_RH), h_RH.shape[1] // 2)
    if not len(h_RH):
        return d_h_RH, a_RF, torch.zeros_like(weight_R)
    wide = torch.promote_types(weight_R.dtype, torch.float32)
    made: tuple[Tensor, Tensor, Tensor] = package().gemm_dgated(
        d_y, down_EDF, h_RH, dx_out=d_h_RH, postact_out=a_RF, colvec_scale=weight_R.to(wide),
        activation=GATED[activation], colvec_reduce=True, cu_seqlens_m=begins_E1, A_idx=token_R,
        dynamic_scheduler=False, config=tile("back" if token_R is None else "back of tokens", d_y.shape[1]),
    )  # fmt: skip
    return made


def products(name: str, a_RK: Tensor, b_EKN: Tensor, begins_E1: Tensor, mixed: tuple[str, ...] | None = None) -> Tensor:
    """Return the product of each row with its expert's matrix."""
    out = a_RK.new_empty(len(a_RK), b_EKN.shape[2])
    if len(out):
        config = tile(name, b_EKN.shape[2])  # "down" and "rows" both end at the hidden size
        package().gemm_tuned.fn(a_RK, b_EKN, out, cu_seqlens_m=begins_E1, config=config, concat_layout=mixed)
    return out


def sum_up(d_h_RH: Tensor, x_RD: Tensor, begins_E1: Tensor) -> Tensor:
    out_EHD = x_RD.new_empty(len(begins_E1) - 1, d_h_RH.shape[1], x_RD.shape[1])
    if not len(x_RD):
        return out_EHD.zero_()
    config = tile("sum up", x_RD.shape[1])
    package().gemm_tuned.fn(x_RD.T, d_h_RH, out_EHD.mT, cu_seqlens_k=begins_E1, config=config, concat_layout=("out",))
    return out_EHD


def sum_down(a_RF: Tensor, d_y_RD: Tensor, begins_E1: Tensor) -> Tensor:
    out_EDF = a_RF.new_empty(len(begins_E1) - 1, d_y_RD.shape[1], a_RF.shape[1])
    if not len(a_RF):
        return out_EDF.zero_()
    package().gemm_tuned.fn(d_y_RD.T, a_RF, out_EDF, cu_seqlens_k=begins_E1, config=tile("sum down", d_y_RD.shape[1]))
    return out_EDF


def package() -> Any:
    return importlib.import_module("quack.gemm_interface")


@cache
def tile(name: str, hidden: int) -> Any:
    found = TILES[name][sum(hidden >= limit for limit in LIMITS)]
    if found is None:
        return None
    rows, columns, alternate, along_rows, along_columns = found
    config = importlib.import_module("quack.gemm_config").GemmConfig
    return config(
        tile_m=rows, tile_n=columns, pingpong=alternate, cluster_m=along_rows, cluster_n=along_columns,
        is_dynamic_persistent=False,
    )  # fmt: skip
