"""The table of commands, and `main`, which runs one of them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from upcycle.cli import frame

TYPE_CHECKING = False  # not typing's, as in frame.py
if TYPE_CHECKING:
    import logging
    from typing import NoReturn

COMMANDS = {  # name -> module with main(words) -> exit code, whose docstring is its help, and one line about it
    "plan": ("upcycle.cli.plan", "show every tensor, size and promise of an MoE; writes nothing"),
    "convert": ("upcycle.cli.convert", "make the MoE checkpoint"),
    "verify": ("upcycle.cli.verify", "check a converted folder against its plan, bit for bit"),
    "inspect": ("upcycle.cli.inspect", "describe a checkpoint folder, and check that it is complete"),
    "quantize": ("upcycle.cli.quantize", "write a model in FP8, NVFP4, AWQ or GGUF, and measure what it costs"),
    "push": ("upcycle.cli.push", "upload a model's folder to the Hub"),
    "prepare": ("training.cli.prepare", "turn text into token shards"),
    "train": ("training.cli.train", "train, or resume a run"),
    "launch": ("training.cli.launch", "write the file that runs a training under Slurm, SkyPilot, Kubernetes or Ray"),
    "export": ("training.cli.export", "turn a training checkpoint into a Hugging Face folder"),
    "add": ("training.cli.add", "make a part: new experts that learn your documents while the model stays"),
    "join": ("training.cli.join", "join parts to their base in one model"),
    "remove": ("training.cli.remove", "take a part out of a joined model"),
    "upgrade": ("training.cli.upgrade", "move a part to a base that was trained further"),
    "recommend": (
        "training.cli.recommend",
        "compare dense training, slices and copies for your model, GPUs and tokens",
    ),
    "estimate": ("training.cli.estimate", "estimate memory, hours and cost of a training run"),
    "bench": ("training.cli.bench", "measure tokens/s, TFLOP/s and memory of training steps"),
    "eval": ("evaluation.cli.eval", "evaluate a model on a suite of tasks"),
    "chat": ("evaluation.cli.chat", "talk to a model"),
    "compare": ("evaluation.cli.compare", "judge whether B is better than A, over seeds"),
    "facts": ("evaluation.cli.facts", "write made-up facts to train on, and score what a model knows"),
    "watch": ("evaluation.cli.watch", "show runs in a browser while they train"),
    "routing": ("evaluation.cli.routing", "show how experts are used on texts"),
    "report": ("evaluation.cli.report", "make a page or a picture of runs and results"),
    "study": ("evaluation.cli.study", "train and judge arms x seeds"),
}
MODULES = {name: module for name, (module, _) in COMMANDS.items()} | {"lm-eval": "evaluation.ask.harness"}
# nproc starts several processes of these
LAUNCHED = ("convert", "prepare", "train", "export", "bench", "eval", "estimate")

HELP = """Turn a dense language model into a mixture of experts, train it, and judge the result.

usage: upcycle COMMAND ... [key=value ...]

{commands}

examples:
  upcycle plan ./llama                                                # show the result; writes nothing
  upcycle convert ./llama output=./moe method.name=virtual_group target=upcycled
  upcycle verify ./llama ./moe
  upcycle prepare runs/data tokenizer=./llama sources=[book.txt]
  upcycle train my.yaml output=runs/moe nproc=8                       # on 8 GPUs of this machine
  upcycle eval tiny ./moe
  upcycle chat ./moe

`upcycle COMMAND --help` shows more. Keys with defaults and meaning: docs/config.md
"""


@frame.command()
def main(words: Sequence[str]) -> int:
    """Run the command that the words name: its help, several processes of it, or the command itself."""
    name, *rest = words or frame.HELP
    if name in frame.HELP:
        listed = "\n".join(f"  {name:9} {about}" for name, (_, about) in COMMANDS.items())
        print(HELP.format(commands=listed), end="")
        return 0
    if name == "--version":
        from upcycle import __version__

        print(__version__)
        return 0
    if name not in MODULES:
        from upcycle.plugin import nearest

        raise ValueError(
            f"unknown command {name!r}{nearest(name, [*COMMANDS])}; the commands are {', '.join(COMMANDS)}"
        )
    show_own_packages()
    if name == "lm-eval":
        return call(name, rest)
    if set(frame.HELP) & set(rest):
        print(frame.about(MODULES[name]))
        return 0
    frame.check_versions()
    check_words(rest)
    counts = [word.partition("=")[2] for word in rest if word.startswith("nproc=")]
    if counts:
        return launch(name, counts[-1], [word for word in rest if not word.startswith("nproc=")])
    return call(name, rest)


def check_words(words: Sequence[str]) -> None:
    """Raise a ValueError for flags, and for words that the shell cut at a space."""
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        key, equals, value = word.partition("=")
        if word.startswith("-") and word != "--":
            key = key.lstrip("-").replace("-", "_")
            value = value or ("" if after.startswith("-") or "=" in after else after)
            raise ValueError(f"{word} is not key=value; write {key}={value or f'VALUE, or {key}=true'}")
        if equals and not key:
            raise ValueError(f"{word!r} has no key; write {before}={value or after}, without spaces around =")
        for opening, closing in ("[]", "{}"):
            if value.startswith(opening) and value.count(opening) > value.count(closing):
                raise ValueError(
                    f"{word!r} lacks its {closing}, because the shell cuts words at spaces; "
                    f"put the whole word in quotes: '{key}={opening}...{closing}'"
                )


def call(name: str, words: list[str]) -> int:
    """Import a command's module and run its main."""
    from importlib import import_module

    code: int = import_module(MODULES[name]).main(words)
    return code


def launch(name: str, count: str, words: list[str]) -> int:
    """Run `count` processes of a command under torch's launcher, and return the exit code of the first that failed."""
    if name not in LAUNCHED:
        raise ValueError(f"{name} runs in one process; leave nproc out (it works with {', '.join(LAUNCHED)})")
    if not count.isdecimal() or count == "0":
        raise ValueError(f"nproc={count} is not a number of processes; write for instance nproc=8")
    if "RANK" in os.environ:
        raise ValueError(f"nproc={count} starts processes, but torchrun already started this one; leave nproc out")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(count))))  # torchrun would set 1
    import logging

    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for quiet in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{quiet}").addFilter(is_news)
    try:
        launcher.main(["--standalone", "--nproc-per-node", count, "--no-python", *frame.again(name, *words)])
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of torch's launcher says more than the failed process's own sentence."""
    said = record.getMessage()
    return not said.startswith("Sending process") and f"(exitcode: {frame.USER_ERROR})" not in said


def show_own_packages() -> None:
    """Put our folder first on the path if another package `training` or `evaluation` hides ours."""
    from importlib.util import find_spec
    from pathlib import Path

    root = Path(__file__).parents[2]
    for name in frame.OURS[1:]:
        found = find_spec(name)
        if found is None or found.origin is None or Path(found.origin).parents[1] != root:
            sys.path.insert(0, str(root))
            return


def script(*before: str) -> NoReturn:
    """Run as a program, with `before` in front of the words."""
    codes: list[int] = []
    atexit.register(leave, codes)  # the first one, so it runs after those of all libraries
    sys.argv[1:1] = before
    codes.append(frame.start(main))
    sys.exit(codes[0])


def leave(codes: Sequence[int]) -> None:
    """End the process with the code that a command returned: Python would take every object of torch apart, which
    takes a second and changes no file. After a defect there is no code, and Python ends as always."""
    if codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # no stream, a reader that left, a closed one
                stream.flush()
        os._exit(codes[0])
