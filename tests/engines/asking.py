"""What the scripts ask_ENGINE.py share. They run in the engine's own environment, so nothing of ours is imported here.

ask_ENGINE.py QUESTIONS ANSWERS, both JSON: a list of models, each {"folder", "prompt", "text", "new"} with token ids, is
answered by {"greedy": the `new` tokens after the prompt, "logprobs": of every token of the text but its first, null where it
was not told}, or by {"refused": the engine's sentence}. Each model has a forked process of its own: an engine that aborts
refuses one model, and its imports are paid for once.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def main(answer: Callable[[dict[str, Any]], Answer]) -> None:
    questions, answers = Path(sys.argv[1]), Path(sys.argv[2])
    found = []
    for question in json.loads(questions.read_text()):
        start = time.monotonic()
        found.append(apart(answer, question))
        print(f"{question['folder']}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    answers.write_text(json.dumps(found))


def apart(answer: Callable[[dict[str, Any]], Answer], question: dict[str, Any]) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder) / "log", Path(folder) / "out"
        child = os.fork()
        if not child:
            try:
                told = os.open(log, os.O_WRONLY | os.O_CREAT)
                os.dup2(told, 1)
                os.dup2(told, 2)
                out.write_text(json.dumps(answer(question)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if out.exists():
            answered: Answer = json.loads(out.read_text())
            return answered
        said = log.read_text(errors="replace")
        if os.environ.get("ASKING_LOG"):
            sys.stderr.write(said)
        return {"refused": sentence(said) or f"the process ended with {status}"}


def sentence(said: str) -> str:
    """The line that says why: what llama.cpp said before it gave up, else the last one that names an error."""
    lines = [re.sub(r"^\(\w+ pid=\d+\)|\x1b\[[0-9;]*m", "", line).strip() for line in said.splitlines()]
    lines = [line for line in lines if line]
    for pattern in (r".*(GGML_ASSERT|error loading model)", r"(\w+\.)*\w*(Error|Exception)\b", ""):
        found = [line for line in lines if re.match(pattern, line)]
        if found:
            return found[-1][:300]
    return ""
