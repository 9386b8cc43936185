"""`vllm serve` on real checkpoints as slices, asked over HTTP, next to transformers on the same folder.

Only `make engines` runs these tests. The checkpoints are runs/smollm2 and runs/qwen25-coder, which shared/tools makes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import upcycle
from tests.engines import engines
from tests.engines.engines import Answer, Engine
from upcycle.arch import engines as known

PROMPT = "The capital of France is"


def checkpoint(name: str) -> Path:
    folder = engines.ROOT / "runs" / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"runs/{name} is not there; shared/tools/{name.replace('-', '_')}.py makes it")
    if os.environ.get("ENGINES") != "all":
        pytest.skip("asked by `make engines` alone, which takes minutes")
    return folder


@contextmanager
def served(engine: Engine, folder: Path, *words: str) -> Iterator[str]:
    """Run `vllm serve` on the folder until it answers, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
    }  # fmt: skip
    flags = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", *words]
    # the server of `vllm serve FOLDER`, a word that the package vllm-cpu breaks: it looks up the version of a package "vllm"
    command = [
        engine.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--trust-remote-code",
        *flags,
    ]
    log = folder.parent / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not healthy(f"http://127.0.0.1:{port}"):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def healthy(address: str) -> bool:
    try:
        with urlopen(f"{address}/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(address: str, folder: Path, prompt: str, new: int = 64) -> Answer:
    """Return the ids of the tokens of prompt and completion, and the log-probability of each token but the first."""
    asked = {
        "model": str(folder), "prompt": prompt, "max_tokens": new, "temperature": 0, "logprobs": 1, "echo": True,
        "ignore_eos": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    request = Request(f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["logprobs"]
    ids = [int(token.removeprefix("token_id:")) for token in said["tokens"]]
    return {"greedy": ids, "logprobs": said["token_logprobs"][1:]}


@torch.no_grad()
def wanted(folder: Path, prompt: str, new: int = 64) -> Answer:
    """Return what `complete` returns, from transformers."""
    code = "auto_map" in json.loads((folder / "config.json").read_text())
    model: Any = engines.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=code
    ).eval()
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids])
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return {"greedy": tokens[0].tolist(), "logprobs": engines.logprobs(model, tokens)}


def move(folder: Path, by: float = 0.1) -> None:
    """Make all experts and router rows differ, as training does, so that the choice of copies matters."""
    source, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(source)
    for name in (name for name in tensors if ".mlp." in name):
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name] = (tensors[name] * (1 + by * noise)).to(tensors[name].dtype)
    save_file(tensors, source, {"format": "pt"})


def test_smollm2_as_slices_is_served_as_transformers_runs_it(tmp_path: Path) -> None:
    dense, engine, moe = checkpoint("smollm2"), engines.need("vLLM"), tmp_path / "moe"
    keys = {"method": "virtual_group", "experts": 4, "granularity": 4, "top_k": 4, "output": moe, "quiet": True}
    upcycle.convert(source=dense, target="upcycled", **keys)
    move(moe)
    with served(engine, moe, "--dtype", "float32") as address:
        got = complete(address, moe, PROMPT)
    want = wanted(moe, PROMPT)
    equal, difference = engines.same(got, want)
    print(f"vllm serve, SmolLM2: {equal} of {len(want['greedy'])} tokens, log-probabilities within {difference:.1e}")
    assert engines.verdict(got, want) == known.RIGHT
    # the twins: a free choice of experts, and the dense model
    free = Path(shutil.copytree(moe, tmp_path / "free"))
    config = json.loads((free / "config.json").read_text())
    assert config.pop("expert_slices") == 4
    (free / "config.json").write_text(json.dumps(config))
    assert engines.verdict(wanted(free, PROMPT), want).startswith("wrong: ")
    assert engines.verdict(wanted(dense, PROMPT), want).startswith("wrong: ")


def test_qwen_of_1_5_b_as_slices_is_served_in_bfloat16(tmp_path: Path) -> None:
    """Ask for tokens of 5 B parameters, which need 15 GB, and hold them to what bfloat16 does to the dense model."""
    dense, engine, moe = checkpoint("qwen25-coder"), engines.need("vLLM"), tmp_path / "moe"
    keys = {"method": "virtual_group", "experts": 4, "granularity": 4, "top_k": 4, "output": moe, "quiet": True}
    upcycle.convert(source=dense, target="upcycled", **keys)
    small = ["--enforce-eager", "--max-num-batched-tokens", "256", "--max-num-seqs", "4"]
    with served(engine, moe, "--dtype", "bfloat16", *small) as address:
        got = complete(address, moe, PROMPT)
    exact, rounded = (told(dense, got["greedy"], dtype) for dtype in (torch.float32, torch.bfloat16))
    new = range(len(got["greedy"]) - 64, len(got["greedy"]))
    equal = sum(rounded["greedy"][i - 1] == got["greedy"][i] for i in new)
    ours, theirs = (mean_difference(each, exact) for each in (got, rounded))
    print(
        f"vLLM, Qwen2.5-Coder-1.5B: {equal} of 64 tokens are bfloat16's own; {ours:.1e} off, dense bfloat16 {theirs:.1e}"
    )
    assert equal >= 60  # bfloat16 rounds near ties to either side
    assert ours < 2 * theirs


@torch.no_grad()
def told(folder: Path, tokens: list[int], dtype: torch.dtype) -> Answer:
    """Return the best token after each token, and the log-probability of each token but the first."""
    model: Any = engines.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    rows = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return {
        "greedy": rows.argmax(-1).tolist(),
        "logprobs": [float(rows[i, token]) for i, token in enumerate(tokens[1:])],
    }


def mean_difference(got: Answer, want: Answer) -> float:
    pairs = list(zip(got["logprobs"], want["logprobs"], strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
