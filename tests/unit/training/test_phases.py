"""A step's phases, from a timeline written by hand; and the ranges that dispatchers open, from a real profile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from training.dispatch import common
from training.observe.phases import Span, phase_of, recorded, table


def test_table() -> None:
    kernels = [
        Span("cudnn_generated_fort_native_sdpa", 0, 10),
        Span("spread_kernel", 10, 14),  # within a dispatch
        Span("ncclDevKernel_SendRecv", 14, 30),  # alone until 20, where weights of the next layer come in
        Span("ncclDevKernel_AllGather_RING_LL", 20, 26),
        Span("cutlass::GroupProblemShape", 30, 50),
        Span("ncclDevKernel_ReduceScatter", 45, 60),  # 5 under the product, 10 in the open
        Span("nvjet_tst", 65, 70),
        Span("pull_kernel", 70, 73),  # nvlink's
    ]
    found = table(kernels, [Span("dispatch", 10, 30), Span("dispatch", 10, 12), Span("dispatch", 70, 73)])
    assert found == {
        "dispatch": 23, "experts": 20, "weights and gradients between ranks": 15, "attention": 10, "products": 5,
        "exposed communication": 29, "idle": 5,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "phase"), [
    ("triton_per_fused__softmax_backward_data_3", "router"), ("norm_backward_kernel", "norms and rotation"),
    ("Memcpy DtoD (Device -> Device)", "copies"), ("activation_backward_kernel", "experts"), ("other", "rest"),
    ("kernel_cutlass_kernel_quackgemm_actGemmGatedSm90_object_at_", "experts"), ("back_kernel", "experts"),
    ("up_kernel", "experts"), ("rows_kernel", "experts"), ("sums_kernel", "experts"), ("sums_total_kernel", "experts"),
    ("cut_kernel", "experts"), ("route_kernel", "router"), ("route_backward_kernel", "router"),
    ("gathered_kernel", "router"), ("gather_kernel", "places of rows"), ("total_kernel", "rest"),
    ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN", "products"), ("meet_kernel", "rest"),
])  # fmt: skip
def test_phase_of(name: str, phase: str) -> None:
    assert phase_of(name) == phase


def test_recorded_takes_ranges_from_the_devices_timeline_only() -> None:
    def event(name: str, device: torch.autograd.DeviceType, named: bool) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, device_type=device, is_user_annotation=named, time_range=SimpleNamespace(start=1.0, end=2.0)
        )

    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        event("dispatch", cpu, True),
        event("dispatch", cuda, True),
        event("ProfilerStep*", cuda, True),
        event("Optimizer.step#Optimizer.step", cuda, True),
        event("gemm", cuda, False),
    ]
    ranges = [Span("dispatch", 1.0, 2.0), Span("optimizer", 1.0, 2.0)]
    assert recorded(events) == ([Span("gemm", 1.0, 2.0)], ranges)


def test_both_passes_of_both_ways_are_named() -> None:
    class Twice:
        def out(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def home(self, y: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            return y, weight

    x, weight = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    with torch.profiler.profile() as found:
        sent = common.dispatch(lambda x, w: (x.clone(), w.clone(), torch.ones(1), Twice()), x, weight)
        common.combine(sent.x_RD * sent.weight_R[:, None], sent.handle).sum().backward()
    names = [event.name for event in found.events() if event.name in ("dispatch", "combine")]
    assert sorted(names) == ["combine", "combine", "dispatch", "dispatch"]
