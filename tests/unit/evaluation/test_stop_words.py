"""A text ends where lm-eval's HFLM ends it, also after bytes that are no UTF-8."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.models.utils_hf import MultiTokenEOSCriteria
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from evaluation.ask.engine import Engine
from evaluation.ask.lm import DecoderLM
from tests.parallel import models

LONG = 24  # tokens of a text
UNTIL = ("\n\n", "Q:", "</s>", "é", ".")


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's: characters, and bytes for what it has not; bytes in a row are decoded together."""
    letters = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abQ:.é", "\n", "\n\n"]
    vocab = {word: number for number, word in enumerate(letters)}
    made = Tokenizer(tokenizer_models.BPE(vocab, [("\n", "\n")], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer as GPT-2's: all tokens are bytes."""
    letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(tokenizer_models.BPE({word: number for number, word in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def written(tokenizer: PreTrainedTokenizerFast, tokens: list[int], criteria: bool, lm: DecoderLM) -> str:
    """The text that is left of tokens which a model writes one after the other."""
    words = [MultiTokenEOSCriteria(word, tokenizer, 0, 1) for word in UNTIL]
    looks, said = lm.looks(UNTIL), list[int]()
    for token in tokens:
        said.append(token)
        if criteria:
            ends = token == tokenizer.eos_token_id or any(
                word(torch.tensor([said]), torch.zeros(1, 1)) for word in words
            )
        else:
            ends = lm.stopped(said, looks)
        if ends:
            break
    return postprocess_generated_text(tokenizer.decode(said, skip_special_tokens=True), list(UNTIL), None)


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_texts_end_where_hflm_ends_them(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    lm = DecoderLM(Engine(models.make("dense"), 64, progress=False), tokenizer)
    rng, broken = random.Random(0), 0
    # bytes of a newline, of letters, of the two halves of é and of no character at all are the likeliest
    likely = [
        t
        for t in range(len(tokenizer))
        if tokenizer.convert_ids_to_tokens(t)
        in (
            "<0x0A>",
            "<0xC3>",
            "<0xA9>",
            "<0xE2>",
            "<0x51>",
            "<0x3A>",
            "▁",
            "a",
            "b",
            "\n",
            "Ċ",
            "Ã",
            "©",
            "â",
            "Q",
            ":",
        )
    ]
    for _ in range(400):
        tokens = [rng.choice(likely) if rng.random() < 0.95 else rng.randrange(len(tokenizer)) for _ in range(LONG)]
        want = written(tokenizer, tokens, True, lm)
        broken += "�" in want
        assert written(tokenizer, tokens, False, lm) == want, tokens
    assert broken > 40
