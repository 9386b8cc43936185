"""The door: help without heavy imports, one-sentence errors, closed pipes, Ctrl-C, warnings, several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from upcycle.cli import frame
from upcycle.cli.main import COMMANDS, LAUNCHED, main
from upcycle.cli.verify import VerifyKeys
from upcycle.config.reading import config_and_source

ROOT = Path(__file__).parents[3]
# stdout is buffered, as in a terminal session: output that is not flushed in time fails when Python ends
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
PROGRAMS = ("benchmarks.converting", "benchmarks.evaluation", "benchmarks.kernels", "examples.demo")
READY = {"train": "chat", "launch": "chat", "estimate": "chat", "bench": "bench-olmoe"}
# words with which a command reaches the slow imports
WORDS = {"plan": ["source=x"], "verify": ["a", "b"], "push": ["a", "b/c"], "compare": ["a", "b"], "export": ["a", "b"]}


def run(*words: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    more = {"PYTHONPATH": f"{path}:{ROOT}" if path else str(ROOT), **environment}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | more, cwd=path or ROOT)


@pytest.fixture(scope="module")
def interrupting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for slow libraries: each sends itself Ctrl-C while it is imported, and catches every exception."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("torch", "numpy", "transformers"):
        lines = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        (folder / f"{name}.py").write_text(lines)
    return folder


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_imports_nothing_that_takes_seconds(words: list[str], interrupting: Path) -> None:
    done = run("upcycle", *words, "--help", path=interrupting)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: upcycle {' '.join(words)}".strip() in done.stdout and "  upcycle " in done.stdout
    assert "docs/config.md" in done.stdout or "keys:" in done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_programs_have_help_too(name: str, interrupting: Path) -> None:
    done = run(name, "--help", path=interrupting)
    assert (done.returncode, done.stderr) == (0, "") and f"python -m {name}" in done.stdout


def test_importing_the_packages_imports_nothing_that_takes_seconds(interrupting: Path) -> None:
    code = "import sys, upcycle, training, evaluation; sys.exit(bool({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=interrupting, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_during_the_imports_is_one_line(name: str, interrupting: Path) -> None:
    words = ["upcycle", name, *WORDS.get(name, ["x"])]
    done = run(*words, path=interrupting)
    assert (done.returncode, done.stderr, done.stdout) == (130, "upcycle: stopped\n", "")


def test_the_first_rank_speaks_for_all(interrupting: Path) -> None:
    done = run("upcycle", "train", "x", path=interrupting, RANK="1")
    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verfy"], "unknown command 'verfy'; did you mean 'verify'?"),
        (["verify", "a", "b", "--tokens", "3"], "--tokens is not key=value; write tokens=3"),
        (["push", "a", "b/c", "--dry-run"], "--dry-run is not key=value; write dry_run=VALUE, or dry_run=true"),
        (["train", "--data.seed=3"], "--data.seed=3 is not key=value; write data.seed=3"),
        (["verify", "a"], "write DENSE MOE [key=value ...]"),
        (["verify", "a", "b", "tokns=3"], "did you mean 'tokens'"),
        (["compare", "a", "b", "nproc=2"], "compare runs in one process; leave nproc out"),
        (["train", "x", "nproc=two"], "nproc=two is not a number of processes"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("upcycle: ") and error.count("\n") == 1


def test_nproc_starts_processes_and_keeps_their_exit_code(tmp_path: Path) -> None:
    assert set(LAUNCHED) < set(COMMANDS)
    (tmp_path / "a.txt").write_text("text")
    done = run("upcycle", "convert", "source=nowhere", "output=x", "nproc=2", path=tmp_path)
    assert done.returncode == 2 and "'nowhere' is not a folder" in done.stderr and "Traceback" not in done.stderr
    assert run("upcycle", "convert", "nproc=2", RANK="0").stderr.endswith("leave nproc out\n")


def test_a_folder_named_training_hides_nothing(tmp_path: Path) -> None:
    for name in ("training", "evaluation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    for words in (["train", "no-such"], ["compare", "no", "such"]):
        done = run("upcycle", *words, path=tmp_path)
        assert done.returncode == 2 and "no" in done.stderr and "not ours" not in done.stderr, done.stderr


def test_a_program_ends_with_its_code_after_what_libraries_left_to_the_end() -> None:
    """Handlers and threads of libraries run, all output arrives, and Python takes nothing apart afterwards."""
    lines = (
        "import atexit, threading, time",
        "from upcycle.cli import main",
        "class Late:",
        "    def __del__(self): print('taken apart')",
        "def work(words=None):",
        "    main.late = Late()",
        "    atexit.register(print, 'handler')",
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
        "    print('x' * 100000)",
        "    return 75",
        "main.main = work",
        "main.script()",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.split() == ["x" * 100000, "thread", "handler"]


# ---- programs with one line of code

LINES = {
    "value": "raise ValueError('a sentence\\n  in two lines')",
    "file": "open('no-such-file')",
    "package": "import lm_eval_no.part",
    "ours": "import upcycle.no_such_module",
    "defect": "raise KeyError('x')",
    "pipe": "print('x' * 1000000)",
    "stop": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "warn": "import warnings; warnings.warn('two\\n   lines'); print('done')",
    "log": "import logging, torch; logging.getLogger('torch.distributed').warning('look')",
    "code": "return 7",
    "ended": "sys.exit('a sentence')",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, line in LINES.items():
        (folder / f"{name}.py").write_text(
            f"import sys\nfrom upcycle.cli import frame\n@frame.command(resumes={name == 'stop'})\ndef main(words):\n"
            f"    {line}\n    return 0\nif __name__ == '__main__':\n    frame.program('{name}')\n"
        )
    return folder


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("value", 2, "upcycle: a sentence in two lines\n"),
        ("file", 2, "upcycle: [Errno 2] No such file or directory: 'no-such-file'\n"),
        ("package", 2, "upcycle: the package lm_eval_no is not installed\n"),
        ("stop", 130, "upcycle: stopped; the same command continues from here\n"),
        ("warn", 0, "upcycle: two lines\n"),
        ("log", 0, "[torch] look\n"),
        ("code", 7, ""),
        ("ended", 2, "upcycle: a sentence\n"),
    ],
)
def test_what_happens_is_one_sentence(name: str, code: int, said: str, programs: Path) -> None:
    done = run(name, path=programs)
    assert (done.returncode, done.stderr) == (code, said)


def test_ranks_say_who_they_are(programs: Path) -> None:
    assert run("value", path=programs, RANK="3").stderr == "upcycle, rank 3: a sentence in two lines\n"
    assert run("stop", path=programs, RANK="3").stderr == ""


@pytest.mark.parametrize("name", ["ours", "defect"])
def test_a_defect_keeps_its_traceback(name: str, programs: Path) -> None:
    done = run(name, path=programs)
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_a_reader_who_goes_is_no_error(programs: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=programs,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == "xxx"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)


def test_ctrl_c_stays_ignored_where_a_script_ignores_it(programs: Path) -> None:
    command = ["bash", "-c", f"trap '' INT; exec {sys.executable} -m stop"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=programs, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


def test_words() -> None:
    assert frame.file_and_words(["my.yaml", "a=1", "b=c=2"]) == ("my.yaml", ["a=1", "b=c=2"])
    assert frame.file_and_words(["a=1"]) == ("", ["a=1"])
    assert frame.file_and_words(["a", "b", "c=1"]) == ("a", ["b", "c=1"])


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_key_is_refused_with_the_nearest_wherever_it_stands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    other = {"verify": ("tokns", "tokens"), "push": ("privat", "private"), "bench": ("optimzer", "optimizer")}
    other |= dict.fromkeys(("chat", "recommend"), ("tokns", "tokens"))
    other |= {"watch": ("prot", "port")}
    wrong, nearest = (other | {"inspect": ("tensor", "tensors")}).get(name, ("outptu", "output"))
    more = ["gpus=1"] if name == "estimate" else []
    first = ["slurm"] if name == "launch" else []
    for words in ([f"{wrong}=x"], [READY.get(name, "tiny"), f"{wrong}=x"]):
        assert main([name, *first, *words, *more]) == 2
        assert f"unknown key '{wrong}'; did you mean '{nearest}'?" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_words_that_stand_for_places_may_be_keys_too() -> None:
    asked = frame.named(VerifyKeys, ["a", "tokens=3", "b"], "dense", "moe")
    assert asked == frame.named(VerifyKeys, ["b", "dense=a", "tokens=3"], "dense", "moe")
    assert (asked.dense, asked.moe, asked.tokens) == ("a", "b", 3)
    for words in (["a"], ["a", "b", "c"], ["a", "b", "moe=c"]):
        with pytest.raises(ValueError, match="write "):
            frame.named(VerifyKeys, words, "dense", "moe")


@pytest.mark.parametrize(
    ("words", "file", "keys"),
    [
        (["./dense"], "", ["source=./dense"]),
        (["dense/", "experts=4"], "", ["source=dense/", "experts=4"]),
        (["link"], "", ["source=link"]),
        (["org/name"], "", ["source=org/name"]),
        (["org/name@main"], "", ["source=org/name@main"]),
        (["tiny"], "tiny", []),  # a folder of that name is ./tiny
        (["./tiny"], "", ["source=./tiny"]),
        (["my.yaml", "dense", "top_k=1"], "my.yaml", ["source=dense", "top_k=1"]),
        (["dense", "tiny"], "tiny", ["source=dense"]),
        (["source=dense"], "", ["source=dense"]),
        (["none.yaml"], "none.yaml", []),  # read() says that it is not there
    ],
)
def test_a_folder_or_hub_id_is_the_source_and_a_config_stays_one(
    words: list[str], file: str, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("dense", "tiny"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("dense")
    (tmp_path / "my.yaml").write_text("experts: 2")
    assert config_and_source(words) == (file, keys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tinny"], "'tinny' is not a config, a folder here or org/name; did you mean 'tiny'?"),
        (["./dens"], "did you mean 'dense'?"),
        (["dense", "./moe"], "a folder to make is written output=./moe"),
        (["./moe", "source=dense"], "a folder to make is written output=./moe"),
        (["dense", "other"], "source=dense and source=other: only one can be read"),
        (["dense", "source=other"], "source=dense and source=other: only one can be read"),
        (["tiny", "my.yaml"], "tiny and my.yaml: only one can be read"),
    ],
)
def test_a_word_that_is_neither_is_refused_with_the_nearest(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("dense", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "my.yaml").write_text("experts: 2")
    for command in ("plan", "convert"):
        assert main([command, *words]) == 2
        assert said in capsys.readouterr().err
