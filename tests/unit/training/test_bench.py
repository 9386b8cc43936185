"""upcycle bench in small on a CPU: what it counts, that its switches switch, and its errors. It times nothing here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from training.cli.bench import main
from training.config.schema import ModelConfig
from training.data.mixture import DataConfig
from training.estimating import bench as module
from training.estimating.bench import BenchConfig, batch, bench, documents, in_turn
from training.model.lora import LoraConfig
from training.model.moe import Routing
from training.optim.balance import BalanceConfig
from training.optim.optimizer import OptimConfig
from training.parallel.placement import rule
from training.run import step
from training.run.build import Learner, learner

ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
FLOAT32 = ModelConfig(dtype="float32")
SMALL = BenchConfig(
    architecture=ARCHITECTURE, layers=1, data=DataConfig(sequence=32), batch=2, weights="float32", model=FLOAT32,
    warmup=1, steps=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"stack": True},
        {"optimizer": True, "micro_batch": 1, "optim": OptimConfig(moments="bfloat16")},
        {"documents": 8, "model": replace(FLOAT32, recompute="full")},
        {"routing": "balanced", "balance": BalanceConfig(capacity_factor=1.0)},
        {"weights": "bfloat16", "model": ModelConfig()},
    ],
    ids=str,
)
def test_it_runs_and_counts(changed: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("these sizes are for a CPU")
    row = bench(replace(SMALL, **changed))
    assert row["tokens"] == 64 and row["gpus"] == 1 and row["seconds"] > 0 and row["tokens_per_s"] > 0
    attention, mixture, norms = 32 * 16 * (2 + 1 + 1 + 2), 32 * 8 + 8 * 3 * 16 * 32, 3 * 32 + 2 * 16
    words = 128 * 32  # embedding, and the head where there is one
    assert row["parameters"] == attention + mixture + norms + words * (1 if row["config"].get("stack") else 2)
    json.dumps(row)


def test_flops_of_documents_are_less_and_of_a_stack_lack_the_head() -> None:
    if torch.cuda.is_available():
        pytest.skip("these sizes are for a CPU")
    whole, short, stack = (
        bench(replace(SMALL, **changed))["gflop_per_token"] for changed in ({}, {"documents": 4}, {"stack": True})
    )
    assert short < whole
    assert whole - stack == pytest.approx(6 * 128 * 32 / 1e9)


def test_documents_are_about_as_long_as_asked_and_positions_count_within_them() -> None:
    config = replace(SMALL, data=DataConfig(sequence=4000), documents=50)
    number = documents(config, 3)
    assert number[0] == 0 and number.diff().unique().tolist() == [0, 1]
    assert 35 < 4000 / (int(number[-1]) + 1) < 70
    made = batch(config, 128, 3, 1)
    assert torch.equal(made.documents[0], number.int())
    first = torch.tensor([int((number == n).nonzero()[0]) for n in range(int(number[-1]) + 1)])
    assert torch.equal(made.positions[0], torch.arange(4000) - first[number])
    assert documents(replace(config, documents=0), 3).unique().tolist() == [0]


def stepped(config: BenchConfig) -> tuple[Learner, list[str]]:
    """What was benchmarked, and which functions of training/run/step.py made its steps."""
    made: list[Learner] = []
    called: list[str] = []

    def keeping(*inputs: Any, **named: Any) -> Learner:
        made.append(learner(*inputs, **named))
        return made[0]

    def noting(function: Any) -> Any:
        return lambda *inputs: (called.append(function.__name__), function(*inputs))[1]

    with mock.patch.multiple(
        module, learner=keeping, train_step=noting(step.train_step), gradients=noting(step.gradients)
    ):
        bench(config)
    return made[0], called


def test_its_steps_are_those_of_training() -> None:
    if torch.cuda.is_available():
        pytest.skip("these sizes are for a CPU")
    times = SMALL.warmup + 3 * SMALL.steps
    run, called = stepped(replace(SMALL, optimizer=True))
    assert called == ["train_step"] * times and run.optimizer is not None
    assert int(run.optimizer.skipped) == 0
    moved = [state["step"] for state in run.optimizer.state.values()]
    assert moved and all(int(count) == times for count in moved)
    run, called = stepped(SMALL)
    assert called == ["gradients"] * times and run.optimizer is None
    assert run.config.balance == BalanceConfig() and int(run.balance.load.total_NE.sum()) == times * 64 * 2


@pytest.mark.parametrize(
    ("changed", "learns"),
    [
        ({"lora": LoraConfig(rank=4)}, "lora_"),
        ({"optim": OptimConfig(groups=({"match": "*", "lr": 0}, {"match": "router"}))}, "router"),
    ],
    ids=["lora", "router"],
)
def test_what_never_learns_is_narrow_and_has_no_moments(changed: dict[str, Any], learns: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("these sizes are for a CPU")
    run, _ = stepped(replace(SMALL, model=ModelConfig(dtype="bfloat16"), optimizer=True, **changed))
    assert run.optimizer is not None
    moments = {slot.name for slot in run.optimizer.slots}
    for name, p in run.model.named_parameters():
        assert (name in moments) == p.requires_grad == (learns in name), name
        narrow = learns not in name and not rule(name, run.model.dense).exact
        assert p.dtype == (torch.bfloat16 if narrow else torch.float32), name
    assert len(run.optimizer.state) == len(moments)


def test_balanced_is_balanced_and_a_capacity_drops() -> None:
    logits = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    weight, expert = logits.softmax(-1).topk(2)
    balanced = in_turn(lambda routing: routing, Routing(weight, expert, logits, logits.softmax(-1)))
    assert balanced.expert_TK.flatten().bincount().tolist() == [6] * 8
    assert torch.equal(balanced.weight_TK, weight)
    if torch.cuda.is_available():
        pytest.skip("these sizes are for a CPU")
    load = {}
    for routing in ("natural", "balanced"):
        run, _ = stepped(
            replace(SMALL, routing=routing, balance=BalanceConfig(capacity_factor=1.0, pad_to_capacity=True))
        )
        assert run.config.balance.pad_to_capacity
        (load[routing],) = run.balance.load.fetch()
    assert load["natural"].dropped > 0 and load["natural"].max_over_mean > 1
    assert load["balanced"].dropped == 0 and load["balanced"].max_over_mean == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "architecture must be a config.json"),
        (["architecture=no-such.json"], "no-such.json"),
        (
            ["bench-qwen3-30b-4l", "model.dtype=bf16"],
            "model.dtype is 'bf16'; it must be one of bfloat16, float32, float64",
        ),
        (["bench-qwen3-30b-4l", "model.recompute=all"], "must be one of none, selective, attention, experts, full"),
        (["bench-qwen3-30b-4l", "routing=forced"], "must be one of natural, balanced"),
        (["pad=true"], "write balance.pad_to_capacity"),
        (["bench-qwen3-30b-4l", "steps=0"], "steps is 0; it must be at least 1"),
        (["bench-qwen3-30b-4l", "batch=3", "micro_batch=2"], "try batch=2"),
        (["bench-qwen3-30b-4l", "lora.rank=4", "lora.match=[expert]"], "did you mean 'experts'"),
        (["bench-qwen3-30b-4l", "optim.groups=[{match: ruter, lr: 0}]"], "did you mean 'router'"),
        (["bench-qwen3-30b-4l", "step=3"], "did you mean 'steps'"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("upcycle: ") and says in said and said.count("\n") == 1
