"""Architectures that the decoder does not have: transformers' model with our MoE blocks in it is transformers' model.

Three of different kinds: linear attention with gated shared experts and a dense layer, a tied model whose choices have a
bias, and state spaces with weights that are not divided by their sum. Each number of a variant is one that a wrong
reading would be seen by; the twins break one thing each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parallel.ranks import run
from tests.parallel.runs import on_rank, stopped_on_rank
from tests.parity import asked, tiny
from training.__main__ import main as train
from training.checkpoint import layout, standalone
from training.checkpoint.export import export as write
from training.checkpoint.layout import Origin
from training.cli.estimate import main as plan
from training.cli.export import main as export
from training.cli.prepare import main as prepare
from training.config.reading import read_config
from training.config.schema import ModelConfig
from training.model.decoder import Decoder
from training.model.stock.model import Stock, StockMoE, on_meta
from training.model.stock.probe import read_blocks
from training.observe.metrics import read as read_metrics
from training.parallel.mesh import MeshConfig, ParallelMesh
from training.parallel.shard import parallelize
from training.run.preflight import preflight
from upcycle.arch.spec import DenseSpec, MoESpec

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16,
        "shared_expert_intermediate_size": 40, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "ernie4_5_moe": {
        "num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "head_dim": 16,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": True,
    },
    "jamba": {
        "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 4,
        "attn_layer_offset": 2, "mamba_d_state": 8, "expert_layer_period": 2, "expert_layer_offset": 1,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
Made = Callable[[str], Path]


def build(model_type: str, **keys: Any) -> Any:
    settings = tiny.SIZES | {"vocab_size": asked.VOCAB} | KINDS.get(model_type, {}) | keys
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=draw)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            elif name.endswith("inv_freq"):
                continue
            elif tensor.ndim == 1 or name.endswith("A_log"):
                tensor.add_(0.2 * noise)
            else:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    tokenizer = asked.make(tmp_path_factory.mktemp("tokenizer"))

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("stock") / name
        build(name).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / file, folder)
        return folder

    return make


@pytest.fixture(scope="module")
def data(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.jsonl"
    lines = [{"text": f"Tom had {n} red balls. They played all day, {n % 7} of them."} for n in range(60)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prepare([str(folder / "data"), f"tokenizer={made('ernie4_5_moe')}", f"sources=[{text}]"]) == 0
    return folder / "data"


def of_disk(origin: Origin, compute: torch.dtype = torch.float32) -> Stock:
    model = Stock(origin.spec, experts="reference", compute=compute).to_empty(device="cpu")
    layout.load(model, origin)
    return model.double() if compute == torch.float64 else model


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(dtype).eval()


@contextmanager
def in_float64() -> Iterator[None]:
    """Context in which what transformers computes in float32 at most is computed in the dtype that it comes in."""
    soften, widen = functional.softmax, Tensor.float

    def softmax(x: Tensor, dim: int, dtype: Any = None, **_: Any) -> Tensor:
        return soften(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    def same(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else widen(x)

    with mock.patch.object(functional, "softmax", softmax), mock.patch.object(Tensor, "float", same):
        yield


def ids() -> tuple[Tensor, Tensor]:
    tokens = tiny.tokens(vocab=asked.VOCAB)
    target = tokens.roll(-1, 1)
    target[:, -1] = -100
    return tokens, target


def first_step(
    model: Stock, theirs: Any, origin: Origin, scratch: Path, least: float = 0.0
) -> tuple[float, dict[str, float]]:
    """How far the loss is from transformers', and by name on disk each gradient: relative, in the norm; or relative to
    `least` of the largest gradient, where one is smaller."""
    tokens, target = ids()
    want = theirs(tokens).logits
    loss = functional.cross_entropy(want.flatten(0, 1), target.flatten(), reduction="sum")
    ours = model.loss(tokens, target)
    loss.backward()
    ours.backward()
    for parameter in theirs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(scratch)
    hers = load_file(scratch / "model.safetensors")
    for own in model.parameters():
        assert own.grad is not None
        own.data = own.grad
    views = layout.views(model)
    largest = max(float(gradient.norm()) for gradient in hers.values())
    found = {}
    for stored in origin.tensors:
        if not stored.roles[0][0].endswith("router.bias"):  # learns from counts, not from gradients
            mine, other = layout.joined(stored, views), hers[stored.name]
            found[stored.name] = float((mine - other).norm()) / max(float(other.norm()), least * largest, 1e-30)
    return float(((ours - loss).abs() / loss).detach()), found


@pytest.mark.parametrize("name", KINDS)
def test_the_first_step_is_transformers_and_an_untrained_export_its_bytes(
    name: str, made: Made, tmp_path: Path
) -> None:
    folder = made(name)
    with layout.opened(folder) as origin:
        # roundings of transformers' own float32 code, 2.1e-5 in Qwen3-Next; the bound that tells a fault is float64's
        loss, gradients = first_step(of_disk(origin), reference(folder), origin, tmp_path / "32", least=1e-2)
        assert loss < 1e-6 and max(gradients.values()) < 1e-4, max(gradients.items(), key=lambda item: item[1])
        with in_float64():
            exact = of_disk(origin, torch.float64), reference(folder, torch.float64)
            loss, gradients = first_step(*exact, origin, tmp_path / "64")
        assert loss < 1e-12 and max(gradients.values()) < 1e-10, max(gradients.items(), key=lambda item: item[1])
        out = write(of_disk(origin), origin, tmp_path / "out")
        standalone.keep(tmp_path / "run", origin, ModelConfig(source=str(folder)))
    kept = standalone.kept(tmp_path / "run")
    assert (kept.spec, kept.tensors) == (origin.spec, origin.tensors)
    assert data_of(out) == data_of(folder)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def data_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What the header says of each tensor, and all bytes behind it."""
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def words(folder: Path, data: Path, output: Path, *more: str) -> list[str]:
    sized = ["data.sequence=16", "data.mask_documents=false", "batch=4", "log_every=1", "schedule.warmup=0"]
    settled = [
        "schedule.peak=3e-3",
        "model.dtype=float32",
        "checkpoint.every=2",
        "device=cpu",
        "data.seed=3",
        "steps=4",
    ]
    return [
        f"model.source={folder}", f"output={output}", f"data.train=[{data}]", *sized, *settled,
        *more,
    ]  # fmt: skip


def losses(run_folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_folder) if "loss" in row]


@pytest.mark.parametrize("name", KINDS)
def test_a_run_learns_resumes_to_the_bit_is_exported_and_asked(
    name: str, made: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, more = made(name), ["micro_batch=2", "balance.aux_weight=0.01", "model.expert_backend=reference"]
    assert train([*words(folder, data, tmp_path / "whole", *more), f"export={tmp_path / 'out'}"]) == 0
    found = losses(tmp_path / "whole")
    assert len(found) == 4 and found[-1] < found[0] - 0.05
    stopped_on_rank(0, 1, words(folder, data, tmp_path / "cut", *more, "checkpoint.asynchronous=false"), before=4)
    assert train(words(folder, data, tmp_path / "cut", *more)) == 0
    assert losses(tmp_path / "cut") == found
    assert export([str(tmp_path / "cut"), str(tmp_path / "again")]) == 0
    assert data_of(tmp_path / "again") == data_of(tmp_path / "out")
    with layout.opened(tmp_path / "out") as origin, torch.no_grad():
        have, want = of_disk(origin)(ids()[0]), reference(tmp_path / "out")(ids()[0]).logits
    assert torch.allclose(have, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    if name == "ernie4_5_moe":  # two processes, each with half of the experts, which backward computes once more
        apart = [
            *words(folder, data, tmp_path / "apart", "micro_batch=1", *more[1:]),
            f"export={tmp_path / 'apart-out'}",
        ]
        run(2, on_rank, [*apart, "mesh.ep=2", "model.recompute=experts"])
        assert losses(tmp_path / "apart") == pytest.approx(found, rel=2e-5)
        ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("apart-out", "out"))
        assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=2e-4) for key in ours)


def found(unit: nn.Module, _: Any, output: Any) -> None:
    """Asserts that any FSDP finds a tensor of what a unit returns, by which it knows when to gather for backward: that
    of torch 2.11 looks into no dataclass."""
    tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    assert any(each.requires_grad for each in tensors), f"{type(unit).__name__} returns {type(output).__name__}"


def gradients_on(rank: int, world: int, folder: Path) -> dict[str, Tensor]:
    """Gradients of two sequences, of which each of two ranks has one; whole, by role, from the first rank."""
    with in_float64(), layout.opened(folder) as origin:
        mesh = ParallelMesh(MeshConfig(ep=world))
        model = Stock(origin.spec, experts="reference", compute=torch.float64).double()
        parallelize(model, mesh, recomputed="experts" if world > 1 else "none")
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.register_forward_hook(found)
        layout.load(model.to_empty(device="cpu"), origin)
        tokens, target = (part.chunk(world)[rank] for part in ids())
        (model.loss(tokens, target) / 10).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
        whole = {id(p): p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()}
        return {
            role: whole[id(tensor)].detach()[index].clone()
            for role, (tensor, index) in layout.roles(model).items()
            if id(tensor) in whole
        }


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_with_half_of_the_experts_have_the_gradients_of_one(name: str, made: Made) -> None:
    folder = made(name)
    alone, (across, _) = gradients_on(0, 1, folder), run(2, gradients_on, folder)
    assert alone.keys() == across.keys()
    worst = max((float((across[role] - alone[role]).norm() / (alone[role].norm() + 1e-9)), role) for role in alone)
    assert worst[0] < 1e-10, worst


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_is_of_activations_alone(name: str, made: Made) -> None:
    """Masters, their gradients and routers stay float32; the loss is near that of float32."""
    with layout.opened(made(name)) as origin:
        model, wide = of_disk(origin, torch.bfloat16), of_disk(origin)
        seen = list[Any]()
        for block in (module for module in model.modules() if isinstance(module, StockMoE)):
            block.router.register_forward_hook(
                lambda router, given, _: seen.append((given[0].dtype, router.weight.dtype))
            )
        loss, want = model.loss(*ids()), wide.loss(*ids())
        loss.backward()
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    assert 1e-6 < abs(float(loss.detach() / want.detach()) - 1) < 0.02
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


# ---- what a wrong reading would do


def swapped(folder: Path, out: Path) -> Path:
    """The folder with two experts of a layer in each other's place."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    one, two = (sorted(name for name in tensors if f"layers.2.mlp.experts.{expert}." in name) for expert in (0, 1))
    moved = dict(zip(one, (tensors[name] for name in two), strict=True))
    moved |= dict(zip(two, (tensors[name] for name in one), strict=True))
    save_file(tensors | moved, out / "model.safetensors", {"format": "pt"})
    return out


TWINS: dict[str, tuple[str, Callable[[MoESpec], MoESpec]]] = {
    "weights not divided by their sum": ("ernie4_5_moe", lambda moe: replace(moe, normalize=False)),
    "weights divided by their sum": ("jamba", lambda moe: replace(moe, normalize=True)),
    "sigmoid scores": ("qwen3_next", lambda moe: replace(moe, score="sigmoid")),
    "another scale": ("qwen3_next", lambda moe: replace(moe, output_scale=1.01)),
    "another activation": ("jamba", lambda moe: replace(moe, dense=replace(moe.dense, activation="gelu"))),
    "one expert fewer": ("ernie4_5_moe", lambda moe: replace(moe, top_k=moe.top_k - 1)),
}


def off(folder: Path, origin: Origin) -> float:
    """How far the logits are from transformers'."""
    with torch.no_grad():
        want = reference(folder)(ids()[0]).logits
        return float((of_disk(origin)(ids()[0]) - want).norm() / want.norm())


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_is_seen(twin: str, made: Made) -> None:
    name, change = TWINS[twin]
    with layout.opened(made(name)) as origin:
        assert isinstance(origin.spec, MoESpec)
        assert off(made(name), origin) < 1e-5 < 1e-4 < off(made(name), replace(origin, spec=change(origin.spec)))


@pytest.mark.parametrize("broken", ["experts", "bias", "shared", "gate"])
def test_a_twin_of_weights_is_seen(broken: str, made: Made, tmp_path: Path) -> None:
    name = "qwen3_next" if broken in ("shared", "gate") else "ernie4_5_moe"
    folder = made(name)
    with layout.opened(swapped(folder, tmp_path / name) if broken == "experts" else folder) as origin:
        model = of_disk(origin)
        for block in (module for module in model.modules() if isinstance(module, StockMoE)):
            if broken == "bias":
                assert block.router.bias is not None and block.router.bias.abs().max() > 0.01
                block.router.bias.zero_()
            elif broken == "shared":
                block.found = replace(block.found, shared=())
            elif broken == "gate":
                block.found = replace(block.found, gate="")
        with torch.no_grad():
            want = reference(folder)(ids()[0]).logits
            assert float((model(ids()[0]) - want).norm() / want.norm()) > 1e-4


# ---- what is read, and what is refused


def read(model_type: str, **keys: Any) -> Any:
    stock = on_meta({"model_type": model_type, **tiny.SIZES, **keys})
    return read_blocks(stock, DenseSpec(model_type, 2, 64, 0, 4, 2, 16, 256, 128))


def test_routers_are_read_as_they_compute() -> None:
    """Of each kind one: a scale, groups, two matrices, a bias that is no child's, layers that are all of them routed."""
    lfm2 = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"]}  # fmt: skip
    nemotron = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
                "layers_block_type": ["mamba", "moe"], "routed_scaling_factor": 2.5, "head_dim": 16}  # fmt: skip
    exaone = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.7}
    facts = {
        "lfm2_moe": read("lfm2_moe", **lfm2),
        "nemotron_h": read("nemotron_h", **nemotron),
        "exaone_moe": read("exaone_moe", **exaone),
        "hunyuan_v1_moe": read("hunyuan_v1_moe", num_experts=4, moe_topk=2, head_dim=16),
    }
    got = {
        name: (
            moe.score,
            moe.normalize,
            moe.output_scale,
            moe.groups,
            moe.dense.activation,
            moe.dense.gated,
            moe.layers,
        )
        for name, moe in facts.items()
    }
    assert got == {
        "lfm2_moe": ("sigmoid", True, 1.0, 1, "silu", True, (1,)),
        "nemotron_h": ("sigmoid", True, 2.5, 4, "relu2", False, (1,)),
        "exaone_moe": ("sigmoid", True, 1.7, 1, "silu", True, (1,)),
        "hunyuan_v1_moe": ("softmax", True, 1.0, 1, "silu", True, (0, 1)),
    }
    with pytest.raises(ValueError, match="its router does not choose and weight experts as any setting of ours does"):
        read("phimoe", num_local_experts=4, num_experts_per_tok=2)


def test_what_cannot_be_trained_is_said(
    made: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("ernie4_5_moe")
    for word, says in {
        "model.recompute=full": "model.recompute is full", "model.compile=true": "model.compile is true",
        "data.mask_documents=true": "write data.mask_documents=false", "lora.rank=4": "lora.rank is 4",
        "model.random=true": "model.random is true",
    }.items():  # fmt: skip
        assert train([*words(folder, data, tmp_path / "never"), word]) == 2
        said = capsys.readouterr().err.strip()
        assert says in said and "transformers' own code" in said and "\n" not in said
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"mesh\.tp is 2.*transformers' own code"):
        patch.setenv("WORLD_SIZE", "2")  # in one process the mesh itself is refused
        preflight(read_config("", [*words(folder, data, tmp_path / "never"), "mesh.tp=2"]))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    gone = {name: tensor for name, tensor in tensors.items() if "experts.3.up_proj" not in name}
    wide = tensors | {"model.norm.weight": torch.ones(65)}
    for number, (changed, weights, says) in enumerate([
        (config | {"moe_k": 0}, tensors, "cannot be trained"),
        (config | {"hidden_size": -4}, tensors, "transformers cannot build a 'ernie4_5_moe' model"),
        (config | {"num_hidden_layers": 10**9}, tensors, "it must be 1 to 1024"),
        (config | {"quantization_config": {"a": 1}}, tensors, "has 'quantization_config'"),
        (config, gone, "there is no tensor for model.layers.1.mlp.experts.3.up.weight"),
        (config, wide, r"model.norm.weight is \[65\] float32 on disk"),
        (config | {"model_type": "clip"}, tensors, "training knows the dense families"),
    ]):  # fmt: skip
        broken = tmp_path / str(number)
        broken.mkdir()
        (broken / "config.json").write_text(json.dumps(changed))
        save_file(weights, broken / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=says), layout.opened(broken):
            pass
    with layout.opened(folder) as origin, pytest.raises(ValueError, match="decoder cannot compute ernie4_5_moe"):
        Decoder(origin.spec)


def test_a_plan_counts_its_parameters(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"model.source={made('qwen3_next')}",
        "gpus=2",
        "mesh.ep=2",
        "data.mask_documents=false",
        "data.sequence=32",
    ]
    assert plan([*words, "batch=2"]) == 0
    assert "transformers' own code computes qwen3_next" in capsys.readouterr().out
    with layout.opened(made("qwen3_next")) as origin:
        counted = sum(parameter.numel() for parameter in Stock(origin.spec).parameters())
        assert counted == sum(tensor.numel() for tensor in load_file(made("qwen3_next") / "model.safetensors").values())


def test_a_dense_one_and_experts_that_lie_stacked(tmp_path: Path) -> None:
    """StableLM is dense; granitemoehybrid's experts are stacked on disk under other names than in the model."""
    granite = {
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["attention", "attention"], "shared_intermediate_size": 48,
        "position_embedding_type": "rope", "logits_scaling": 3.0, "residual_multiplier": 0.5,
    }  # fmt: skip
    for name, keys in {"stablelm": {}, "granitemoehybrid": granite}.items():
        build(name, **keys).save_pretrained(tmp_path / name)
        with layout.opened(tmp_path / name) as origin:
            assert isinstance(origin.spec, MoESpec) == bool(keys)
            assert off(tmp_path / name, origin) < 1e-5
            out = write(of_disk(origin), origin, tmp_path / f"{name}-out")
        assert data_of(out) == data_of(tmp_path / name)


def test_lm_evals_own_model_answers_as_ours(made: Made, tmp_path: Path) -> None:
    """lm-eval's own model is what evaluates such a model."""
    with layout.opened(made("ernie4_5_moe")) as origin:
        out = write(of_disk(origin), origin, tmp_path / "out")
        with torch.no_grad():
            logits = of_disk(origin)(torch.tensor([[5, 6, 7, 8]])).log_softmax(-1)
    lm = HFLM(pretrained=str(out), device="cpu", dtype="float32", batch_size=1)
    found = lm._loglikelihood_tokens([(("a", "b"), [5, 6, 7], [8, 9])], disable_tqdm=True)
    assert found[0][0] == pytest.approx(float(logits[0, 2, 8] + logits[0, 3, 9]), rel=1e-4)
