"""Small models for engines: random weights, of shapes that engines take (heads of 32, widths that 32 divides).

A case is a target, a donor and what is asked of the converter. It is made as converted, or `trained`: after some steps
that move what conversion leaves neutral, such as shared gates and selection biases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import upcycle
from tests.parity import tiny
from tests.unit.training.test_data import jsonl, make_tokenizer, texts
from training.cli.prepare import main as prepare
from training.config.reading import read_config
from training.run.loop import train

SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
STEPS = [
    "data.sequence=32", "batch=4", "micro_batch=4", "steps=4", "log_every=1", "valid_every=0", "schedule.warmup=0",
    "schedule.peak=1e-2", "model.dtype=float32", "checkpoint.every=0",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    target: str
    donor: str
    overrides: dict[str, Any] = field(default_factory=dict)  # of the donor's config.json
    asked: dict[str, Any] = field(default_factory=dict)  # of the converter


SIGMOID = {"score": "sigmoid", "init": {"std": 0.1}}
SCALED = {"granularity": 2, "top_k": 2, "method": "virtual_group"}  # c = 2, which sigmoid targets hold as a key
SHARED = {"shared": 1}  # as wide as a routed expert
PART = {"shared": 0.25}  # of the FFN
SLICES = {"experts": 4, "granularity": 4, "top_k": 4, "method": "virtual_group"}
UNEVEN = {"router": {"normalize": False, "init": {"std": 0.1}}, "scale": "none"}
WIDE = {"intermediate_size": 256}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def sigmoid(*more: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"router": SIGMOID}
    for keys in more:
        asked |= keys
    return asked


def unnormalised() -> dict[str, Any]:
    return {"router": {**SIGMOID, "normalize": False}, "scale": "none"}


# of each target first the plain one, which `make test` asks too; then what it may be asked more
CASES: dict[str, Case] = {
    "mixtral": Case("mixtral", "llama"),
    "mixtral tied": Case("mixtral", "llama", {"tie_word_embeddings": True}),
    "mixtral llama3 rope": Case("mixtral", "llama", {"rope_parameters": LLAMA3}),
    "mixtral head_dim": Case("mixtral", "llama", {"head_dim": 64}),
    "mixtral window": Case("mixtral", "mistral", {"sliding_window": 16}),
    "mixtral gelu": Case("mixtral", "llama", {"hidden_act": "gelu"}),
    "qwen2_moe": Case("qwen2_moe", "qwen2"),
    "qwen2_moe shared": Case("qwen2_moe", "qwen2", asked=SHARED),
    "qwen2_moe shared, not normalised": Case("qwen2_moe", "qwen2", asked=SHARED | UNEVEN),
    "qwen2_moe dense layers": Case("qwen2_moe", "qwen2", asked=SHARED | UNEVEN | {"layers": "every:2"}),
    "qwen2_moe head_dim": Case("qwen2_moe", "llama", {"head_dim": 64}, asked=SHARED | UNEVEN),
    "qwen2_moe llama3 rope": Case("qwen2_moe", "llama", {"rope_parameters": LLAMA3}, asked=SHARED | UNEVEN),
    "qwen3_moe": Case("qwen3_moe", "qwen3"),
    "qwen3_moe not normalised": Case("qwen3_moe", "qwen3", asked=UNEVEN),
    "qwen3_moe dense layers": Case("qwen3_moe", "qwen3", asked={"layers": "every:2"}),
    "qwen3_moe head_dim": Case("qwen3_moe", "qwen3", {"head_dim": 64}),
    "glm4_moe": Case("glm4_moe", "llama", asked=sigmoid()),
    "glm4_moe q/k norm": Case("glm4_moe", "qwen3", asked=sigmoid()),
    "glm4_moe biases": Case("glm4_moe", "qwen2", asked=sigmoid()),
    "glm4_moe shared, scale": Case("glm4_moe", "llama", asked=sigmoid(SHARED, SCALED)),
    "glm4_moe not normalised": Case("glm4_moe", "llama", asked=unnormalised()),
    "glm4_moe dense layers": Case("glm4_moe", "llama", asked=sigmoid({"layers": "first-dense:1"})),
    "glm4_moe llama3 rope": Case("glm4_moe", "llama", {"rope_parameters": LLAMA3}, asked=sigmoid()),
    "granitemoe": Case("granitemoe", "granite"),
    "granitemoe of a llama": Case("granitemoe", "llama"),
    "granitemoe biases": Case("granitemoe", "qwen2"),
    "granitemoe head_dim": Case("granitemoe", "llama", {"head_dim": 64}),
    "granitemoeshared": Case("granitemoeshared", "granite", asked=SHARED),
    "dots1": Case("dots1", "qwen3", asked=sigmoid()),
    "dots1 all heads": Case("dots1", "qwen3", {"num_key_value_heads": 4}, asked=sigmoid()),
    "dots1 scale": Case("dots1", "qwen3", {"num_key_value_heads": 4}, asked=sigmoid(SCALED)),
    "dots1 shared": Case("dots1", "qwen3", {"num_key_value_heads": 4}, asked=sigmoid(SHARED, SCALED, {"scale_in": "weights"})),
    "dots1 shared, scale": Case("dots1", "qwen3", {"num_key_value_heads": 4}, asked=sigmoid(SHARED, SCALED)),
    "dots1 not normalised": Case("dots1", "qwen3", {"num_key_value_heads": 4}, asked=unnormalised()),
    "dots1 dense layers": Case("dots1", "qwen3", {"num_key_value_heads": 4}, asked=sigmoid({"layers": "first-dense:1"})),
    "flex_olmo": Case("flex_olmo", "olmo2"),
    "solar_open": Case("solar_open", "llama", asked=sigmoid()),
    "solar_open biases": Case("solar_open", "qwen2", asked=sigmoid()),
    "solar_open shared, scale": Case("solar_open", "llama", asked=sigmoid(SHARED, SCALED)),
    "solar_open not normalised": Case("solar_open", "llama", asked=unnormalised()),
    "upcycled": Case("upcycled", "llama", asked=SLICES),
    "upcycled sigmoid": Case("upcycled", "qwen3", asked=SLICES | sigmoid()),
    "upcycled sigmoid, shared, tied": Case("upcycled", "qwen3", {"tie_word_embeddings": True}, asked=SLICES | sigmoid(PART)),
    "upcycled shared": Case("upcycled", "llama", asked=SLICES | PART),
    "upcycled dense layers": Case("upcycled", "llama", asked=SLICES | {"layers": "first-dense:1"}),
    "upcycled copies": Case("upcycled", "llama"),
    "upcycled free choice": Case("upcycled", "llama", asked=SLICES | {"router": {"choice": "any", "init": {"std": 0.1}}}),
    "upcycled not normalised": Case("upcycled", "llama", asked=SLICES | UNEVEN),
    "upcycled uneven": Case("upcycled", "llama", asked={"experts": 1, "granularity": 5, "top_k": 5, "method": "split"}),
    "upcycled gelu": Case("upcycled", "llama", {"hidden_act": "gelu"}, asked=SLICES),
    "upcycled biases in FFNs": Case("upcycled", "llama", {"mlp_bias": True}, asked=SLICES),
    "upcycled head_dim": Case("upcycled", "llama", {"head_dim": 64}, asked=SLICES),
    "upcycled window": Case("upcycled", "mistral", {"sliding_window": 16}, asked=SLICES),
    # SGLang cannot pad our experts on a CPU, so their width is a multiple of 32
    "upcycled wide": Case("upcycled", "llama", WIDE, asked=SLICES),
    "upcycled wide, sigmoid, shared, tied": Case(
        "upcycled", "qwen3", {"intermediate_size": 512, "tie_word_embeddings": True}, asked=SLICES | sigmoid(PART)
    ),
    **{f"upcycled wide of {donor}": Case("upcycled", donor, WIDE, asked=SLICES) for donor in ("qwen2", "gemma2", "nemotron")},
    "upcycled llama3 rope": Case("upcycled", "llama", {"rope_parameters": LLAMA3}, asked=SLICES),
    **{f"upcycled of {donor}": Case("upcycled", donor, asked=SLICES) for donor in (
        "qwen2", "gemma2", "gemma3_text", "nemotron", "granite", "olmo2", "olmo3", "starcoder2", "gpt_neox", "phi3", "smollm3",
    )},
}  # fmt: skip
# trained as well: the plain ones, and what training moves or an engine could take for neutral
TRAINED = [name for name in CASES if " " not in name] + [
    "qwen2_moe shared", "qwen2_moe shared, not normalised", "qwen3_moe not normalised", "glm4_moe shared, scale",
    "dots1 scale", "dots1 shared, scale", "solar_open shared, scale", "upcycled sigmoid, shared, tied",
    "upcycled gelu", "upcycled wide", "upcycled wide, sigmoid, shared, tied", "upcycled of gemma3_text", "upcycled of nemotron",
]  # fmt: skip


def make(case: Case, folder: Path, *, trained: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    own = {"head_dim": 32} if case.donor == "qwen3" else {}
    dense = tiny.make(case.donor, folder / "dense", **SHAPE | own | case.overrides)
    make_tokenizer(dense, bos=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (dense / "tokenizer_config.json").write_text(json.dumps(settings))
    keys = {"source": str(dense), "target": case.target, "experts": 4, "top_k": 2, "router": {"init": {"std": 0.1}}}
    keys |= case.asked
    if not trained:
        return upcycle.convert(keys, output=folder / "moe", quiet=True)
    source = jsonl(folder / "text.jsonl", texts(30, 0))
    assert prepare([str(folder / "data"), f"tokenizer={dense}", f"sources=[{source}]"]) == 0
    bias = ["balance.bias_rate=0.05"] if keys["router"].get("score") == "sigmoid" else []
    words = [f"output={folder / 'run'}", f"export={folder / 'moe'}", f"data.train=[{folder / 'data'}]"]
    train(read_config("", [*words, f"model.upcycle={json.dumps(keys)}", *STEPS, *bias]))
    return folder / "moe"


def adapt(moe: Path, folder: Path, match: str) -> tuple[Path, Path]:
    """Train adapters of the modules that `match` names, and return their folder and that of the merged model."""
    alone, merged = folder / "alone", folder / "merged"
    source = jsonl(folder / "text.jsonl", texts(30, 0))
    assert prepare([str(folder / "data"), f"tokenizer={moe}", f"sources=[{source}]"]) == 0
    words = [f"output={folder / 'run'}", f"export={merged}", f"data.train=[{folder / 'data'}]", f"model.source={moe}"]
    words += ["lora.rank=4", f"lora.match={match}", f"lora.export={alone}"]
    train(read_config("", [*words, *STEPS]))
    return alone, merged
