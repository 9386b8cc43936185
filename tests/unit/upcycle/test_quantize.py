"""`upcycle quantize` without llm-compressor and llama.cpp: what it refuses, publishes and says. A converter of GGUF is a
substitute here; tests/engines/test_quantized.py asks the real programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from tests.engines.models import CASES, make
from tests.unit.training.test_data import texts
from upcycle.__main__ import main
from upcycle.converting import quantize
from upcycle.io import hub, publish
from upcycle.io.checkpoint import Checkpoint

# writes its words into the file that it is asked for; fails for the type bf16
CONVERTER = """
import sys
words = sys.argv[1:]
if "bf16" in words:
    open(words[-1], "w").write("half a file")
    sys.exit("no room for it")
open(words[-1], "w").write("GGUF " + words[-3])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("somewhere-private")
    for name in ("mixtral", "upcycled", "granitemoe"):
        make(CASES[name], folder / name, trained=False)
    (folder / "mixtral/moe/LICENSE").write_text("the text of a licence")
    (folder / "book.txt").write_text("\n".join(texts(100, 5)))
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def run(place: Path, model: str, output: Path, *words: str) -> int:
    return main(["quantize", str(place / model), f"output={output}", *words])


def gguf(place: Path, output: Path, *words: str) -> int:
    found = [
        "method=gguf",
        f"converter={place / 'convert_hf_to_gguf.py'}",
        f"data=[{place / 'book.txt'}]",
        "tokens=256",
    ]
    return run(place, "mixtral/moe", output, *found, *words)


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        ("mixtral/moe", [], "method is not set; write method=fp8|nvfp4|awq|gguf"),
        ("mixtral/moe", ["method=int8"], "it must be one of"),
        ("mixtral/moe", ["method=fp8", "tokens=1"], "tokens is 1"),
        ("mixtral/moe", ["method=awq"], "method=awq calibrates on text; write data=[FILE]"),
        ("mixtral/moe", ["method=nvfp4"], "method=nvfp4 calibrates on text"),
        ("mixtral/moe", ["method=fp8", "data=[BOOK]", "tokens=1000000"], "lower tokens or add text"),
        ("mixtral/dense", ["method=fp8"], "is a 'llama'; quantize takes MoEs of"),
        ("upcycled/moe", ["method=awq", "data=[BOOK]", "tokens=64"], "awq needs rows of whole 32 numbers"),
        ("upcycled/moe", ["method=gguf"], "llama.cpp does not read this upcycled model (it has no class for this"),
        ("mixtral/moe", ["method=gguf", "converter=nowhere.py"], "nowhere.py is not there; get llama.cpp"),
        ("nowhere", ["method=fp8"], "is not a folder"),
    ],
)
def test_it_refuses_in_one_sentence_and_leaves_nothing(
    model: str, words: list[str], said: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("BOOK", str(place / "book.txt")) for word in words]
    assert run(place, model, tmp_path / "out", *words) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_extra(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    assert run(place, "mixtral/moe", tmp_path / "out", "method=fp8") == 2
    assert 'llmcompressor is not installed; pip install "upcycle[quantize]"' in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_it_keeps_what_is_there(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert gguf(place, tmp_path / "out") == 2
    assert "exists already; remove it or choose another output" in capsys.readouterr().err
    assert run(place, "mixtral/moe", place / "mixtral/moe/inside", "method=fp8") == 2
    assert "lies in the input" in capsys.readouterr().err and not (place / "mixtral/moe/inside").exists()


def test_no_code_of_a_stranger_runs(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(place / "upcycled/moe", tmp_path / "other"))
    with (other / "modeling_upcycled.py").open("a") as file:
        file.write("\nopen('ran', 'w')\n")
    assert main(["quantize", str(other), f"output={tmp_path / 'out'}", "method=fp8"]) == 2
    assert "is not the modelling file of this version of upcycle" in capsys.readouterr().err
    other = Path(shutil.copytree(place / "mixtral/moe", tmp_path / "mixtral"))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["x.X", None]}}))
    words = ["method=gguf", f"converter={place / 'convert_hf_to_gguf.py'}", f"output={tmp_path / 'out'}"]
    assert main(["quantize", str(other), *words]) == 2
    assert "names code to run (auto_map)" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_gguf_folder_is_published_with_its_loss_and_can_be_pushed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert gguf(place, out) == 0
    printed = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"model-q8_0.gguf", "README.md", "upcycle.json", "LICENSE"}
    assert (out / "model-q8_0.gguf").read_text() == "GGUF q8_0" and not (tmp_path / "out.partial").exists()
    manifest = json.loads((out / "upcycle.json").read_text())
    found = manifest["quantised"]["text"]
    assert found["tokens"] == 255 and found["data"] == ["book.txt"] and 0 < abs(found["after"] - found["before"]) < 0.1
    sentence = f"{found['after']:.4f} nats per token, {found['after'] - found['before']:+.4f} against"
    page = (out / "README.md").read_text()
    assert sentence in printed and sentence in page and "llama-cli -m model-q8_0.gguf" in page
    assert ModelCard(page).data.to_dict()["tags"] == ["moe", "upcycled", "gguf", "mixtral"]
    assert main(["push", str(out), "org/name", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {path.name}\n" in shown for path in out.iterdir()) and "stays" not in shown
    assert b"somewhere-private" not in sent(out)
    (out / ".upcycle").mkdir()  # as a kill leaves it that comes right after the rename
    assert gguf(place, out) == 2 and "exists already" in capsys.readouterr().err and not (out / ".upcycle").exists()
    (out / "model-q8_0.gguf").write_text("GGUF q8_1")
    assert main(["push", str(out), "org/name", "dry_run=true"]) == 2
    assert "has changed since it was written" in capsys.readouterr().err


def test_a_converter_that_fails_leaves_no_folder(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gguf(place, tmp_path / "out", "type=bf16") == 2
    assert "llama.cpp's converter failed" in (said := capsys.readouterr().err) and "no room for it" in said
    assert not (tmp_path / "out").exists()
    assert gguf(place, tmp_path / "out") == 0, "the same output can be made afterwards"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"model-q8_0.gguf"}
    assert not (tmp_path / "out/model-bf16.gguf").exists(), "half a file of the command that failed"


def test_q8_0_rounds_to_127_steps_of_each_32_numbers() -> None:
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    got = quantize.rounded(weight, "q8_0")
    step = (weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127).half().float()
    level = got.unflatten(-1, (-1, 32)) / step
    assert float((level - level.round()).abs().max()) < 1e-3 and torch.all(level.round().abs().amax(-1) == 127)
    assert float((got - weight).abs().max() / step.max()) < 0.6
    assert torch.equal(quantize.rounded(weight, "bf16"), weight.bfloat16().float())
    assert torch.equal(quantize.rounded(weight, "f16"), weight.half().float())


def halved(source: Checkpoint, moe: Any, partial: Path, method: str, rows: Any) -> Any:
    """Stand in for llm-compressor: store the source's own tensors."""
    tensors = load_file(source.files[0])
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    config = {**source.config, "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}}
    return publish.listed([partial / "model.safetensors"]), config, (2.5, 2.75) if rows else None


@pytest.mark.parametrize("model", ["mixtral", "upcycled"])
def test_a_quantised_folder_says_what_it_is(
    model: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize, "compressed", halved)
    monkeypatch.setattr(quantize, "need_llmcompressor", lambda: None)
    out = tmp_path / "out"
    assert run(place, f"{model}/moe", out, "method=fp8", f"data=[{place / 'book.txt'}]", "tokens=64") == 0
    assert "2.7500 nats per token, +0.2500 against 2.5000 before, on 63 tokens of book.txt" in capsys.readouterr().out
    page = (out / "README.md").read_text()
    assert "+0.2500 against 2.5000" in page and "FP8: 8-bit weights" in page and "| quantised from | moe |" in page
    assert ("vllm serve . --trust-remote-code" in page) == (model == "upcycled") and "from_pretrained" not in page
    assert main(["inspect", str(out), "check=true"]) == 0
    shown = capsys.readouterr().out
    assert "fp8, from " in shown and "sizes, sha256 and values are right" in shown
    looked = hub.upload(out)
    names = {name for name, _ in looked.files}
    assert {"config.json", "model.safetensors", "tokenizer.json", "upcycle.json", "README.md"} <= names
    assert ("modeling_upcycled.py" in names) == (model == "upcycled") and not looked.left
    assert b"somewhere-private" not in sent(out)
    for words in (["quantize", str(out), f"output={tmp_path / 'again'}", "method=fp8"], ["chat", str(out), "prompt=a"],
                  ["verify", str(place / model / "dense"), str(out)], ["eval", "tiny", str(out)],
                  ["train", f"model.source={out}", "output=run"]):  # fmt: skip
        assert main(words) == 2, words
        assert "quantis" in capsys.readouterr().err.replace("quantiz", "quantis"), words


def test_push_takes_converted_trained_and_quantised_folders(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(CASES["mixtral"], place / "trained", trained=True)
    assert gguf(place, tmp_path / "quantised") == 0
    monkeypatch.setattr(quantize, "compressed", halved)
    monkeypatch.setattr(quantize, "need_llmcompressor", lambda: None)
    trained = next(path.parent for path in (place / "trained").rglob("upcycle.json") if "trained" in path.read_text())
    assert main(["quantize", str(trained), f"output={tmp_path / 'fp8'}", "method=fp8"]) == 0
    commits = list[list[str]]()

    class Api:
        def create_repo(self, name: str, **_: Any) -> None: ...

        def create_commit(self, name: str, operations: Any, **_: Any) -> Any:
            commits.append([each.path_in_repo for each in operations])
            return SimpleNamespace(commit_url="https://example.org")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    made = {
        "converted": place / "mixtral/moe",
        "trained": trained,
        "gguf": tmp_path / "quantised",
        "fp8": tmp_path / "fp8",
    }
    says = {
        "converted": "upcycled to a mixture",
        "trained": "trained",
        "gguf": "quantised (gguf q8_0)",
        "fp8": "quantised (fp8)",
    }
    for name, folder in made.items():
        assert main(["push", str(folder), "org/name"]) == 0
        assert "README.md" in commits[-1] and "upcycle.json" in commits[-1]
        assert says[name] in (folder / "README.md").read_text().split("\n# ")[1].split("\n")[0]
    assert "| tokens trained |" in (tmp_path / "fp8/README.md").read_text(), "what it learned is still there"


def sent(folder: Path) -> bytes:
    """Return all that push would send."""
    files = [what for _, what in hub.upload(folder).files]
    return b"".join(what if isinstance(what, bytes) else what.read_bytes() for what in files)
