"""Write the file that runs a training on a cluster, show it, and submit it if you ask.

usage: upcycle launch KIND [CONFIG] gpus=N [nodes=M] [key=value ...]

KIND is slurm, skypilot, kubernetes (a JobSet) or ray. CONFIG and the other words are those of `upcycle train`. The file
is a recipe of configs/launch with your words in it: torchrun starts a process for each GPU and starts all again after
a failure, and the run resumes from its last checkpoint. To change an image, a partition or a volume, copy the recipe,
change it, and give it as template=.

  upcycle launch slurm my.yaml gpus=16 nodes=2
  upcycle launch skypilot my.yaml gpus=8xh100
  upcycle launch kubernetes my.yaml gpus=16 nodes=2
  upcycle launch ray my.yaml gpus=16 nodes=2
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from upcycle.cli import frame
from upcycle.config.values import at_least, check_values
from upcycle.io import disk, strict

KINDS = {  # kind -> its recipe in configs/launch, and the command that takes the file
    "slurm": ("slurm.sbatch", ("sbatch",)),
    "skypilot": ("skypilot.yaml", ("sky", "jobs", "launch", "--yes")),
    "kubernetes": ("kubernetes.yaml", ("kubectl", "create", "-f")),
    "ray": ("ray_train.py", ("ray", "job", "submit", "--working-dir", ".", "--", "python")),
}
NAME = 40  # characters of a job's name; Kubernetes allows 63 with what it adds
BLANK = re.compile("<(name|nodes|gpus|card|words)>")


@dataclass(frozen=True)
class LaunchKeys:
    gpus: str = ""  # GPUs in all: 8 or 8xh100
    nodes: int = 1  # machines that share them equally
    template: str = ""  # your copy of a recipe in configs/launch
    submit: bool = False  # also submit the file

    def __post_init__(self) -> None:
        check_values(self, "", {"nodes": at_least(1, most=100_000)})


@dataclass(frozen=True)
class Job:
    name: str
    nodes: int
    gpus: int  # of each node
    card: str
    words: list[str]
    config: Path | None  # the user's own file, None for a ready config or none


@frame.command()
def main(words: Sequence[str]) -> int:
    from upcycle.config.reading import read_own
    from upcycle.config.ready import CONFIGS

    asked, rest = read_own(LaunchKeys, words)
    names, keys = frame.names_and_words(rest)
    kind = names.pop(0) if names else ""
    if kind not in KINDS:
        raise ValueError(
            f"{kind!r} is not a launcher; write upcycle launch KIND [CONFIG] gpus=N with {', '.join(KINDS)}"
        )
    recipe, command = KINDS[kind]
    if asked.submit and not shutil.which(command[0]):
        raise ValueError(f"submit=true needs the command {command[0]}, which is not installed here; leave submit out")
    job = job_of(kind, asked, *frame.file_and_words([*names, *keys]))
    template = Path(asked.template) if asked.template else CONFIGS / "launch" / recipe
    try:
        made = filled(kind, strict.read_text(template), job)
    except ValueError as error:
        raise ValueError(f"{template} cannot be filled in: {error}; compare it with configs/launch/{recipe}") from None
    file = Path(f"{job.name}-{kind}{Path(recipe).suffix}")
    if file.exists() and file.read_bytes() != made.encode():
        raise ValueError(f"{file} exists and differs; remove it or rename it, and run the same command again")
    disk.write_atomic(file, made.encode())
    print(made)
    if asked.submit:
        return subprocess.run([*command, str(file)]).returncode
    print(f"wrote {file}; submit it with: {shlex.join([*command, str(file)])}")
    return 0


def job_of(kind: str, asked: LaunchKeys, file: str, words: list[str]) -> Job:
    """Check the keys and the run's config here, because on the cluster an error would come after a wait."""
    from training.config.reading import read_config

    output = read_config(file, words).output
    if not output:
        raise ValueError("output is not set; write output=FOLDER, on storage that all nodes see")
    found = re.fullmatch(r"([1-9]\d{0,5})(?:x([\w-]+))?", asked.gpus, re.ASCII)
    if found is None:
        raise ValueError(f"gpus is {asked.gpus!r}; write how many in all, for instance gpus=8 or gpus=8xh100")
    count, card = int(found[1]), found[2] or ""
    if count % asked.nodes:
        raise ValueError(
            f"nodes is {asked.nodes}, which does not divide {count} GPUs; write nodes=M with M GPUs or fewer"
        )
    if kind == "skypilot" and not card:
        raise ValueError(f"gpus is {asked.gpus!r}; SkyPilot needs the card too, for instance gpus={count}xh100")
    if kind == "kubernetes" and card:
        raise ValueError(
            f"gpus is {asked.gpus!r}; Kubernetes has no common name of a card: write gpus={count}, and choose nodes by "
            "a nodeSelector in a template"
        )
    name = re.sub("[^a-z0-9]+", "-", Path(output).name.lower())[:NAME].strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".strip("-")  # Kubernetes wants a letter first
    own = Path(file) if Path(file).is_file() else None
    if own and kind in ("skypilot", "ray") and not Path(os.path.abspath(own)).is_relative_to(Path.cwd()):
        raise ValueError(f"{file} is outside of this folder, which is what travels to the nodes; copy it here")
    if own and kind == "kubernetes":
        file = f"/config/config{own.suffix}"
    return Job(name, asked.nodes, count // asked.nodes, card, [*([file] if file else []), *words], own)


def filled(kind: str, text: str, job: Job) -> str:
    """Return a recipe with a job's name, sizes and words in it."""
    if kind == "slurm":
        card = f"{job.card}:" if job.card else ""
        lines = {
            "#SBATCH --job-name=": job.name,
            "#SBATCH --nodes=": job.nodes,
            "#SBATCH --gpus-per-node=": f"{card}{job.gpus}",
        }
        return with_lines(text, {**lines, "set -euo pipefail": f'\nset -- {shlex.join(job.words)} "$@"'})
    if kind == "ray":
        kept = {"CARD = ": repr(job.card.upper() or None), "WORDS = ": ascii(job.words)}
        return with_lines(text, {"NODES = ": job.nodes, "GPUS = ": job.gpus, **kept})
    # Kubernetes replaces $(NAME) in a command, and $$ by $
    words = [word.replace("$", "$$") if kind == "kubernetes" else word for word in job.words]
    blanks = {"name": job.name, "nodes": job.nodes, "gpus": job.gpus, "card": job.card.upper(), "words": words}
    parts = [fill(strict.parse_yaml(text, "the recipe"), blanks)]
    if kind == "kubernetes" and job.config:
        about = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
        parts.insert(0, {**about, "data": {f"config{job.config.suffix}": strict.read_text(job.config)}})
    head = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return head + yaml.dump_all(parts, Dumper=Dumper, sort_keys=False, width=120)


def with_lines(text: str, values: Mapping[str, object]) -> str:
    """Replace the rest of each line that begins with a key of `values`."""
    lines = text.splitlines()
    for begin, value in values.items():
        found = [number for number, line in enumerate(lines) if line.startswith(begin)]
        if len(found) != 1:
            raise ValueError(f"it has {len(found)} lines that begin with {begin!r}, and needs one")
        lines[found[0]] = f"{begin}{value}"
    return "\n".join(lines) + "\n"


def fill(value: Any, blanks: Mapping[str, Any]) -> Any:
    """Replace the blanks in the texts of a YAML value. Words become items of a list, or are quoted for the shell."""
    if isinstance(value, dict):
        return {key: fill(inner, blanks) for key, inner in value.items()}
    if isinstance(value, list):
        return [item for inner in value for item in (blanks["words"] if inner == "<words>" else [fill(inner, blanks)])]
    if not isinstance(value, str):
        return value
    if BLANK.fullmatch(value) and value != "<words>":
        return blanks[value[1:-1]]  # a number stays one

    def blank(found: re.Match[str]) -> str:
        known = blanks[found[1]]
        return shlex.join(known) if isinstance(known, list) else str(known)

    return BLANK.sub(blank, value)


class Dumper(yaml.SafeDumper):
    """Write texts of several lines as blocks."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
