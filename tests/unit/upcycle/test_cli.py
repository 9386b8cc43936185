"""The frame of all commands: help without heavy imports, one-sentence errors, closed pipes, Ctrl-C, warnings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from upcycle.cli import frame as cli

ROOT = Path(__file__).parents[3]
# stdout is buffered, as in a terminal session: output that is not flushed in time fails when Python ends
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
# every module that calls cli.start is a command; with these words its main reaches the slow imports
WORDS = {"upcycle": ["plan", "source=x"], "evaluation": ["compare", "a", "b"], "training.cli.prepare": ["out"],
         "training.cli.plots": ["run", "--output", "x.png"]}  # fmt: skip
COMMANDS = sorted(
    cli.name_of(module)
    for package in (*cli.OURS, "benchmarks", "examples")
    for path in (ROOT / package).rglob("*.py")
    for module in re.findall(r'^ *.*cli\.start\("([\w.]+)"', path.read_text(), re.MULTILINE)
    if path.name != "cli.py"
)


def run(
    module: str, *words: str, path: Path | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    more = {"PYTHONPATH": f"{path}:{ROOT}" if path else str(ROOT), **(environment or {})}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | more, cwd=path or ROOT)


@pytest.fixture(scope="module")
def interrupting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for slow libraries: each sends itself Ctrl-C while it is imported, and catches every exception."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("torch", "numpy", "transformers"):
        lines = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        (folder / f"{name}.py").write_text(lines)
    return folder


def test_the_commands_are_found() -> None:
    assert {"upcycle", "training", "evaluation", "training.cli.estimate", "examples.demo"} < set(COMMANDS)
    assert len(COMMANDS) == 13


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_that_takes_seconds(name: str, interrupting: Path) -> None:
    for word in cli.HELP:
        done = run(name, word, path=interrupting)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"usage: {'' if name == 'upcycle' else 'python -m '}{name}" in done.stdout


def test_importing_the_package_imports_nothing_that_takes_seconds(interrupting: Path) -> None:
    code = "import sys, upcycle, upcycle.cli.frame; sys.exit(bool({'torch', 'numpy', 'transformers', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=interrupting, env=ENVIRONMENT)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name != "benchmarks.converting"]
)  # bench imports nothing slow
def test_ctrl_c_during_the_imports_is_one_line(name: str, interrupting: Path) -> None:
    done = run(name, *WORDS.get(name, ["x"]), path=interrupting)
    assert (done.returncode, done.stderr, done.stdout) == (130, f"{name}: stopped\n", "")
    done = run(name, *WORDS.get(name, ["x"]), path=interrupting, environment={"RANK": "1"})
    assert (done.returncode, done.stderr, done.stdout) == (130, "", ""), "the first rank speaks for all"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_who_has_gone_is_no_error(name: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# ---- commands with one line of code

LINES = {
    "value": "raise ValueError('a sentence\\n  in two lines')",
    "file": "open('no-such-file')",
    "package": "import no_such_package.part",
    "ours": "import upcycle.no_such_module",
    "defect": "raise KeyError('x')",
    "pipe": "print('x' * 1000000)",
    "stop": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "flag": "cli.parser(prog='it').parse_args(['--no'])",
    "warn": "import warnings; warnings.warn('two\\n   lines'); print('done')",
    "log": "import logging, torch; logging.getLogger('torch.distributed').warning('look')",
    "code": "return 7",
    "ended": "sys.exit('a sentence')",
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    for name, line in LINES.items():
        decorator = f"@cli.command(resumes={name == 'stop'})"
        end = f"if __name__ == '__main__':\n    import sys\n    sys.exit(cli.start('{name}'))\n"
        (folder / f"{name}.py").write_text(
            f"import sys\nfrom upcycle import cli\n{decorator}\ndef main(words):\n    {line}\n    return 0\n{end}"
        )
    return folder


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("value", 2, "value: a sentence in two lines\n"),
        ("file", 2, "file: [Errno 2] No such file or directory: 'no-such-file'\n"),
        ("package", 2, 'package: the package no_such_package is not installed; pip install -e ".[eval,data,plots]" '),
        ("stop", 130, "stop: stopped; the same command goes on from here\n"),
        ("flag", 2, "flag: unrecognized arguments: --no; it --help shows what it takes\n"),
        ("warn", 0, "warn: two lines\n"),
        ("log", 0, "[torch] look\n"),
        ("code", 7, ""),
        ("ended", 2, "ended: a sentence\n"),
    ],
)
def test_what_happens_is_one_sentence(name: str, code: int, said: str, commands: Path) -> None:
    done = run(name, path=commands)
    assert done.returncode == code
    assert done.stderr.startswith(said) and done.stderr.count("\n") == (said != "")


def test_ranks_say_who_they_are(commands: Path) -> None:
    done = run("value", path=commands, environment={"RANK": "3"})
    assert (done.returncode, done.stderr) == (2, "value, rank 3: a sentence in two lines\n")
    done = run("stop", path=commands, environment={"RANK": "3"})
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("name", ["ours", "defect"])
def test_a_defect_keeps_its_traceback(name: str, commands: Path) -> None:
    done = run(name, path=commands)
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_reader_who_goes_is_no_error(commands: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=commands,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == "xxx"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)


def test_ctrl_c_stays_ignored_where_a_script_ignores_it(commands: Path) -> None:
    command = ["bash", "-c", f"trap '' INT; exec {sys.executable} -m stop"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=commands, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


def test_words() -> None:
    assert cli.file_and_words(["my.yaml", "a=1", "b=c=2"]) == ("my.yaml", ["a=1", "b=c=2"])
    assert cli.file_and_words(["a=1"]) == ("", ["a=1"])
    assert cli.file_and_words(["a", "b", "c=1"]) == ("a", ["b", "c=1"])
    assert cli.names_and_words(["a", "x=1", "b"]) == (["a", "b"], ["x=1"])
