"""On a GPU: attention in blocks against the masked product in float64; compiled, recomputed, without waiting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.training.test_attention import in_any_order, rising
from training.checkpoint.layout import initialise
from training.model.attention import Sdpa, Seen, look, visible
from training.model.decoder import Decoder
from training.model.recompute import recompute
from upcycle.arch.spec import DenseSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE, SCALE = torch.device("cuda"), 0.11


def tensors(length: int, heads: int, groups: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, length, n, size) for n in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=draw, device=DEVICE).to(dtype) for shape in shapes]


def attended(given: list[Tensor], window: int | None, seen: Seen, cap: float = 0.0) -> list[Tensor]:
    """`given`: tensors(), and the logits of sinks where heads have them."""
    q, k, v, *sinks = (x.detach().requires_grad_() for x in (*given[:3], *given[4:]))
    y = Sdpa(window, SCALE, cap=cap)(q, k, v, seen, *sinks)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v, *sinks), given[3])]


def exact(given: list[Tensor], window: int | None, documents: Tensor | None, cap: float = 0.0) -> list[Tensor]:
    q, k, v = (x.detach().double().transpose(1, 2).requires_grad_() for x in given[:3])
    copies, length = q.shape[1] // k.shape[1], q.shape[2]
    mask = visible(length, window, documents, DEVICE)
    mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril() if mask is None else mask
    logits = q @ k.repeat_interleave(copies, 1).mT * SCALE
    logits = (cap * torch.tanh(logits / cap) if cap else logits).masked_fill(~mask, -math.inf)
    sinks = [x.detach().double().requires_grad_() for x in given[4:]]
    columns = [x[:, None, None].expand(*logits.shape[:3], 1) for x in sinks]
    y = torch.cat((logits, *columns), -1).softmax(-1)[..., :length] @ v.repeat_interleave(copies, 1)
    grads = torch.autograd.grad(y, (q, k, v, *sinks), given[3].double().transpose(1, 2))
    return [x.detach().transpose(1, 2) if x.dim() > 1 else x.detach() for x in (y, *grads)]


def far(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((g.double() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(("window", "documents"), [(None, None), (128, None), (128, 300), (None, 300)])
def test_sinks_in_blocks_and_without(window: int | None, documents: int | None) -> None:
    number = None if documents is None else rising(2, 1024, documents).to(DEVICE)
    given = [*tensors(1024, 16, 2, 64), torch.linspace(-2, 6, 16, device=DEVICE)]
    want = exact(given, window, number)
    seen = look(number, 1024, [window], DEVICE, torch.bfloat16)
    assert (window in seen.blocks) == (window is not None or documents is not None)
    assert far(attended(given, window, seen), want) < 0.01
    assert far(attended(given, window, Seen(number)), want) < 0.01, "and with a mask"
    assert far(attended(given[:4], window, seen), want[:4]) > 0.1, "sinks matter"


@pytest.mark.parametrize(
    ("name", "window", "length", "heads", "groups", "size"),
    [
        ("short", None, 512, 8, 2, 64),
        ("long", None, 1024, 8, 8, 128),
        ("long", 200, 1024, 8, 2, 128),
        ("none", 200, 1024, 8, 1, 64),
        ("none", 100, 300, 4, 4, 64),
        ("long", None, 300, 6, 2, 80),
        ("in any order", None, 700, 8, 2, 64),
    ],
)
def test_blocks_are_the_masked_product(
    name: str, window: int | None, length: int, heads: int, groups: int, size: int
) -> None:
    documents = {
        "short": rising(2, length, 20), "long": rising(2, length, 300), "none": None,
        "in any order": in_any_order(2, length),
    }[name]  # fmt: skip
    documents = None if documents is None else documents.to(DEVICE)
    given = tensors(length, heads, groups, size)
    seen = look(documents, length, [window], DEVICE, torch.bfloat16)
    assert window in seen.blocks
    want = exact(given, window, documents)
    # bfloat16 rounds the weights and the result, 2^-9 each; a key too many or too few is more than a tenth
    assert far(attended(given, window, seen), want) < 0.01
    assert far(attended(given, window, Seen(documents)), want) < 0.01, "and so is the mask"
    other = look(rising(2, length, 50, seed=3).to(DEVICE), length, [window], DEVICE, torch.bfloat16)
    assert far(attended(given, window, other), want) > 0.1


@pytest.mark.parametrize(("window", "size"), [(None, 64), (200, 64), (None, 256)])
def test_a_soft_cap_in_blocks_is_the_formula(window: int | None, size: int) -> None:
    """Where only causality hides, too. 256: a head of Gemma 2."""
    given = tensors(512, 8, 4, size)
    seen = look(None, 512, [window], DEVICE, torch.bfloat16, capped=True)
    assert window in seen.blocks
    want = exact(given, window, None, cap=0.7)
    assert far(attended(given, window, seen, cap=0.7), want) < 0.01
    assert far(attended(given, window, Seen(), cap=0.7), want) < 0.01, "and so are the plain lines"
    assert far(attended(given, window, seen), want) > 0.1


def test_no_square_is_held() -> None:
    length = 16_384
    documents = rising(2, length, 500).to(DEVICE)
    given = tensors(length, 2, 1, 64)
    attended(given, None, look(documents, length, [None], DEVICE, torch.bfloat16))  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attended(given, None, look(documents, length, [None], DEVICE, torch.bfloat16))
    assert torch.cuda.max_memory_allocated() - before < length * length / 4, "bytes; a mask has a byte for each pair"


SPEC = DenseSpec(
    "llama", layers=3, hidden=256, ffn=256, heads=4, kv_heads=2, head_dim=64, vocab=100, context=1024, init_std=0.06,
    window=150, window_layers=(1,),
)  # fmt: skip


def gradients(mode: str, compiled: bool, seeds: range) -> tuple[list[Tensor], list[Tensor]]:
    """After the first step neither may wait for the device nor compile anything."""
    model = initialise(Decoder(SPEC, compute=torch.bfloat16).to(DEVICE))
    recompute(model, mode)
    if compiled:
        model.compile_parts()
    losses = []
    batches = [[x.to(DEVICE) for x in batch(seed)] for seed in seeds]
    for number, (tokens, labels, documents) in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                loss = model.loss(tokens, labels, documents_BS=documents)
                loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(100, (2, 2, 512), generator=draw)
    return tokens, labels, rising(2, 512, 60, seed)


@pytest.mark.parametrize(("mode", "compiled"), [("none", False), ("full", False), ("selective", True), ("full", True)])
def test_a_model_compiled_and_recomputed_neither_waits_nor_compiles_anew(mode: str, compiled: bool) -> None:
    torch._dynamo.reset()
    losses, found = gradients(mode, compiled, range(3))
    wide = initialise(Decoder(SPEC).to(DEVICE))  # float32: masks
    wanted = []
    for seed in range(3):
        tokens, labels, documents = (x.to(DEVICE) for x in batch(seed))
        loss = wide.loss(tokens, labels, documents_BS=documents)
        loss.backward()
        wanted.append(loss.detach())
    for got, want in zip(losses, wanted, strict=True):
        assert abs(float(got / want) - 1) < 0.01
    # bfloat16 in three layers: 0.03 for the worst gradient with masks on a CPU
    assert far(found, [p.grad.double() for p in wide.parameters() if p.grad is not None]) < 0.05


def test_no_gradient_is_copied_on_its_way_through_blocks() -> None:
    """The output's gradient lies as the output does, tokens first; compiled code must not want it otherwise."""
    given = tensors(512, 4, 2, 64)
    seen = look(rising(2, 512, 200).to(DEVICE), 512, [None], DEVICE, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    for _ in range(2):
        y = Sdpa(None, SCALE)(leaves[0], leaves[1], leaves[2], seen)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            gradients = torch.autograd.grad(y, leaves, given[3])
            torch.cuda.synchronize()
    names = [event.name for event in found.events()]
    assert any("flex" in name for name in names), names
    assert not [name for name in names if "copy" in name.lower()], names
    assert all(gradient.is_contiguous() for gradient in gradients)
