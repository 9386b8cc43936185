"""A part's router rows that a GPU measures are those that a CPU measures."""

from __future__ import annotations

import pytest
import torch

from upcycle.text import parts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_row_of_a_gpu_is_that_of_a_cpu() -> None:
    draw = torch.Generator().manual_seed(0)
    common = 3 * torch.randn(576, generator=draw)
    general, own = torch.randn(2, 8192, 576, generator=draw) + common
    own += 0.1 * torch.randn(576, generator=draw)
    first = 5 * torch.randn(576, generator=draw) + 0.1 * torch.randn(64, 576, generator=draw)
    for dtype in (torch.float32, torch.bfloat16):
        want, kept = parts.row(general, own, first, dtype)
        found, left = parts.row(general.cuda(), own.cuda(), first.cuda(), dtype)
        assert found.is_cuda and kept[1] > 0.2
        torch.testing.assert_close(found.cpu(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        assert left == pytest.approx(kept, abs=1e-3)
