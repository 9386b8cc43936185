"""Talk to a model: a folder in Hugging Face layout (dense or MoE), a hub id, or a training run with an export.

usage: upcycle chat MODEL [key=value ...]

  upcycle chat ./moe                                                       # on a terminal: a conversation
  upcycle chat ./moe prompt="The capital of France is" temperature=0
  upcycle chat ./llama-chat system="Be short." prompt="What is a mixture of experts?" tokens=100

Without a prompt, chat answers standard input: `upcycle chat ./moe < question.txt`. Answers appear word by word, by the
tokenizer's chat template; without a template the model continues your text. In a conversation /reset starts over,
Ctrl-C ends an answer, and Ctrl-D leaves.

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    from evaluation.chat import chat, read_config

    chat(read_config(words))
    return 0
