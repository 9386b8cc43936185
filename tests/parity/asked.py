"""A small Llama with random weights and a tokenizer, made on the spot: what a suite can be asked of in any clone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer

from evaluation.ask.tasks import SUITES
from upcycle.arch.sample import make_llama

END = "<|end|>"
VOCAB = 400  # 256 bytes and a few words, so that endings have several tokens
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0, "dtype": "float32",
}  # fmt: skip


def make(folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """Writes the model and its tokenizer. `more`: keys of config.json."""
    make_llama(folder, SHAPE | more, seed=seed)
    tokenizer: Any = ByteLevelBPETokenizer()
    lines = [line for path in sorted((SUITES / "tiny").glob("*.jsonl")) for line in path.read_text().splitlines()]
    tokenizer.train_from_iterator(lines, vocab_size=VOCAB, special_tokens=[END], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "max_length": 64}))
    return folder
