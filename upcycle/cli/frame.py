"""The frame of every command of the three packages: help, one-sentence errors, closed pipes, Ctrl-C, warnings.

A command is a module with a `main`. --help shows the module's docstring: what the command does, its usage, examples (a
test runs them), and where its keys are listed.

    from upcycle import cli

    if __name__ == "__main__":  # above the slow imports: --help and Ctrl-C do not wait for them
        sys.exit(cli.start("training.cli.estimate"))
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

TYPE_CHECKING = False  # not typing's: imports up here run before start() can handle Ctrl-C, so there are few
if TYPE_CHECKING:
    import argparse
    from types import FrameType
    from typing import Any, NoReturn, Protocol

    class Main(Protocol):
        def __call__(self, words: Sequence[str] | None = None) -> int: ...


USER_ERROR = 2
STOPPED = 130  # a shell's exit code for a process that Ctrl-C ended
HELP = ("-h", "--help")
OURS = ("upcycle", "training", "evaluation")


def command(*, resumes: bool = False) -> Callable[[Callable[[list[str]], int]], Main]:
    """Decorate a module's `main(words)` so that it returns an exit code for every outcome (see exit_code).

    `resumes`: the command continues where it was when it is started again, and says so when it is stopped.
    """

    def wrap(work: Callable[[list[str]], int]) -> Main:
        @functools.wraps(work)
        def main(words: Sequence[str] | None = None) -> int:
            arguments = list(sys.argv[1:] if words is None else words)
            return exit_code(work.__module__, lambda: work(arguments), resumes=resumes)

        return main

    return wrap


def start(module: str, *, own_help: bool = False) -> int:
    """Import `module`, run its main and return the exit code. `own_help`: main shows --help itself."""
    warnings.formatwarning = lambda message, *_, **__: (
        f"{name_of(module)}: {printable(' '.join(str(message).split()))}\n"
    )
    os.environ.setdefault("TORCH_LOGS_FORMAT", "[torch] %(message)s")  # by default torch adds a date and a source line
    handles_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False in a background job
    if handles_ctrl_c:
        signal.signal(signal.SIGINT, functools.partial(interrupted, module))

    def work() -> int:
        if not own_help and set(HELP) & set(sys.argv[1:]):
            print(about(module))
            return 0
        code: int = import_module(module).main()
        return code

    code = exit_code(module, work)
    if handles_ctrl_c:  # only the teardown of libraries is left, which may end at once
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def exit_code(module: str, work: Callable[[], int], *, resumes: bool = False) -> int:
    """Run `work` and return its exit code. A failure that a user can cause becomes one sentence on stderr; any other
    exception is a defect and keeps its traceback."""
    try:
        try:
            code = work()
        except SystemExit as end:  # argparse raises this after it has shown its help
            if isinstance(end.code, str):  # sys.exit("a sentence")
                raise ValueError(end.code) from None
            code = int(end.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # inside the try: a closed pipe is no error
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
        sentence = printable(" ".join(str(error).split()))
    except KeyboardInterrupt:
        say_stopped(module, resumes=resumes)
        return STOPPED
    rank = os.environ.get("RANK", "0")
    print(f"{name_of(module)}{f', rank {rank}' if rank != '0' else ''}: {sentence}", file=sys.stderr)
    return USER_ERROR


def interrupted(module: str, number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: during an import end the process at once, because libraries swallow exceptions there and no work
    has begun; anywhere else raise KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            say_stopped(module)
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_stopped(module: str, *, resumes: bool = False) -> None:
    more = "; the same command goes on from here" if resumes else ""
    if os.environ.get("RANK", "0") == "0":  # rank 0 speaks for all processes
        os.write(2, f"{name_of(module)}: stopped{more}\n".encode())  # os.write: print itself may have been interrupted


def printable(text: str) -> str:
    """The text with control characters, line ends and marks that turn writing around as escapes: a file's text can
    neither command a terminal nor forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def name_of(module: str) -> str:
    return module.removesuffix(".__main__")


def about(module: str) -> str:
    """The docstring of a module, read without importing the module."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def parser(**settings: Any) -> argparse.ArgumentParser:
    """An ArgumentParser for commands with flags: errors are ValueErrors, and texts of the help keep their lines."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; {self.prog} --help shows what it takes")

    return Parser(**settings)


def names_and_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `A B key=value ...`, in any order, into the names and the words for upcycle.config.reading.read."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def file_and_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split `FILE key=value ...` into the file ("" if left out) and the words. `read` refuses further names."""
    names, keys = names_and_words(words)
    return (names[0] if names else ""), [*names[1:], *keys]
