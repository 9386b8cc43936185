"""`upcycle launch`: every file has the user's words as they were typed, whatever they are, and nothing is lost or sent unasked."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from upcycle.cli.main import main
from upcycle.config.ready import CONFIGS

WORDS = [
    "export=$(touch harm) `touch harm` ; touch harm",
    """name=it's "quoted" \\ $HOME ${HOME} $(HOME) $$ %s""",
    "note=- a: {b} [c] # <gpus> <words> &x *y !z | > @",
    "lines=one\n  two\r\n\n'''\nEOF\n---\n",
    "more=ärger 雨 \u2028 \x1b[31m",
    "last= ",
]
SIZES = {"slurm": "16xh100", "skypilot": "16xh100", "kubernetes": "16", "ray": "16xh100"}
FILES = {"slurm": "moe-slurm.sbatch", "skypilot": "moe-skypilot.yaml", "kubernetes": "moe-kubernetes.yaml", "ray": "moe-ray.py"}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my.yaml").write_text("output: runs/Moe\nmodel: {source: ./llama}  # größer\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(folder: Path, name: str, lines: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
    (folder / "bin" / name).chmod(0o755)


def ran(folder: Path, script: Path, more: dict[str, str]) -> list[str]:
    """Run a shell script whose torchrun tells its words."""
    program(folder, "torchrun", 'printf "%s\\0" "$@" > said')
    program(folder, "scontrol", "echo node-1")
    program(folder, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"')
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(["bash", str(script)], cwd=folder, env={"PATH": path, **more}, check=True)
    return (folder / "said").read_bytes().decode().split("\0")[:-1]


def told(kind: str, folder: Path) -> list[str]:
    """Return the words of torchrun as the cluster would start it."""
    file = folder / FILES[kind]
    text = file.read_bytes().decode()
    if kind == "slurm":
        return ran(folder, file, {"SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"})
    if kind == "skypilot":
        (folder / "run.sh").write_text(yaml.safe_load(text)["run"], newline="")
        sizes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "7"}
        sizes |= {"SKYPILOT_NODE_RANK": "1"}
        return ran(folder, folder / "run.sh", {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", **sizes})
    if kind == "kubernetes":
        *_, job = yaml.safe_load_all(text)
        (container,) = pod(job)["containers"]
        command = [expanded(word, {"HOME": "/root"}) for word in container["command"]]
        (folder / "run.sh").write_text(f"exec {shlex.join(command)}", newline="")
        return ran(folder, folder / "run.sh", {"JOB_COMPLETION_INDEX": "1"})
    found = {n.targets[0].id: ast.literal_eval(n.value) for n in ast.parse(text).body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    assert (found["NODES"], found["GPUS"], found["CARD"]) == (2, 8, "H100")
    return ["--max-restarts", "-m", "training", *found["WORDS"]]


def pod(job: Any) -> Any:
    (jobs,) = job["spec"]["replicatedJobs"]
    assert (jobs["template"]["spec"]["completions"], jobs["template"]["spec"]["parallelism"]) == (2, 2)
    return jobs["template"]["spec"]["template"]["spec"]


def expanded(word: str, known: dict[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does in a command; $$ is a $."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else known.get(m[1], m[0]), word)


@pytest.mark.parametrize("kind", FILES)
def test_words_arrive_as_they_were_typed(
    kind: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.config.reading.read_config", lambda *_: type("Config", (), {"output": "runs/Moe"}))
    assert main(["launch", kind, "my.yaml", f"gpus={SIZES[kind]}", "nodes=2", *WORDS]) == 0
    assert (here / FILES[kind]).read_bytes().decode() in capsys.readouterr().out
    words = told(kind, here)
    begin = words.index("training") + 1
    assert words[begin:] == ["/config/config.yaml" if kind == "kubernetes" else "my.yaml", *WORDS]
    assert words[begin - 2] == "-m" and any(word.startswith("--max-restarts") for word in words[:begin])
    assert not (here / "harm").exists()


def test_sizes_are_those_that_were_asked(here: Path) -> None:
    for kind in FILES:
        assert main(["launch", kind, "my.yaml", f"gpus={SIZES[kind]}", "nodes=2", "mesh.ep=8"]) == 0
    slurm = (here / FILES["slurm"]).read_text()
    assert {"#SBATCH --job-name=moe", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=h100:8", "#SBATCH --requeue"} < {
        *slurm.splitlines()
    }
    sky = yaml.safe_load((here / FILES["skypilot"]).read_text())
    assert (sky["name"], sky["num_nodes"], sky["resources"]["accelerators"]) == ("moe", 2, "H100:8")
    config, job = yaml.safe_load_all((here / FILES["kubernetes"]).read_text())
    assert config["data"] == {"config.yaml": (here / "my.yaml").read_text()}
    (container,) = pod(job)["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    words = told("kubernetes", here)
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"] and "moe-node-0-0.moe:29400" in words
    assert "is_host=0" in words and "is_host=0" in told(
        "skypilot", here
    )  # torch would not know the first node by itself
    assert pod(job)["volumes"][1]["configMap"]["name"] == config["metadata"]["name"] == job["metadata"]["name"] == "moe"


def test_skypilot_reads_the_file(here: Path) -> None:
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    assert main(["launch", "skypilot", "my.yaml", "gpus=16xh100", "nodes=2"]) == 0
    task = sky.Task.from_yaml(FILES["skypilot"])
    assert task.num_nodes == 2 and [each.accelerators for each in task.resources] == [{"H100": 8}]


def test_your_own_template_keeps_what_you_wrote(here: Path) -> None:
    text = (CONFIGS / "launch" / "kubernetes.yaml").read_text().replace("image: upcycle", "image: ours/moe:1")
    (here / "ours.yaml").write_text(text)
    words = ["launch", "kubernetes", "stories", "gpus=2", "nodes=2", "output=runs/7", "template=ours.yaml"]
    assert main(words) == 0
    (job,) = yaml.safe_load_all((here / "run-7-kubernetes.yaml").read_text())  # a ready config needs no ConfigMap
    assert pod(job)["containers"][0]["image"] == "ours/moe:1"
    assert pod(job)["containers"][0]["command"][-2:] == ["stories", "output=runs/7"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "'' is not a launcher; write upcycle launch KIND [CONFIG] gpus=N with slurm, skypilot, kubernetes, ray"),
        (["slrum", "my.yaml"], "'slrum' is not a launcher"),
        (["slurm", "my.yaml"], "gpus is ''; write how many in all, for instance gpus=8 or gpus=8xh100"),
        (["slurm", "my.yaml", "gpus=8xh1;00"], "gpus is '8xh1;00'"),
        (["slurm", "my.yaml", "gpus=8", "nodes=3"], "nodes is 3, which does not divide 8 GPUs"),
        (["skypilot", "my.yaml", "gpus=8"], "SkyPilot needs the card too, for instance gpus=8xh100"),
        (["kubernetes", "my.yaml", "gpus=8xh100"], "Kubernetes has no common name of a card: write gpus=8"),
        (["slurm", "my.yaml", "gpus=8", "stps=3"], "unknown key 'stps'"),
        (["slurm", "my.yaml", "gpus=8", "output="], "output is not set"),
        (["slurm", "mine.yaml", "gpus=8"], "there is no config 'mine.yaml'"),
        (["slurm", "my.yaml", "gpus=8", "template=my.yaml"], "my.yaml cannot be filled in: it has 0 lines that begin"),
        (["slurm", "my.yaml", "gpus=8", "template=none"], "none"),
        (["ray", "../other.yaml", "gpus=8"], "../other.yaml is outside of this folder, which is what travels"),
        (["slurm", "my.yaml", "gpus=8", "submit=true"], "submit=true needs the command sbatch, which is not installed"),
    ],
)
def test_a_mistake_is_a_sentence_and_writes_nothing(
    words: list[str], said: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(here))
    (here.parent / "other.yaml").write_text((here / "my.yaml").read_text())
    before = sorted(here.iterdir())
    assert main(["launch", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(here.iterdir()) == before


def test_a_file_that_you_changed_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "slurm", "my.yaml", "gpus=8"]
    assert main(words) == main(words) == 0
    file = here / FILES["slurm"]
    file.write_text(file.read_text() + "# mine\n")
    assert main(words) == 2 and "moe-slurm.sbatch exists and differs; remove it or rename it" in capsys.readouterr().err
    assert file.read_text().endswith("# mine\n")


@pytest.mark.parametrize("kind", FILES)
def test_it_is_submitted_only_if_asked(kind: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "sky", "kubectl", "ray"):
        program(here, name, f'echo {name} "$@" >> sent\nexit 3')
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
    words = ["launch", kind, "my.yaml", f"gpus={SIZES[kind]}"]
    assert main(words) == 0 and not (here / "sent").exists()
    assert main([*words, "submit=true"]) == 3  # the tool's own code
    sent = shlex.split((here / "sent").read_text())
    assert sent[-1] == FILES[kind] and sent[0] in ("sbatch", "sky", "kubectl", "ray")


def test_rays_workers_stay_in_the_folder_that_travelled(here: Path) -> None:
    """Ray Train puts a worker into an empty folder unless this variable says no, and then it finds no config."""
    for name in ("ray", "ray/train"):
        (here / "stub" / name).mkdir(parents=True)
    (here / "stub/ray/__init__.py").touch()
    (here / "stub/ray/train/__init__.py").write_text(
        "def FailureConfig(**_): ...\nRunConfig = ScalingConfig = FailureConfig"
    )
    (here / "stub/ray/util.py").write_text("def get_node_ip_address(): ...")
    (here / "stub/ray/train/torch.py").write_text(
        "import os\ndef TorchConfig(**_): ...\n"
        "class TorchTrainer:\n"
        "    def __init__(self, *_, **__): ...\n"
        "    def fit(self):\n"
        "        print('stays' if os.environ.get('RAY_CHDIR_TO_TRIAL_DIR') == '0' else 'leaves')\n"
    )
    assert main(["launch", "ray", "my.yaml", "gpus=2", "nodes=2"]) == 0
    own = {**os.environ, "PYTHONPATH": str(here / "stub")}
    said = subprocess.run([sys.executable, FILES["ray"]], check=True, capture_output=True, text=True, env=own)
    assert said.stdout == "stays\n"


def test_rays_recipe_starts_torchrun_on_each_node(here: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray Train is not installed")
    assert main(["launch", "ray", "my.yaml", "gpus=2", "nodes=2"]) == 0
    code = f"import runpy; runpy.run_path({FILES['ray']!r}, run_name='recipe')['node']"
    subprocess.run([sys.executable, "-c", code], check=True)
