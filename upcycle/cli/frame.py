"""Shared by all commands: help without slow imports, one-sentence errors, closed pipes, Ctrl-C and words."""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

TYPE_CHECKING = False  # not typing's: imports here run before start() can handle Ctrl-C, so keep them few
if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable
    from types import FrameType
    from typing import Any, NoReturn, Protocol, TypeVar

    T = TypeVar("T")

    class Main(Protocol):
        def __call__(self, words: Sequence[str] | None = None) -> int: ...


NAME = "upcycle"
USER_ERROR = 2
STOPPED = 130  # a shell's exit code after Ctrl-C
HELP = ("-h", "--help")
OURS = ("upcycle", "training", "evaluation")
NEEDS = {
    "torch": "2.11",
    "transformers": "5.17",
    "safetensors": "0.6",
}  # the oldest versions, as in pyproject.toml
EXTRAS = {  # package -> its extra in pyproject.toml
    "transformer_engine": "te", "grouped_gemm": "grouped-gemm", "vllm": "serve",
    "matplotlib": "plots", "datasets": "data", "pyarrow": "data", "lm_eval": "eval", "tensorboard": "logs",
    "wandb": "logs", "mlflow": "logs", "trackio": "logs", "quack": "quack", "cutlass": "quack",
    "llmcompressor": "quantize", "compressed_tensors": "quantize", "s3fs": "storage",
    "gcsfs": "storage",
}  # fmt: skip


def start(work: Callable[[], int]) -> int:
    """Run a program's `work`, which does the slow imports, and return the exit code."""
    warnings.formatwarning = lambda message, *_, **__: f"{NAME}: {printable(' '.join(str(message).split()))}\n"
    os.environ.setdefault("TORCH_LOGS_FORMAT", "[torch] %(message)s")  # torch would add a date and a source line
    handles_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False in a background job
    if handles_ctrl_c:
        signal.signal(signal.SIGINT, interrupted)
    code = exit_code(work)
    if handles_ctrl_c:  # only the teardown of libraries is left
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def command(*, resumes: bool = False) -> Callable[[Callable[[Sequence[str]], int]], Main]:
    """Decorate a `main(words)` so that it returns an exit code for every outcome; the default words are sys.argv's.

    `resumes`: the command continues after a stop, and says so when it is stopped.
    """

    def wrap(work: Callable[[Sequence[str]], int]) -> Main:
        @functools.wraps(work)
        def main(words: Sequence[str] | None = None) -> int:
            given = list(sys.argv[1:] if words is None else words)
            return exit_code(lambda: work(given), resumes=resumes)

        return main

    return wrap


def program(module: str) -> NoReturn:
    """Run a module's main as a program; --help shows its docstring."""
    from importlib import import_module

    def work() -> int:
        if set(HELP) & set(sys.argv[1:]):
            print(about(module))
            return 0
        code: int = import_module(module).main()
        return code

    sys.exit(start(work))


def exit_code(work: Callable[[], int], *, resumes: bool = False) -> int:
    """Run `work` and return its exit code: a failure that a user can cause becomes one sentence on stderr.

    Any other exception is a defect and keeps its traceback. `resumes`: the same command continues after a stop.
    """
    try:
        try:
            code = work()
        except SystemExit as end:  # lm-eval's parser raises this after it has shown its help
            if isinstance(end.code, str):  # sys.exit("a sentence")
                raise ValueError(end.code) from None
            code = int(end.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # inside the try, because a closed pipe is not an error
        return code
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *OURS):
            raise
        sentence = missing(package)
    except (ValueError, OSError) as error:
        sentence = printable(" ".join(str(error).split()))
    except KeyboardInterrupt:
        say_stopped(resumes=resumes)
        return STOPPED
    rank = os.environ.get("RANK", "0")
    print(f"{NAME}{f', rank {rank}' if rank != '0' else ''}: {sentence}", file=sys.stderr)
    return USER_ERROR


def missing(package: str) -> str:
    """Return the sentence about a missing package; it names the extra that installs it."""
    how = install(package)
    return f"the package {package} is not installed" + (f"; {how}" if how else "")


def install(package: str) -> str:
    """Return the command that installs a package by its extra, or "" if no extra has it."""
    return f'pip install "upcycle[{EXTRAS[package]}]"' if package in EXTRAS else ""


def check_versions() -> None:
    """Raise a ValueError if a package is too old."""
    from importlib.metadata import PackageNotFoundError, version

    old = {}
    for package, wanted in NEEDS.items():
        with suppress(PackageNotFoundError):  # its import reports that
            if numbers(installed := version(package)) < numbers(wanted):
                old[package] = installed
    if old:
        found = ", ".join(f"{package} is {old[package]} and must be {NEEDS[package]} or newer" for package in old)
        newer = " ".join(f'"{package}>={NEEDS[package]}"' for package in old)
        raise ValueError(f"{found}; pip install --upgrade {newer}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (5, 17) of 5.17.0.dev0."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


def again(*words: str) -> list[str]:
    """Return the start of a command line that runs `upcycle` in a new process of this Python.

    -P keeps folders of the user from hiding our packages, because `python -m` searches the current folder. A clone
    comes first on the path, before an installed version.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    first = "" if root.endswith("-packages") else f"sys.path.insert(0, {root!r}); "
    code = f"import sys; {first}from upcycle.cli import main; main.script()"
    return [sys.executable, "-P", "-c", code, *words]


def interrupted(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: end the process during an import, where libraries swallow exceptions; else KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            say_stopped()
            os._exit(STOPPED)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_stopped(*, resumes: bool = False) -> None:
    more = "; the same command continues from here" if resumes else ""
    if os.environ.get("RANK", "0") == "0":  # rank 0 speaks for all processes
        os.write(2, f"{NAME}: stopped{more}\n".encode())  # os.write: print itself may have been interrupted


def printable(text: str, keep: str = "") -> str:
    """Escape control characters, line ends and direction marks, which could control a terminal; `keep` stays."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


# ---- help


def about(module: str) -> str:
    """Return a module's docstring and the keys of its dataclasses, without importing the module."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    source = Path(spec.origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    keys = [line for node in tree.body if isinstance(node, ast.ClassDef) for line in fields(node, source.splitlines())]
    said = (ast.get_docstring(tree) or "").strip()
    return "\n".join([said, *(["", "keys:", *keys] if keys else [])])


def fields(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """Return the fields of a dataclass as in its source: name, type, default and meaning."""
    from ast import AnnAssign

    return [lines[part.lineno - 1].rstrip() for part in node.body if isinstance(part, AnnAssign)]


# ---- words


def names_and_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `A B key=value ...`, in any order, into the names and the words for upcycle.config.reading.read."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def file_and_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split `FILE key=value ...` into the file ("" if left out) and the words. `read` refuses further names."""
    names, keys = names_and_words(words)
    return (names[0] if names else ""), [*names[1:], *keys]


def named(kind: type[T], words: Sequence[str], *places: str, values: Iterable[tuple[str, Any]] = ()) -> T:
    """Read a `kind` from words whose names fill these places in order, and from `values`.

    Too few or too many names are an error.
    """
    from upcycle.config.reading import read

    names, keys = names_and_words(words)
    left = [place for place in places if not any(word.startswith(f"{place}=") for word in keys)]
    if len(names) != len(left):
        read(kind, "", keys)  # report an unknown key first
        raise ValueError(f"write {' '.join(place.upper() for place in left)} [key=value ...]; got {names}")
    return read(kind, "", [*(f"{place}={name}" for place, name in zip(left, names, strict=True)), *keys], values=values)
