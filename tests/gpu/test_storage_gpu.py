"""Tensors of a GPU reach a checkpoint's files byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity import tiny
from training.checkpoint import layout, storage
from training.checkpoint.export import export
from training.model.stock.model import model_of
from upcycle.config.schema import Router, RouterInit, UpcycleConfig

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


def test_several_tensors_of_a_gpu_are_their_bytes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "STAGE", 4096)
    wide = torch.randn(70, 100, device="cuda")
    tensors = (wide.T, wide[:0], wide.bfloat16(), torch.arange(5, device="cuda"))
    torch.cuda.synchronize()
    found = b"".join(part.numpy().tobytes() for part in storage.Host().parts(*tensors))
    assert found == b"".join(each.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for each in tensors)


@pytest.mark.parametrize("kind", ["dense", "slices"])
def test_a_model_on_a_gpu_is_exported_as_the_same_model_in_host_memory(kind: str, tmp_path: Path) -> None:
    """Weights are rounded on the device, and many small ones travel together."""
    source, made = tiny.make("llama", tmp_path / "dense"), {}
    slices = {"target": "upcycled", "experts": 4, "granularity": 2, "top_k": 2, "method": {"name": "virtual_group"}}
    for device in ("cpu", "cuda"):
        config = UpcycleConfig(source=str(source), router=Router(init=RouterInit("normal")), **slices)
        with layout.opened(source) if kind == "dense" else layout.online(config) as origin:
            model, draw = layout.load(model_of(origin.spec), origin), torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn(parameter.shape, generator=draw)
            export(model.to(device), origin, tmp_path / device, dtype="bfloat16")
        made[device] = (tmp_path / device / "model.safetensors").read_bytes()
    assert made["cpu"] == made["cuda"]
