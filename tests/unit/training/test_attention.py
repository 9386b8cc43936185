"""What blocks of 128 x 128 let a position see is what the dense mask lets it see, and no more work than need be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from training.kernels import attention as kernel
from training.model import attention
from training.model.attention import BLOCK, ORDER, Sdpa, Seen, block_mask, listed, look, visible
from training.model.decoder import Decoder
from training.model.layers import Attention
from upcycle.arch.spec import DenseSpec

CPU = torch.device("cpu")


def rising(sequences: int, length: int, mean: float, seed: int = 0) -> Tensor:
    """Documents of `mean` tokens on average, numbered as data.py numbers them."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(sequences, length, generator=draw) < 1 / mean).int().cumsum(1).int()


def in_any_order(sequences: int, length: int) -> Tensor:
    return torch.tensor([3, 1, 2, 1, 0, 3]).repeat_interleave(-(-length // 6))[:length].int().expand(sequences, -1)


DOCUMENTS = {
    "none": lambda b, s: None,
    "one": lambda b, s: torch.zeros(b, s, dtype=torch.int32),
    "short": lambda b, s: rising(b, s, 5),
    "long": lambda b, s: rising(b, s, 300),
    "in any order": in_any_order,
}
CASES = [
    (name, length, window)
    for name in DOCUMENTS
    for length in (129, 512, 700)
    for window in (None, 1, 100, 300)
    if name != "none" or (window is not None and window < length)
]


def chosen(count: Tensor, index: Tensor) -> Tensor:
    """[B, N, N] of BlockMask's lists."""
    rows = torch.zeros(index.shape, dtype=torch.bool)
    first = torch.arange(index.shape[-1]) < count[..., None]
    return rows.scatter(-1, index.long(), first)[:, 0]


@pytest.mark.parametrize(("name", "length", "window"), CASES)
def test_blocks_hold_what_is_visible(name: str, length: int, window: int | None) -> None:
    documents = DOCUMENTS[name](2, length)
    found = block_mask(documents, length, window, CPU)
    dense = visible(length, window, documents, CPU)
    assert dense is not None
    at = torch.arange(length)
    batch = torch.arange(len(dense))[:, None, None]
    assert torch.equal(found.mask_mod(batch, at, at[:, None], at).expand(dense[:, 0].shape), dense[:, 0])
    size = -(-length // BLOCK) * BLOCK
    squares = torch.nn.functional.pad(dense[:, 0].int(), (0, size - length, 0, size - length))
    squares = squares.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    partial = chosen(found.kv_num_blocks, found.kv_indices)
    whole = chosen(found.full_kv_num_blocks, found.full_kv_indices)
    assert not (partial & whole).any()
    assert (partial | whole)[squares.amax((2, 4)) > 0].all(), "all that is visible is in some block"
    assert (squares.amin((2, 4)) > 0)[whole].all(), "and nothing is hidden in a whole one"
    if name != "in any order":
        assert torch.equal(whole, squares.amin((2, 4)) > 0) and torch.equal(partial | whole, squares.amax((2, 4)) > 0)
    # backward goes by columns
    assert torch.equal(chosen(found.q_num_blocks, found.q_indices), partial.mT)
    assert torch.equal(chosen(found.full_q_num_blocks, found.full_q_indices), whole.mT)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "window"), [("short", None), ("long", 100), ("none", 100), ("in any order", None)])
def test_attention_in_blocks_is_attention(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "flex", flex_attention)  # not compiled: the same rules, in plain torch
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 300, heads, 16, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    documents = DOCUMENTS[name](2, 300)
    attend = Sdpa(window, 0.3)
    blocks = {window: block_mask(documents, 300, window, CPU)}
    expected, found = (attend(q, k, v, seen) for seen in (Seen(documents), Seen(documents, blocks)))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
    bent = Sdpa(window, 0.3, cap=0.7)
    dense, in_blocks = (bent(q, k, v, seen) for seen in (Seen(documents), Seen(documents, blocks)))
    assert torch.allclose(dense, in_blocks, rtol=1e-10, atol=1e-10) and not torch.allclose(dense, expected)
    sinks = torch.randn(4, generator=draw, dtype=torch.float64)
    dense, in_blocks = (attend(q, k, v, seen, sinks) for seen in (Seen(documents), Seen(documents, blocks)))
    assert torch.allclose(dense, in_blocks, rtol=1e-10, atol=1e-10) and not torch.allclose(dense, expected)
    other = rising(2, 300, 20, seed=9)
    assert not torch.allclose(attend(q, k, v, Seen(other, {window: block_mask(other, 300, window, CPU)})), expected)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_have_the_same_gradients_by_the_log_sum_exp_of_blocks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention has no backward on a CPU: plain torch is in its place, whose log-sum-exp is differentiated too."""
    documents = rising(2, 60, 15)
    mask = visible(60, window, documents, CPU)
    assert mask is not None
    bias = torch.zeros_like(mask, dtype=torch.float64).masked_fill_(~mask, kernel.NEVER)

    def flex(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> tuple[Tensor, Any]:
        y, lse = kernel.plain(q, k, v, bias, False, named["scale"])
        return y, SimpleNamespace(lse=lse)

    monkeypatch.setattr(attention, "flex", flex)
    draw = torch.Generator().manual_seed(1)
    shapes = [(2, 60, 4, 8), (2, 60, 2, 8), (2, 60, 2, 8), (4,)]
    given = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    blocks = {window: block_mask(documents, 60, window, CPU)}
    found = []
    for seen in (Seen(documents), Seen(documents, blocks)):
        q, k, v, sinks = given
        y = Sdpa(window, 0.3)(q, k, v, seen, sinks)
        found.append([y, *torch.autograd.grad(y, given, torch.ones_like(y).cumsum(1) / 30)])
    for want, got in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def test_lists_keep_their_order() -> None:
    [(count, index)] = listed(torch.tensor([[[[False, True, False, True]]]]))
    assert count.tolist() == [[[2]]] and index.tolist() == [[[[1, 3, 0, 2]]]]


def test_blocks_are_made_where_they_pay() -> None:
    documents = rising(1, 512, 50)
    for dtype, windows, length in ((torch.bfloat16, [None], 512), (torch.float64, [64], 512)):
        assert not look(documents, length, windows, CPU, dtype).blocks, "not on a CPU"


def test_strides_are_kept_where_torch_has_a_word_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch._functorch.config
    with config.patch(guess_tangent_strides_as_outputs=False):  # the default before torch 2.13
        with attention.kept_strides():
            assert config.guess_tangent_strides_as_outputs
        assert not config.guess_tangent_strides_as_outputs
    monkeypatch.setattr(torch._functorch, "config", SimpleNamespace())  # the word is to go one day
    with attention.kept_strides():
        pass


SPEC = DenseSpec("llama", layers=2, hidden=32, ffn=24, heads=4, kv_heads=2, head_dim=8, vocab=50, context=512)


@pytest.mark.filterwarnings("ignore:.*flex_attention")
def test_other_documents_do_not_compile_a_layer_anew() -> None:
    """Every step has other blocks and another rule, of one shape."""
    attention = Attention(SPEC, 0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    counter = CompileCounter()
    compiled = torch.compile(attention, backend=counter)
    x = torch.randn(2, 256, 32)
    angle = torch.rand(1, 256, 1, 4)
    with torch.no_grad():
        for seed in range(4):
            documents = rising(2, 256, 40, seed)
            seen = Seen(documents, {None: block_mask(documents, 256, None, CPU)})
            expected = attention(x, angle.cos(), angle.sin(), Seen(documents))
            assert torch.allclose(compiled(x, angle.cos(), angle.sin(), seen), expected, atol=1e-5)
    assert counter.frame_count == 1


def test_a_forward_says_once_which_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a layer alone says it for itself; afterwards all is as it was."""
    orders: list[list[int]] = []
    attend, enter, entered = functional.scaled_dot_product_attention, attention.sdpa_kernel, list[object]()

    def attended(*given: Any, **named: Any) -> Tensor:
        orders.append(torch._C._get_sdp_priority_order()[:4])
        return attend(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attended)
    monkeypatch.setattr(
        attention, "sdpa_kernel", lambda *given, **named: entered.append(given) or enter(*given, **named)
    )  # type: ignore[func-returns-value]
    before = torch._C._get_sdp_priority_order()
    decoder = Decoder(DenseSpec(**{**vars(SPEC), "layers": 3}))
    decoder(torch.zeros(1, 8, dtype=torch.long))
    assert len(orders) == 3 and len(entered) == 1 and torch._C._get_sdp_priority_order() == before
    Sdpa(None, 1.0)(*torch.zeros(3, 1, 8, 2, 4), Seen())
    assert orders == [ORDER] * 4 and len(entered) == 2 and torch._C._get_sdp_priority_order() == before
    assert before[:4] != ORDER


def test_a_decoders_layers_share_what_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DenseSpec(**{**vars(SPEC), "layers": 4, "window": 9, "window_layers": (1, 2)})
    with torch.device("meta"):
        decoder = Decoder(spec, compute=torch.bfloat16)
    asked: list[object] = []
    monkeypatch.setattr("training.model.decoder.look", lambda *given: asked.append(given) or Seen())  # type: ignore[func-returns-value]
    decoder(torch.zeros(1, 512, dtype=torch.long, device="meta"))
    assert len(asked) == 1
    assert asked[0][1:3] == (512, [None, 9, 9, None])  # type: ignore[index]
