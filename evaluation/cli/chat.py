"""Talk to a model: a folder in Hugging Face layout, dense or MoE, made here or not; a hub id; a run that has exported.

usage: upcycle chat MODEL [key=value ...]

  upcycle chat ./moe                                                       # on a terminal: a conversation
  upcycle chat ./moe prompt="The capital of France is" temperature=0
  upcycle chat ./llama-chat system="Be short." prompt="What is a mixture of experts?" tokens=100

Without a prompt, a question in a pipe is answered: `upcycle chat ./moe < question.txt`. Answers are streamed, by the
tokenizer's chat template if it has one; without one the model continues what you write. In a conversation /reset begins
anew, Ctrl-C ends an answer, and Ctrl-D leaves.

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
