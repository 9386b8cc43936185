"""A folder for LMDeploy computes what the model computes, by LMDeploy's formula; no other engine takes it for its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.parity import tiny
from tests.unit.training.test_data import make_tokenizer
from training.checkpoint import lmdeploy
from upcycle import convert
from upcycle.cli.main import main

SLICES: dict[str, Any] = {"experts": 4, "granularity": 4, "top_k": 4, "method": "virtual_group", "dtype": "float32"}
SIGMOID = {"router": {"score": "sigmoid"}}
PLAIN = {"normalize": False, "init": {"std": 0.1}}
HELD = {  # donor, keys of the converter -> LMDeploy's class
    "llama": ("llama", {}, "mixtral"),
    "llama, two copies of each slice": ("llama", {"top_k": 8}, "mixtral"),
    "qwen3": ("qwen3", {}, "qwen3_moe"),
    "qwen3, dense layers": ("qwen3", {"layers": "first-dense:1"}, "qwen3_moe"),
    "qwen3, not normalised": ("qwen3", {"router": PLAIN, "scale": "none"}, "qwen3_moe"),
    "qwen2": ("qwen2", {}, "qwen2_moe"),
    "llama, shared": ("llama", {"shared": 0.25}, "qwen2_moe"),
}


def make(donor: str, keys: dict[str, Any], folder: Path) -> Path:
    """Make a model with slices whose experts and router rows all differ, as after training."""
    dense = tiny.make(donor, folder / "dense")
    make_tokenizer(dense, bos=False)
    (dense / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}')
    moe = convert(source=dense, target="upcycled", output=folder / "moe", quiet=True, **SLICES | keys)
    tensors, generator = load_file(moe / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in (name for name in tensors if ".mlp." in name):
        tensors[name] = tensors[name] + 0.1 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, moe / "model.safetensors", {"format": "pt"})
    return moe


def grouped(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route as LMDeploy 0.18.0 does: see DefaultSoftmaxTopKImpl in lmdeploy/pytorch/backends/default/moe.py."""
    logit_TN = functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
    groups = self.router_n_groups
    probability_TGC = logit_TN.softmax(-1).unflatten(1, (groups, -1))
    weight_TGK, copy_TGK = probability_TGC.topk(self.top_k // groups, dim=-1)
    offset_G1 = torch.arange(groups)[:, None] * probability_TGC.shape[-1]
    weight_TK = weight_TGK.flatten(1)
    if getattr(self, "norm_topk_prob", True):  # Mixtral has no such key
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return logit_TN, weight_TK, (copy_TGK + offset_G1).flatten(1)


def load(folder: Path, code: bool = False) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, trust_remote_code=code, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@pytest.mark.parametrize("case", HELD)
def test_lmdeploy_computes_the_same_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the folder as the stock model that LMDeploy takes it for; in the twin, transformers routes freely."""
    donor, keys, stock = HELD[case]
    moe = make(donor, keys, tmp_path)
    assert main(["export", str(moe), str(tmp_path / "out"), "engine=lmdeploy"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    named = config.pop("auto_map")["AutoModelForCausalLM"]
    assert config["router_n_groups"] == 4
    as_stock = shutil.copytree(tmp_path / "out", tmp_path / "stock")
    (as_stock / "config.json").write_text(json.dumps(config | {"model_type": stock, "architectures": [named]}))
    model = load(as_stock)
    assert named == f"lmdeploy.{type(model).__name__}"
    tokens = tiny.tokens(256)
    with torch.no_grad():
        free = model(tokens).logits
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        for router in routers:
            router.router_n_groups = 4
        monkeypatch.setattr(type(routers[0]), "forward", grouped)
        got, want = model(tokens).logits, load(moe, code=True)(tokens).logits
    assert (got - want).abs().max() < 1e-10
    assert (free - want).abs().max() > 1e-3


def test_no_other_engine_takes_the_folder_for_its_own(tmp_path: Path) -> None:
    folder = lmdeploy.export(make("llama", {}, tmp_path), tmp_path / "out")
    for code in (False, True):
        with pytest.raises(ValueError, match="upcycled_lmdeploy"):
            load(folder, code)
    config = (folder / "config.json").read_text()
    assert '"mixtral"' not in config and '"MixtralForCausalLM"' not in config  # llama.cpp and mistral.rs read these
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("a b").input_ids
    card = (folder / "README.md").read_text()
    assert "This folder is only for LMDeploy" in card and "transformers" not in card


@pytest.mark.parametrize(
    ("donor", "keys", "why"),
    [
        ("llama", SIGMOID, "sigmoid scores"),
        ("gemma", {}, "activation"),
        ("nemotron", {}, "norm 'layernorm1p'"),
        ("llama", {"router": {"choice": "any", "init": {"std": 0.1}}}, "chooses among all experts"),
    ],
)
def test_what_lmdeploy_cannot_hold_is_refused(
    donor: str, keys: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe = make(donor, keys, tmp_path)
    assert main(["export", str(moe), str(tmp_path / "out"), "engine=lmdeploy"]) == 2
    assert why in capsys.readouterr().err and not list(tmp_path.glob("out*"))


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = tiny.make("llama", tmp_path / "dense")
    assert main(["export", str(dense), str(tmp_path / "out"), "engine=lmdeploy"]) == 2
    assert "engine=lmdeploy is for target=upcycled" in capsys.readouterr().err
