"""The contributor's page tells the truth: each of its diffs applies to a copy of the repository, and the commands under
them, as they stand, collect tests of the new file and pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
# a mapping of eight processes takes as long as all of the others, and what it adds is tested with alltoall
LESS = "and not 8-"


def blocks(language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def commands() -> dict[str, list[str]]:
    """New plug-in -> the test files that its command names."""
    lines = [line.split() for block in blocks() for line in block.splitlines() if line.startswith("pytest ")]
    assert all(line[-2] == "-k" for line in lines), lines
    return {line[-1]: line[1:-2] for line in lines}


def new_files() -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", "".join(blocks("diff")), re.MULTILINE)


def copied(folder: Path) -> Path:
    """What is or will be tracked of the code and its tests, as it lies here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        if name.startswith(("upcycle/", "training/", "evaluation/", "tests/", "pyproject.toml")):
            if not (ROOT / name).is_file():
                continue  # removed, and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def apply(diff: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, capture_output=True, text=True)


def run_tests(folder: Path, files: list[str], expression: str) -> tuple[int, Mapping[str, set[str]], str]:
    """pytest in `folder`: its exit code, the tests that passed (by file), and what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *files, "-k", expression],
        cwd=folder, capture_output=True, text=True, env={**environment, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    passed: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if len(case) == 0:  # neither a failure nor a reason to skip
            passed.setdefault(case.attrib["classname"].replace(".", "/") + ".py", set()).add(case.attrib["name"])
    return done.returncode, passed, done.stdout + done.stderr


def test_every_kind_of_plug_in_is_shown_with_its_command() -> None:
    folders = {"upcycle/arch/families", "upcycle/arch/targets", "upcycle/planning/methods"}
    folders |= {"training/dispatch", "training/experts", "evaluation/suites"}
    assert {str(Path(file).parent) for file in new_files()} == folders
    assert len(blocks("diff")) == len(new_files()) == 6, "a plug-in is one file"
    assert set(commands()) == {Path(file).stem for file in new_files()}
    assert not any((ROOT / file).exists() for file in new_files()), "what the page adds is there already"
    for word in re.findall(r"`?(tests/[a-z_/]+(?:\.py)?)", PAGE):
        assert (ROOT / word).exists(), word


def test_the_diffs_apply_and_their_commands_pass(tmp_path: Path) -> None:
    """In one process: importing torch and transformers takes longer than the tests."""
    copy = copied(tmp_path)
    for diff in blocks("diff"):
        done = apply(diff, copy)
        assert done.returncode == 0, done.stderr
    modules = [file for file in new_files() if file.endswith(".py")]
    style = [[sys.executable, "-m", "ruff", *words] for words in (["check"], ["format", "--check"])]
    for command in style:
        done = subprocess.run([*command, *modules], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    wanted = commands()
    files = sorted({file for files in wanted.values() for file in files})
    code, passed, said = run_tests(copy, files, f"({' or '.join(wanted)}) {LESS}")
    assert code == 0, said
    for name, files in wanted.items():
        for file in files:
            assert any(name in test for test in passed.get(file, ())), f"{file} tests nothing of {name}"


def test_a_diff_that_does_not_fit_or_is_wrong_is_seen(tmp_path: Path) -> None:
    diff = next(diff for diff in blocks("diff") if "families/" in diff)
    copy = copied(tmp_path)
    assert apply(
        diff.replace("new file mode 100644\n--- /dev/null", "--- a/upcycle/arch/families/stablelm.py"), copy
    ).stderr
    broken = diff.replace('"partial": 0.25', '"partial": 0.5')
    assert broken != diff and apply(broken, copy).returncode == 0
    code, passed, said = run_tests(copy, ["tests/unit/upcycle/test_families.py"], "stablelm and (sizes or counted)")
    assert code == 1, said
    counted = {"test_parameters_are_counted[stablelm]"}
    assert passed == {"tests/unit/upcycle/test_families.py": counted}, "this alone does not see the share that turns"
