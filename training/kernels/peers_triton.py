"""The Triton kernels of dispatch/nvlink.py: rows between GPUs that reach each other's memory; imported only where a
kernel runs.

Addresses of the ranks' slots come as an int64 tensor, so any number of ranks is one kernel. Nothing but `meet` waits
for another rank, and that is one program: a kernel that filled the GPU while it waits could keep away the collective
that the other rank waits for. Its loop is bounded.

P ranks, T tokens of a rank, K choices, D width, L experts of a rank, R rows that this rank has memory for. A slot:
rows of T * D (way out) or P * T * D (way home), then T * K chosen experts, then T * K weights.
"""

# mypy: ignore-errors
# Triton's language only looks like Python: its pointers and blocks have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = 2**31 - 1  # the row of a choice whose expert is on another rank


@triton.jit
def meet_kernel(pad_ptrs, state_ptr, me, P, PATIENCE):
    """All ranks come here before any goes on. state: how often they have met, and 1 + who did not come."""
    meeting = tl.load(state_ptr) + 1
    tl.debug_barrier()
    for p in range(P):
        there = tl.load(pad_ptrs + p).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(there + me, meeting, sem="release", scope="sys")
    here = tl.load(pad_ptrs + me).to(tl.pointer_type(tl.int32))
    for p in range(P):
        tries = 0
        seen = tl.atomic_add(here + p, 0, sem="acquire", scope="sys")
        while (seen - meeting < 0) & (tries < PATIENCE):
            seen = tl.atomic_add(here + p, 0, sem="acquire", scope="sys")
            tries += 1
        if seen - meeting < 0:
            tl.store(state_ptr + 1, 1 + p)
    tl.debug_barrier()
    tl.store(state_ptr, meeting)


@triton.jit
def put_kernel(x_ptr, slot_ptr, D: tl.constexpr, COLS: tl.constexpr):
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    for start in tl.static_range(0, D, COLS):
        keep = start + col < D
        x = tl.load(x_ptr + token * D + start + col, mask=keep)
        tl.store(slot_ptr + token * D + start + col, x, mask=keep)


@triton.jit
def pull_kernel(
    slot_ptrs, back_ptr, out_ptr, me, P, T, R, D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Each token that has a choice here is read once, from its rank's slot, and written to its rows."""
    source, token = (me + tl.program_id(0) % P) % P, (tl.program_id(0) // P).to(tl.int64)
    choice, col = (source * T + token) * K, tl.arange(0, COLS)
    address = tl.multiple_of(tl.load(slot_ptrs + source), 16)
    x_ptr = tl.multiple_of(address.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    first = R
    for slot in tl.static_range(K):
        first = tl.minimum(first, tl.load(back_ptr + choice + slot))
    if first < R:
        for start in tl.static_range(0, D, COLS):
            keep = start + col < D
            x = tl.load(x_ptr + token * D + start + col, mask=keep)
            for slot in tl.static_range(K):
                row = tl.load(back_ptr + choice + slot).to(tl.int64)
                tl.store(out_ptr + row * D + start + col, x, mask=keep & (row < R))


@triton.jit
def push_kernel(
    y_ptr, slot_ptrs, back_ptr, me, P, T, R, D: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """The sum of a token's rows here goes to its rank's slot, once. One with rows that found no memory goes as nan."""
    source, token = (me + tl.program_id(0) % P) % P, (tl.program_id(0) // P).to(tl.int64)
    choice, col = (source * T + token) * K, tl.arange(0, COLS)
    address = tl.multiple_of(tl.load(slot_ptrs + source), 16)
    out_ptr = tl.multiple_of(address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    first, lost = 2147483647, False
    for slot in tl.static_range(K):
        at = tl.load(back_ptr + choice + slot)
        first = tl.minimum(first, at)
        lost |= (at >= R) & (at < 2147483647)
    if first < 2147483647:
        for start in tl.static_range(0, D, COLS):
            keep = start + col < D
            total = tl.zeros((COLS,), dtype=tl.float32)
            for slot in tl.static_range(K):
                row = tl.load(back_ptr + choice + slot).to(tl.int64)
                total += tl.load(y_ptr + row * D + start + col, mask=keep & (row < R), other=0.0).to(tl.float32)
            total = tl.where(lost, float("nan"), total)
            out = out_ptr + (me * T + token) * D + start + col
            tl.store(out, total.to(y_ptr.dtype.element_ty), mask=keep)
