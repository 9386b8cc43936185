"""Tensors of a GPU reach a checkpoint's files byte for byte."""

from __future__ import annotations

import pytest
import torch

from training.checkpoint import storage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_parts_of_a_gpu_tensor_are_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are smaller than the tensors here; the GPU is busy, as it is in a validation."""
    monkeypatch.setattr(storage, "STAGE", 4096)
    host, busy = storage.Host(), torch.randn(4096, 4096, device="cuda")
    wide = torch.randn(70, 100, device="cuda")
    for tensor in (wide, wide.T, wide.bfloat16(), wide[:0], wide.sum(), torch.arange(5, device="cuda")):
        torch.cuda.synchronize()  # a save waits for the step before it starts
        for _ in range(5):
            busy = busy @ busy * 1e-3
        found = b"".join(part.numpy().tobytes() for part in host.parts(tensor))
        assert found == tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
