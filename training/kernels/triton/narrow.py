"""The Triton kernels of experts/_narrow.py; imported only where they run.

The device cuts the work into pieces, which hold rows of one expert. Row kernels take pieces of one tile's rows. Sums
over rows take long pieces, the longest first, so that an expert with many rows does not finish last alone."""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from training.kernels.triton.swiglu import act_and_slope, factor_and_slope

CUT = 128  # pieces that a program of `cut` describes
ROWS = 128  # rows of a tile
LONG = 16384  # rows of a piece of a sum; a 32nd of all rows if that is more


def long_piece(rows: int) -> int:
    return max(LONG, triton.next_power_of_2(rows // 32))


@triton.jit
def cut_kernel(
    ends_ptr, map_ptr, P, E, SIZE: tl.constexpr, LEAST: tl.constexpr, SORT: tl.constexpr,
    CUT: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write map[0:4, p] of piece p: its expert, first row, end, and p if the expert has several pieces, else -1."""
    piece, e = tl.program_id(0) * CUT + tl.arange(0, CUT), tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    count = end - tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    pieces = tl.maximum((count + SIZE - 1) // SIZE, LEAST)
    pieces = tl.where(e < E, pieces, 0)
    until = tl.cumsum(pieces, 0)
    past = (until[None, :] <= piece[:, None]) & (e < E)[None, :]
    mine = tl.sum(past.to(tl.int32), 1)
    before = tl.max(tl.where(past, until[None, :], 0), 1)
    start = tl.max(tl.where(past, end[None, :], 0), 1)
    this = mine[:, None] == e[None, :]
    stop = tl.sum(tl.where(this, end[None, :], 0), 1)
    several = tl.sum(tl.where(this, pieces[None, :], 0), 1) > 1
    first = start + (piece - before) * SIZE
    last = tl.minimum(first + SIZE, stop)
    live = mine < E
    first, last = tl.where(live, first, 0), tl.where(live, last, 0)
    slot = tl.where(several & live, piece, -1)
    at = piece
    if SORT:  # the longest first, unused pieces at the end
        size = tl.where(live, last - first, -1)
        ahead = (size[None, :] > size[:, None]) | ((size[None, :] == size[:, None]) & (piece[None, :] < piece[:, None]))
        at = tl.sum(ahead.to(tl.int32), 1)
    keep = piece < P
    tl.store(map_ptr + at, tl.where(live, mine, -1), mask=keep)
    tl.store(map_ptr + P + at, first, mask=keep)
    tl.store(map_ptr + 2 * P + at, last, mask=keep)
    tl.store(map_ptr + 3 * P + at, slot, mask=keep)


@triton.jit
def put(desc, ptr, tile, first, last, n, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Write the rows of a tile that are before `last`; in one store if all of them are."""
    if last - first == BM:
        desc.store([first, n], tile)
    else:
        row, col = first + tl.arange(0, BM), n + tl.arange(0, BN)
        keep = (row < last)[:, None] & (col < N)[None, :]
        tl.store(ptr + row.to(tl.int64)[:, None] * N + col[None, :], tile, mask=keep)


@triton.jit
def up_kernel(
    x_ptr, token_ptr, up_desc, weight_ptr, map_ptr, h_ptr, a_ptr, P, D: tl.constexpr, F: tl.constexpr,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute h = x up^T, with each row of x read from its token, and a = act(gate) * up * weight."""
    tiles: tl.constexpr = (F + BN - 1) // BN
    piece, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BN
    first, last = tl.load(map_ptr + P + piece), tl.load(map_ptr + 2 * P + piece)
    if first == last:
        return
    at = tl.load(map_ptr + piece) * (2 * F) + n
    row = first + tl.arange(0, BM)
    live = row < last
    token = tl.load(token_ptr + row, mask=live, other=0).to(tl.int64)
    x_ptrs = x_ptr + token[:, None] * D + tl.arange(0, BK)[None, :]
    gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        x = tl.load(x_ptrs + k)
        gate = tl.dot(x, up_desc.load([at, k]).T, gate)
        up = tl.dot(x, up_desc.load([at + F, k]).T, up)
    weight = tl.load(weight_ptr + row, mask=live, other=0.0).to(tl.float32)
    col = n + tl.arange(0, BN)
    keep = live[:, None] & (col < F)[None, :]
    wide = row.to(tl.int64)[:, None]
    gate, up = gate.to(h_ptr.dtype.element_ty), up.to(h_ptr.dtype.element_ty)
    h_ptrs = h_ptr + wide * (2 * F) + col[None, :]
    tl.store(h_ptrs, gate, mask=keep)
    tl.store(h_ptrs + F, up, mask=keep)
    act, _ = act_and_slope(gate.to(tl.float32), ACT)
    factor, _ = factor_and_slope(up.to(tl.float32), ACT)
    a = act * factor * weight[:, None]
    tl.store(a_ptr + wide * F + col[None, :], a.to(a_ptr.dtype.element_ty), mask=keep)


@triton.jit
def write_d_h(
    d_a, weight, d_weight, h_desc, d_h_ptr, first, last, n, F: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write d_h of some columns; return d_weight plus their share."""
    act, slope = act_and_slope(h_desc.load([first, n]).to(tl.float32), ACT)
    factor, bent = factor_and_slope(h_desc.load([first, n + F]).to(tl.float32), ACT)
    d_weight += tl.sum(d_a * (act * factor), 1)  # d_a is 0 beyond the columns, where nothing was loaded
    d_a *= weight[:, None]
    row, col = first + tl.arange(0, BM), n + tl.arange(0, BN)
    keep = (row < last)[:, None] & (col < F)[None, :]
    d_h_ptrs = d_h_ptr + row.to(tl.int64)[:, None] * (2 * F) + col[None, :]
    # by pointers, because stores by descriptors took 6 % longer
    tl.store(d_h_ptrs, (d_a * slope * factor).to(d_h_ptr.dtype.element_ty), mask=keep)
    tl.store(d_h_ptrs + F, (d_a * act * bent).to(d_h_ptr.dtype.element_ty), mask=keep)
    return d_weight


@triton.jit
def back_kernel(
    d_y_desc, down_desc, down2_desc, h_desc, weight_ptr, map_ptr, d_h_ptr, part_ptr, P, R,
    D: tl.constexpr, F: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute d_a = d_y down without storing it, and write d_h and a tile's share of the routing weights' gradients.
    A tile is BN + BN2 wide; BN2 is half of BN, or 0."""
    wide: tl.constexpr = BN + BN2
    tiles: tl.constexpr = (F + wide - 1) // wide
    piece, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tile * wide
    first, last = tl.load(map_ptr + P + piece), tl.load(map_ptr + 2 * P + piece)
    if first == last:
        return
    at = tl.load(map_ptr + piece) * D
    d_a = tl.zeros((BM, BN), tl.float32)
    if BN2:
        d_a2 = tl.zeros((BM, BN2), tl.float32)
    for k in range(0, D, BK):
        d_y = d_y_desc.load([first, k])
        d_a = tl.dot(d_y, down_desc.load([at + k, n]), d_a)
        if BN2:
            d_a2 = tl.dot(d_y, down2_desc.load([at + k, n + BN]), d_a2)
    row = first + tl.arange(0, BM)
    live = row < last
    weight = tl.load(weight_ptr + row, mask=live, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BM,), tl.float32)
    # a whole tile at once would take more registers than two programs of a multiprocessor have
    HALF: tl.constexpr = BN // 2
    halves = d_a.reshape(BM, 2, HALF).permute(0, 2, 1).split()
    for half in tl.static_range(2):
        at = n + half * HALF
        d_weight = write_d_h(halves[half], weight, d_weight, h_desc, d_h_ptr, first, last, at, F, ACT, BM, HALF)
    if BN2:
        d_weight = write_d_h(d_a2, weight, d_weight, h_desc, d_h_ptr, first, last, n + BN, F, ACT, BM, BN2)
    tl.store(part_ptr + tile * R + row, d_weight, mask=live)


@triton.jit
def rows_kernel(
    a_desc, b_desc, b2_desc, out_desc, out2_desc, map_ptr, out_ptr, P,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply each row by its expert's matrix, (N, K), or (K, N) if TURNED. ROWS: rows of a matrix. A tile is BN + BN2
    wide, because 576 columns are three times 192, which is not a power of two."""
    tiles: tl.constexpr = (N + BN + BN2 - 1) // (BN + BN2)
    piece, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles * (BN + BN2)
    first, last = tl.load(map_ptr + P + piece), tl.load(map_ptr + 2 * P + piece)
    if first == last:
        return
    at = tl.load(map_ptr + piece) * ROWS
    y = tl.zeros((BM, BN), tl.float32)
    if BN2:
        y2 = tl.zeros((BM, BN2), tl.float32)
    for k in range(0, K, BK):
        a = a_desc.load([first, k])
        y = tl.dot(a, b_desc.load([at + k, n]) if TURNED else b_desc.load([at + n, k]).T, y)
        if BN2:
            y2 = tl.dot(a, b2_desc.load([at + k, n + BN]) if TURNED else b2_desc.load([at + n + BN, k]).T, y2)
    put(out_desc, out_ptr, y.to(out_ptr.dtype.element_ty), first, last, n, N, BM, BN)
    if BN2:
        put(out2_desc, out_ptr, y2.to(out_ptr.dtype.element_ty), first, last, n + BN, N, BM, BN2)


@triton.jit
def apart(m, M: tl.constexpr, PAIRED: tl.constexpr):
    """Return the place of row m of a sum; if PAIRED, the first rows of all pairs come before the second rows."""
    return m % 2 * (M // 2) + m // 2 if PAIRED else m


@triton.jit
def sums_kernel(
    a_ptr, a_desc, b_ptr, b_desc, b2_desc, token_ptr, map_ptr, out_ptr, part_ptr, P,
    M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, PAIRED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN2: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Compute a^T b over the rows of a piece: an expert's whole sum, or a part that `sums_total_kernel` adds to others.
    If GATHER, b's rows are read from tokens. The sum is (M, N), with its pairs of rows apart if PAIRED, or (N, M) if
    TURNED."""
    wide: tl.constexpr = BN + BN2
    across: tl.constexpr = (N + wide - 1) // wide
    tiles: tl.constexpr = (M + BM - 1) // BM * across
    piece, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    m, n = tile // across * BM, tile % across * wide
    expert = tl.load(map_ptr + piece)
    first, last, slot = tl.load(map_ptr + P + piece), tl.load(map_ptr + 2 * P + piece), tl.load(map_ptr + 3 * P + piece)
    if expert < 0:
        return
    row_m, col, col2 = m + tl.arange(0, BM), n + tl.arange(0, BN), n + BN + tl.arange(0, BN2 if BN2 else 16)
    total = tl.zeros((BM, BN), tl.float32)
    if BN2:
        total2 = tl.zeros((BM, BN2), tl.float32)
    k = tl.arange(0, BK)
    whole = first + (last - first) // BK * BK
    if GATHER:
        token = tl.load(token_ptr + first + k, mask=first + k < last, other=0)
    for row in range(first, whole, BK):
        a = a_desc.load([row, m])
        if GATHER:
            at = token.to(tl.int64)[:, None] * N
            token = tl.load(token_ptr + row + BK + k, mask=row + BK + k < last, other=0)
            b = tl.load(b_ptr + at + col[None, :], mask=(col < N)[None, :], other=0.0)
        else:
            b = b_desc.load([row, n])
        total = tl.dot(a.T, b, total)
        if BN2:
            total2 = tl.dot(a.T, b2_desc.load([row, n + BN]), total2)
    if whole < last:  # the rows after these belong to another piece, or hold anything
        rest = whole + k
        live = rest < last
        wide_rest = rest.to(tl.int64)
        a_ptrs = a_ptr + wide_rest[:, None] * M + row_m[None, :]
        a_rest = tl.load(a_ptrs, mask=live[:, None] & (row_m < M)[None, :], other=0.0)
        if GATHER:
            wide_rest = token.to(tl.int64)
        b_ptrs = b_ptr + wide_rest[:, None] * N
        b_rest = tl.load(b_ptrs + col[None, :], mask=live[:, None] & (col < N)[None, :], other=0.0)
        total = tl.dot(a_rest.T, b_rest, total)
        if BN2:
            b2_rest = tl.load(b_ptrs + col2[None, :], mask=live[:, None] & (col2 < N)[None, :], other=0.0)
            total2 = tl.dot(a_rest.T, b2_rest, total2)
    down = (row_m < M)[:, None]
    if slot >= 0:
        part_ptrs = part_ptr + (slot.to(tl.int64) * M + row_m[:, None]) * N
        tl.store(part_ptrs + col[None, :], total, mask=down & (col < N)[None, :])
        if BN2:
            tl.store(part_ptrs + col2[None, :], total2, mask=down & (col2 < N)[None, :])
    else:
        out_ptrs = out_ptr + expert.to(tl.int64) * (M * N)
        if TURNED:
            out = total.to(out_ptr.dtype.element_ty).T
            tl.store(out_ptrs + col[:, None] * M + row_m[None, :], out, mask=(col < N)[:, None] & (row_m < M)[None, :])
            if BN2:
                out = total2.to(out_ptr.dtype.element_ty).T
                keep = (col2 < N)[:, None] & (row_m < M)[None, :]
                tl.store(out_ptrs + col2[:, None] * M + row_m[None, :], out, mask=keep)
        else:
            out_ptrs += apart(row_m, M, PAIRED)[:, None] * N
            tl.store(out_ptrs + col[None, :], total.to(out_ptr.dtype.element_ty), mask=down & (col < N)[None, :])
            if BN2:
                tl.store(out_ptrs + col2[None, :], total2.to(out_ptr.dtype.element_ty), mask=down & (col2 < N)[None, :])


@triton.jit
def sums_total_kernel(
    ends_ptr, part_ptr, out_ptr, E, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, PAIRED: tl.constexpr,
    SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Add an expert's parts in order; do nothing if the expert had one piece."""
    expert, e = tl.program_id(1), tl.arange(0, EXPERTS)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    count = end - tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    pieces = tl.where(e < E, tl.maximum((count + SIZE - 1) // SIZE, 1), 0)
    parts = tl.sum(tl.where(e == expert, pieces, 0), 0)
    if parts > 1:
        start = tl.sum(tl.where(e < expert, pieces, 0), 0).to(tl.int64)
        across: tl.constexpr = (N + BN - 1) // BN
        m = tl.program_id(0) // across * BM + tl.arange(0, BM)
        n = tl.program_id(0) % across * BN + tl.arange(0, BN)
        keep = (m < M)[:, None] & (n < N)[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for part in range(parts):
            total += tl.load(part_ptr + ((start + part) * M + m[:, None]) * N + n[None, :], mask=keep, other=0.0)
        out_ptrs, out = out_ptr + expert.to(tl.int64) * (M * N), total.to(out_ptr.dtype.element_ty)
        if TURNED:
            keep = (n < N)[:, None] & (m < M)[None, :]
            tl.store(out_ptrs + n[:, None] * M + m[None, :], out.T, mask=keep)
        else:
            tl.store(out_ptrs + apart(m, M, PAIRED)[:, None] * N + n[None, :], out, mask=keep)


def cut(ends_E: Tensor, rows: int, size: int, least: int = 0) -> Tensor:
    """Return the map of cut_kernel, (4, P), of pieces of at most `size` rows. With `least` 1, experts without rows have
    one empty piece, and the pieces are sorted by length."""
    experts = len(ends_E)
    pieces = rows // size + experts
    where = torch.empty(4, pieces, dtype=torch.int32, device=ends_E.device)
    span = triton.next_power_of_2(pieces) if least else CUT
    sizes = {"CUT": span, "EXPERTS": triton.next_power_of_2(experts)}
    cut_kernel[(triton.cdiv(pieces, span),)](
        ends_E, where, pieces, experts, SIZE=size, LEAST=least, SORT=bool(least), num_warps=8 if least else 4, **sizes
    )
    return where


# The tiles, warps, stages and registers below were the fastest of those tried, for each product by itself and experts
# of 576 x 384, on an H200 (docs/performance.md).


def flat(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor.reshape(-1, tensor.shape[-1]), [rows, columns])


def up(
    x_TD: Tensor, token_R: Tensor, weight_R: Tensor, up_EHD: Tensor, where: Tensor, activation: str,
    BM=ROWS, BN=64, BK=64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (h_RH, a_RF) of gated experts."""
    rows, (_, both, hidden) = len(weight_R), up_EHD.shape
    h_RH, a_RF = x_TD.new_empty(rows, both), x_TD.new_empty(rows, both // 2)
    up_kernel[(where.shape[1] * triton.cdiv(both // 2, BN),)](
        x_TD, token_R, flat(up_EHD, BN, BK), weight_R, where, h_RH, a_RF, where.shape[1], hidden, both // 2,
        ACT=activation, BM=BM, BN=BN, BK=BK, num_warps=8, num_stages=3,
    )  # fmt: skip
    return h_RH, a_RF


def back(
    d_y_RD: Tensor, down_EDF: Tensor, h_RH: Tensor, weight_R: Tensor, where: Tensor, activation: str,
    BM=ROWS, BN=64, BN2=None, BK=64, stages=4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (d_h_RH, d_weight_R): the gradients through the second product and the activation."""
    rows, (_, hidden, width) = len(h_RH), down_EDF.shape
    BN2 = (BN // 2 if width % (BN + BN // 2) == 0 else 0) if BN2 is None else BN2
    d_h_RH, tiles = torch.empty_like(h_RH), triton.cdiv(width, BN + BN2)
    part = torch.empty(tiles, rows, dtype=torch.float32, device=h_RH.device)
    back_kernel[(where.shape[1] * tiles,)](
        flat(d_y_RD, BM, BK), flat(down_EDF, BK, BN), flat(down_EDF, BK, BN2 or BN), flat(h_RH, BM, BN // 2),
        weight_R, where, d_h_RH, part, where.shape[1], rows, hidden, width,
        ACT=activation, BM=BM, BN=BN, BN2=BN2, BK=BK, num_warps=8, num_stages=stages, maxnreg=128,
    )  # fmt: skip
    return d_h_RH, part.sum(0).to(weight_R.dtype)


def products(a_RK: Tensor, b_E: Tensor, where: Tensor, turned: bool, BM=ROWS, BN=128, BK=None) -> Tensor:
    """Return each row of a times its expert's matrix of b_E, (E, N, K), or (E, K, N) if turned."""
    k, n = b_E.shape[1:] if turned else b_E.shape[:0:-1]
    out, second = a_RK.new_empty(len(a_RK), n), beside(n)
    BK, stages, registers = (BK or 32, 5, 128) if second else (BK or 64, 3, None)
    descs = [flat(b_E, *((BK, size) if turned else (size, BK))) for size in (BN, second or BN)]
    descs += [flat(out, BM, size) for size in (BN, second or BN)]
    rows_kernel[(where.shape[1] * triton.cdiv(n, BN + second),)](
        flat(a_RK, BM, BK), *descs, where, out, where.shape[1], k, n, b_E.shape[1],
        TURNED=turned, BM=BM, BN=BN, BN2=second, BK=BK, num_warps=8, num_stages=stages, maxnreg=registers,
    )  # fmt: skip
    return out


def sums(
    a_RM: Tensor, b: Tensor, token_R: Tensor | None, ends_E: Tensor, where: Tensor, size: int, turned: bool,
    paired=False, BM=ROWS, BN=128, BK=64,
) -> Tensor:  # fmt: skip
    """Return a^T b over each expert's rows, (E, M, N), or (E, N, M) if turned; with `token_R` b holds tokens, not rows.
    `where` is cut(ends_E, rows, size, 1). With `paired`, a's columns are pairs, and the sum has the first of all pairs
    before the second."""
    (_, m), n, experts, pieces = a_RM.shape, b.shape[1], len(ends_E), where.shape[1]
    out = a_RM.new_empty((experts, n, m) if turned else (experts, m, n))
    part = torch.empty(pieces, m, n, dtype=torch.float32, device=b.device)
    second = beside(n) if token_R is None else 0
    sums_kernel[(pieces * triton.cdiv(m, BM) * triton.cdiv(n, BN + second),)](
        a_RM, flat(a_RM, BK, BM), b, flat(b, BK, BN), flat(b, BK, second or BN), token_R, where, out, part, pieces,
        m, n, TURNED=turned, PAIRED=paired, BM=BM, BN=BN, BN2=second, BK=BK, GATHER=token_R is not None,
        num_warps=8, num_stages=4 if second else 3,
    )  # fmt: skip
    sums_total_kernel[(triton.cdiv(m, 64) * triton.cdiv(n, 64), experts)](
        ends_E, part, out, experts, m, n, TURNED=turned, PAIRED=paired, SIZE=size, BM=64, BN=64,
        EXPERTS=triton.next_power_of_2(experts), num_warps=4,
    )  # fmt: skip
    return out


def beside(columns: int) -> int:
    """Return the columns of a tile's second part: 64 where 192 divides `columns` and 128 does not, else 0."""
    return 64 if columns % 192 == 0 and columns % 128 else 0
