"""verify: what is not as promised is found, by two ways that know nothing of each other; and in bounded memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from tests.parity import tiny
from tests.unit.upcycle.plans import load, readable
from upcycle.__main__ import main
from upcycle.converting.convert import convert
from upcycle.io.checkpoint import Checkpoint
from upcycle.text.streamed import Streamed
from upcycle.verifying import rebuild
from upcycle.verifying.verify import FEW, tokens, verify
from upcycle.verifying.wide import Float64

METHODS = {
    "copy": ["experts=4"],
    "copy, bfloat16": ["experts=4", "dtype=bfloat16"],
    "groups of 3, bfloat16": [
        "method.name=virtual_group", "experts=2", "granularity=3", "top_k=3", "dtype=bfloat16", "target=mixtral"],
    "published": ["method.name=virtual_group", "experts=2", "granularity=4", "top_k=4", "scale=published"],
    "part of a copy": ["method.name=virtual_group", "experts=2", "granularity=2", "top_k=3",
        "router.choice=parts"],
    "drop": ["method.name=drop", "experts=4"],
    "drop, shared": ["method.name=drop", "experts=4", "shared=0.25"],
    "noise": ["method.name=noise", "experts=4"],
    "split": ["method.name=split", "experts=4"],
}  # fmt: skip


def made(dense: Path, folder: Path, *words: str) -> Path:
    return convert(*load(f"source={dense}", f"output={folder}", *words), quiet=True)


def change(folder: Path, which: Callable[[str], bool], by: Callable[[Tensor], Tensor]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    chosen = {name: by(tensor) for name, tensor in tensors.items() if which(name)}
    assert chosen
    save_file(tensors | chosen, file, {"format": "pt"})


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of bits, so that what the models compute has to tell."""
    monkeypatch.setattr(rebuild, "weights", lambda *_: rebuild.Compared(0, 0.0, ()))


@pytest.mark.parametrize("words", METHODS.values(), ids=METHODS.keys())
def test_experts_of_zeros_are_found_by_what_they_compute(
    llama: Path, tmp_path: Path, words: list[str], blind: None
) -> None:
    folder = made(llama, tmp_path / "moe", *words)
    assert verify(llama, folder, count=64).held
    change(folder, lambda name: ".experts." in name or ".w2." in name, torch.zeros_like)
    report = verify(llama, folder, count=64)
    assert not report.held and report.faults, report


@pytest.mark.parametrize("words", METHODS.values(), ids=METHODS.keys())
def test_three_percent_of_one_expert_are_found_by_their_bits(llama: Path, tmp_path: Path, words: list[str]) -> None:
    folder = made(llama, tmp_path / "moe", *words)
    for dtype in ("float32", "bfloat16"):
        assert verify(llama, folder, count=64, dtype=dtype).held
    change(folder, lambda name: ".0." in name and ".experts.1." in name, lambda tensor: tensor * 1.03)
    for dtype in ("float32", "bfloat16"):
        report = verify(llama, folder, count=64, dtype=dtype)
        assert not report.held and "experts.1." in report.faults[0], report


@pytest.mark.parametrize("name", ["copy", "copy, bfloat16", "groups of 3, bfloat16"])
def test_rounding_hides_no_wrong_weight(llama: Path, tmp_path: Path, name: str, blind: None) -> None:
    folder = made(llama, tmp_path / "moe", *METHODS[name])
    right = verify(llama, folder, count=64)
    assert right.held and right.tolerance == 1e-9 and right.relative < 1e-12
    change(folder, lambda name: ".w2." in name, lambda tensor: tensor * 1.03)
    wrong = verify(llama, folder, count=64)
    assert not wrong.held and wrong.relative > 1e-3


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("gemma", ["target=granitemoe"]),  # norms + 1
        ("llama", ["shared=1", "granularity=3", "top_k=3", "method.name=virtual_group", "scale_in=weights"]),
        ("phi3", ["granularity=3", "top_k=3", "method.name=virtual_group"]),  # gate and up in one tensor
        ("arcee", ["granularity=2", "top_k=2", "method.name=virtual_group"]),  # squared ReLU
        ("gpt_neox", []),  # q, k and v in one tensor
    ],
)
def test_the_dense_model_is_rounded_as_its_weights_were(tmp_path: Path, variant: str, words: list[str]) -> None:
    dense = tiny.make_variant(variant, tmp_path / "dense")
    report = verify(dense, made(dense, tmp_path / "moe", "experts=2", "dtype=bfloat16", *words), count=64)
    assert report.held and report.tolerance == 1e-9, report


def test_what_was_measured_on_text_is_made_again_without_the_text(llama: Path, tmp_path: Path) -> None:
    dense, text = readable(llama, tmp_path)
    words = [f"calibration.texts={text}", "calibration.tokens=16", "calibration.sequence=16", "experts=4"]
    for more in (["router.normalize=false", "scale=calibrated"], ["method.name=split", "method.by=activation"]):
        folder = made(dense, tmp_path / more[0], *words, *more)
        text.rename(tmp_path / "gone")
        assert verify(dense, folder, count=64).held
        (tmp_path / "gone").rename(text)
        change(folder, lambda name: ".experts.1." in name, lambda tensor: tensor * 1.03)
        assert not verify(dense, folder, count=64).held


def test_of_a_large_model_slices_of_some_tensors_of_each_kind_are_made_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "BUDGET", 100_000)
    monkeypatch.setattr(rebuild, "SLICE", 4096)
    plan, checkpoints = load(f"source={llama}", f"output={tmp_path / 'moe'}", *METHODS["drop, shared"])
    folder = convert(plan, checkpoints, quiet=True)
    chosen = rebuild.sample(plan)
    kinds = {(part.kind, part.matrix) for output in plan.outputs for part in output.parts[:1]}
    assert {(output.parts[0].kind, output.parts[0].matrix) for output, _ in chosen} == kinds
    assert any(rows for _, rows in chosen) and len(chosen) < len(plan.outputs)
    with Checkpoint.open(folder) as made_folder:
        again = rebuild.weights(plan, checkpoints, made_folder)
    assert not again.wrong and 0.05 < again.share < 0.5
    name = next(output.name for output, rows in chosen if rows and output.parts[0].kind == "expert")
    change(folder, lambda n: n == name, lambda tensor: tensor * 1.03)
    with Checkpoint.open(folder) as made_folder:
        assert [name in line for line in rebuild.weights(plan, checkpoints, made_folder).wrong] == [True]


def test_nothing_promised_is_an_exit_code_of_its_own(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(llama, tmp_path / "moe", "experts=2")
    (folder / "upcycle.json").unlink()  # as in a trained model's folder
    words = ["verify", str(llama), str(folder), "tokens=64"]
    assert main(words) == 3
    shown = capsys.readouterr()
    assert (
        "nothing to hold" in shown.out and "has no upcycle.json of a conversion, so nothing was promised" in shown.err
    )
    assert main([*words, "tolerance=1e-5"]) == 0
    change(folder, lambda name: ".w2." in name, lambda tensor: tensor * 1.03)
    assert main([*words, "tolerance=1e-5"]) == 1
    change(folder, lambda name: ".w2." in name, lambda tensor: tensor * float("inf"))
    assert main(words) in (1, 2)


def test_another_dense_model_is_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(llama, tmp_path / "moe", "experts=2")
    other = tiny.make("llama", tmp_path / "other", seed=1)
    assert main(["verify", str(other), str(folder), "tokens=64"]) == 2
    assert "is not the model that the MoE was made from, or it has changed" in capsys.readouterr().err


def test_as_many_tokens_as_asked_for(llama: Path) -> None:
    with Checkpoint.open(llama) as checkpoint:
        assert [len(row) for row in tokens(checkpoint, (), 300, 100)] == [100, 100, 100]
        assert [len(row) for row in tokens(checkpoint, (), 300, 120)] == [120, 120, 60]
    assert verify(llama, llama, count=300, sequence=120, tolerance=1e-6).tokens == 300


def test_kernels_that_fail_are_said_and_the_plain_ones_taken(tmp_path: Path) -> None:
    """transformers' default kernel wants rows of 16 bytes, and this hidden size is none."""
    odd = tiny.make("llama", tmp_path / "odd", hidden_size=66, head_dim=16, num_attention_heads=2)
    report = verify(odd, made(odd, tmp_path / "moe", "experts=2"), count=64)
    assert report.held and "experts_implementation='eager'" in report.kernels
    assert "eager" in str(report)


@pytest.mark.parametrize("target", ["mixtral", "qwen2_moe", "granitemoe", "glm4_moe", "solar_open", "upcycled"])
def test_an_exact_plan_is_exact_in_float64(tmp_path: Path, target: str) -> None:
    """Weights this large make a rounding to float32 in a router or norm grow from layer to layer."""
    dense = tiny.make("llama", tmp_path / "dense", num_hidden_layers=8)
    change(dense, lambda name: "norm" in name, lambda tensor: tensor * 4)
    score = ["router.score=sigmoid"] if target in ("glm4_moe", "solar_open") else []
    words = ["method=virtual_group", "experts=4", "granularity=3", "top_k=6", f"target={target}", *score]
    folder = made(dense, tmp_path / "moe", *words, "router.init.std=0.1")
    report = verify(dense, folder, count=64)
    assert report.held and report.relative < 1e-12, report
    assert not report.kernels, "transformers' default kernels have no float64, in which nobody loads the folder"
    assert verify(dense, folder, count=64, dtype="float32").relative > 1e-8


def test_a_clear_verdict_costs_few_tokens(llama: Path, tmp_path: Path) -> None:
    folder = made(llama, tmp_path / "moe", "experts=4")
    change(folder, lambda name: ".experts.1." in name, lambda tensor: tensor * 1.03)
    report = verify(llama, folder, count=300)
    assert not report.held and report.tokens == FEW < 300 and report.relative > 0


def test_progress_moves_with_each_layer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("upcycle.text.streamed.tqdm", lambda **keys: tqdm(**{**keys, "delay": 0, "mininterval": 0}))
    folder = made(llama, tmp_path / "moe", "experts=4")
    assert verify(llama, folder, count=64).held
    err = capsys.readouterr().err
    for part in ("dense in float64:  50%", "MoE in float64:  50%", "MoE in float64: 100%"):
        assert part in err, err


@pytest.mark.parametrize("variant", ["llama", "qwen2_tied", "phi3_longrope", "gpt_neox", "llama_dynamic_rope"])
def test_a_streamed_model_is_the_whole_one_with_one_layer_in_memory(tmp_path: Path, variant: str) -> None:
    folder, ids = tiny.make_variant(variant, tmp_path / "dense", num_hidden_layers=4), tiny.tokens()
    with torch.no_grad():
        want = tiny.loaded(folder, torch.float32)(ids).logits.flatten(0, 1)
    most = 0

    def look(layer: int, module: nn.Module) -> None:
        nonlocal most
        assert not any(p.is_meta for p in module.parameters())
        most = max(most, sum(p.nbytes for p in model.model.parameters() if not p.is_meta))

    with Checkpoint.open(folder) as checkpoint:
        model = Streamed(checkpoint, torch.float32)
        hidden = model.hidden(list(ids), "", look)
        assert all(p.is_meta for p in model.model.parameters())
        with model.with_head() as logits:
            have = torch.cat([logits(part) for part in hidden.split(13)])
    assert most == sum(p.nbytes for p in model.model.base_model.layers[0].parameters())
    assert torch.equal(have, want) or float((have - want).abs().max() / want.abs().max()) < 1e-6


@pytest.mark.parametrize("target", ["qwen3_moe", "granitemoeshared", "glm4_moe", "upcycled"])
def test_a_streamed_moe_is_the_whole_one(llama: Path, tmp_path: Path, target: str) -> None:
    words = ["router.score=sigmoid"] if target == "glm4_moe" else []
    dense = tiny.make("qwen3", tmp_path / "dense") if target == "qwen3_moe" else llama
    folder, ids = made(dense, tmp_path / "moe", "experts=4", f"target={target}", *words), tiny.tokens()
    with torch.no_grad():
        want = tiny.loaded(folder, torch.float32)(ids).logits.flatten(0, 1)
    with Checkpoint.open(folder) as checkpoint:
        model = Streamed(checkpoint, torch.float32)
        hidden = model.hidden(list(ids), "")
        with model.with_head() as logits:
            assert float((logits(hidden) - want).abs().max() / want.abs().max()) < 1e-6


def test_a_tensor_that_is_missing_or_not_of_the_model_is_named(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    taken = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys in .*layers\.1\.mlp\.up_proj"):
        verify(llama, folder, count=64, tolerance=1.0)
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": taken, "more": taken + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected_keys in .*more"):
        verify(llama, folder, count=64, tolerance=1.0)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"promise": 3}', '{"plan": 1, "files": {"a": 3}, "promise": {"exact": true}}']
)
def test_a_manifest_that_is_none_is_one_sentence(llama: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "moe")
    (folder / "upcycle.json").write_text(text)
    for arguments in (
        ["verify", str(llama), str(folder)],
        ["inspect", str(folder)],
        ["inspect", str(folder), "check=true"],
    ):
        assert main(arguments) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 100), ("vocab_size", None), ("vocab_size", "x"), ("hidden_size", 32), ("hidden_act", "zz"),
     ("rms_norm_eps", "x"), ("model_type", [1])],
)  # fmt: skip
def test_verify_refuses_a_config_that_is_not_of_the_weights(
    llama: Path, tmp_path: Path, key: str, value: object
) -> None:
    folder = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert main(["verify", str(llama), str(folder)]) == 2
    assert main(["verify", str(folder), str(llama)]) == 2


@pytest.mark.parametrize("product", [torch.matmul, Tensor.matmul, Tensor.__matmul__, lambda a, b: a @ b])
def test_wide_numbers_times_float32_are_wide(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """transformers 5.17 and 5.18 multiply rotary frequencies by positions so."""
    wide, positions = torch.rand(3, 2, dtype=torch.float64), torch.arange(8.0).view(2, 4)
    with Float64():
        got = product(wide.to(torch.float32), positions)
        assert product(positions.T, wide.T.float()).equal(got.T)
        assert product(positions.T, positions).dtype == torch.float32
    assert got.equal(wide @ positions.double())
