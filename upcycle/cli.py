"""What all commands of the three packages share: help, one-sentence errors, closed pipes, Ctrl-C, warnings.

A command is a module with a `main`. Its docstring is what --help shows: what it does, its usage, examples (a test runs
them), and where its keys are listed.

    from upcycle import cli

    if __name__ == "__main__":  # before what takes seconds to import: --help and Ctrl-C do not wait for it
        sys.exit(cli.start("training.plan"))
    ...
    @cli.command()
    def main(words: list[str]) -> int: ...
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module

TYPE_CHECKING = False  # typing has it too, but what is imported up here is imported before Ctrl-C is heard
if TYPE_CHECKING:
    import argparse
    from types import FrameType
    from typing import Any, NoReturn, Protocol

    class Main(Protocol):
        def __call__(self, words: Sequence[str] | None = None) -> int: ...


USER_ERROR = 2
STOPPED = 130  # as a shell counts a process that Ctrl-C ended
HELP = ("-h", "--help")
OURS = ("upcycle", "training", "evaluation")


def command(*, resumes: bool = False) -> Callable[[Callable[[list[str]], int]], Main]:
    """Make a module's `main(words)` a command, which returns its exit code. `resumes`: started again it goes on."""

    def wrap(work: Callable[[list[str]], int]) -> Main:
        @functools.wraps(work)
        def main(words: Sequence[str] | None = None) -> int:
            given = list(sys.argv[1:] if words is None else words)
            return exit_code(work.__module__, lambda: work(given), resumes=resumes)

        return main

    return wrap


def start(module: str, *, own_help: bool = False) -> int:
    """The process of `python -m MODULE`, from before its imports to its exit code. `own_help`: its main shows it."""
    warnings.formatwarning = lambda message, *_, **__: f"{name_of(module)}: {' '.join(str(message).split())}\n"
    os.environ.setdefault("TORCH_LOGS_FORMAT", "[torch] %(message)s")  # else with a date and a line of torch's source
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in the background of a script
    if heard:
        signal.signal(signal.SIGINT, functools.partial(interrupted, module))

    def work() -> int:
        if not own_help and set(HELP) & set(sys.argv[1:]):
            print(about(module))
            return 0
        code: int = import_module(module).main()
        return code

    code = exit_code(module, work)
    if heard:  # what is left is taking libraries down
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def exit_code(module: str, work: Callable[[], int], *, resumes: bool = False) -> int:
    """The exit code of `work`. What a user can cause is one sentence; anything else is a defect, with its traceback."""
    try:
        try:
            code = work()
        except SystemExit as end:  # argparse, when it has shown its help
            code = int(end.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader who has gone is no error
        return code
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *OURS):
            raise
        sentence = (
            f'the package {package} is not installed; pip install -e ".[eval,data,plots]" brings what is optional'
        )
    except (ValueError, OSError) as error:
        sentence = " ".join(str(error).split())
    except KeyboardInterrupt:
        say_stopped(module, resumes=resumes)
        return STOPPED
    rank = os.environ.get("RANK", "0")
    print(f"{name_of(module)}{f', rank {rank}' if rank != '0' else ''}: {sentence}", file=sys.stderr)
    return USER_ERROR


def interrupted(module: str, number: int, frame: FrameType | None) -> None:
    """Ctrl-C during an import ends the process at once: libraries catch exceptions there, and nothing is half done."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            say_stopped(module)
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_stopped(module: str, *, resumes: bool = False) -> None:
    more = "; the same command goes on from here" if resumes else ""
    if os.environ.get("RANK", "0") == "0":  # the first one speaks for all
        os.write(2, f"{name_of(module)}: stopped{more}\n".encode())  # print may be what was interrupted


def name_of(module: str) -> str:
    return module.removesuffix(".__main__")


def about(module: str) -> str:
    """The docstring of a module, which is not imported for it."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec(module)
    assert found is not None and found.origin is not None, module
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""


def parser(**settings: Any) -> argparse.ArgumentParser:
    """For commands with flags: its errors are ours, and the text around its lists stays as it is written."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; {self.prog} --help shows what it takes")

    return Parser(**settings)


def names_and_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """`A B key=value ...`, in any order: the names, and the words for upcycle.config.read."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def file_and_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """`FILE key=value ...`, where the file may be left out. More names than that stay, to be refused by `read`."""
    names, keys = names_and_words(words)
    return (names[0] if names else ""), [*names[1:], *keys]
