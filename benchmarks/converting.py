"""Measure how long a conversion takes, and compare it with plain writes to the disk and with mergekit-moe.

  python -m benchmarks.converting                                  # a 1.1 B Llama (TinyLlama's shape), 8 experts
  python -m benchmarks.converting layers=2 repeat=1                # a quick look
  python -m benchmarks.converting mergekit=.venv-oracles/bin/mergekit-moe    # compare it (`make oracles` installs it)

All programs run as child processes, one after the other, on the same disk and with the source in the page cache. Before
each run the output of the last run is deleted and `sync` empties the write-back queue, so that no run pays for another.
`returned` is the time at which the program ended. `on disk` is the time at which a `sync` after it ended too. Compare
both: upcycle syncs every file before it calls the file complete, and mergekit leaves that to the system.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

from upcycle import __version__
from upcycle.cli import frame as cli

# Do not import torch here: the system never counts less peak memory for a child than for its parent.

BLOCK = 64 << 20


@dataclass(frozen=True)
class Measured:
    returned: float  # seconds
    on_disk: float  # seconds, including the sync after it
    cpu: float  # seconds of user and system time, in all threads
    peak: int  # most bytes of memory at a time, including mapped files


# ---- inputs


def write_dense(folder: Path, layers: int) -> None:
    """Write the dense model that both converters read."""
    from upcycle.arch import sample

    sample.make_llama(folder, sample.TINYLLAMA | {"num_hidden_layers": layers})
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of three words, because mergekit-moe does not start without one."""
    words = ["<unk>", "<s>", "</s>"]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"}
    added = [
        {
            "id": i, "content": word, "special": True,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for i, word in enumerate(words)
    ]  # fmt: skip
    parts = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0"} | parts | {"added_tokens": added, "model": model})
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def mergekit_config(base: Path, experts: Sequence[Path], top_k: int) -> str:
    """Return a config for mergekit-moe. It wants different prompts for each expert, although this gate_mode ignores them."""
    return json.dumps(
        {
            "base_model": str(base),
            "gate_mode": "uniform_random",
            "dtype": "bfloat16",
            "experts_per_token": top_k,
            "experts": [{"source_model": str(e), "positive_prompts": [f"{i}"]} for i, e in enumerate(experts)],
        }
    )


# ---- measurements


def plain_writes(folder: Path, size: int, sync: bool) -> None:
    """Write `size` bytes to two files with two threads: about the highest speed of a simple program on this disk."""
    block = memoryview(os.urandom(BLOCK))
    folder.mkdir()

    def write(name: str, left: int) -> None:
        with open(folder / name, "wb", buffering=0) as file:
            while left > 0:
                left -= os.write(file.fileno(), block[: min(left, BLOCK)])
            if sync:
                os.fsync(file.fileno())

    threads = [Thread(target=write, args=("a", size // 2)), Thread(target=write, args=("b", size - size // 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_through(folder: Path) -> None:
    """Read the source into the page cache, so that every run starts with it in memory."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.read(BLOCK):
                pass


def measure(command: Sequence[str], log: Path) -> Measured:
    """Run a program once, after a sync, and measure it. Raise ValueError with the end of its log if it fails."""
    os.sync()
    with open(log, "wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        returned = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    on_disk = time.perf_counter() - start
    if process.returncode:
        raise ValueError(
            f"{' '.join(command)} ended with {process.returncode}; its log ends with: {log.read_text()[-2000:]}"
        )
    return Measured(returned, on_disk, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def python(call: str) -> list[str]:
    """Return the command that calls a function of this module in its own process."""
    return [sys.executable, "-c", f"from pathlib import Path; from benchmarks import converting; converting.{call}"]


def bench(options: BenchConfig, folder: Path) -> dict[str, Any]:
    dense, out, log = folder / "dense", folder / "out", folder / "log"
    print(f"making the dense model in {folder}", flush=True)
    measure(python(f"write_dense(Path({str(dense)!r}), {options.layers})"), log)
    words = [
        f"source={dense}", f"output={out}", "target=mixtral", "method.name=copy",
        f"experts={options.experts}", f"top_k={options.top_k}",
    ]  # fmt: skip
    upcycle = [sys.executable, "-m", "upcycle"]
    planned = subprocess.run([*upcycle, "plan", "json=true", *words], stdout=subprocess.PIPE, check=True)
    size = json.loads(planned.stdout)["bytes"]
    commands = {
        "plain writes": python(f"plain_writes(Path({str(out)!r}), {size}, False)"),
        "plain writes + fsync": python(f"plain_writes(Path({str(out)!r}), {size}, True)"),
        "upcycle convert": [*upcycle, "convert", *words],
    }
    if options.mergekit:
        recipe = folder / "mergekit.yaml"  # JSON is YAML
        recipe.write_text(mergekit_config(dense, [dense] * options.experts, options.top_k))
        consent = "--i-understand-this-is-not-useful-without-training"
        commands["mergekit-moe"] = [options.mergekit, str(recipe), str(out), consent]
    measure(commands["plain writes"], log)  # does not count: the first run is slower, because it uses the memory first
    shutil.rmtree(out)
    runs: dict[str, list[Measured]] = {name: [] for name in commands}
    for turn in range(options.repeat):
        for name, command in commands.items():
            print(f"turn {turn + 1} of {options.repeat}: {name}", flush=True)
            read_through(dense)
            runs[name].append(measure(command, log))
            written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            if written < size:
                raise ValueError(
                    f"{name} wrote {written} bytes, fewer than the {size} bytes of the weights; its log ends with: {log.read_text()[-2000:]}"
                )
            shutil.rmtree(out)
    return {
        "layers": options.layers,
        "experts": options.experts,
        "top_k": options.top_k,
        "dense_bytes": (dense / "model.safetensors").stat().st_size,
        "moe_bytes": size,
        "machine": machine(folder),
        "versions": versions(options.mergekit),
        "runs": {name: [asdict(run) for run in each] for name, each in runs.items()},
    }


# ---- machine, versions, table


def machine(folder: Path) -> dict[str, Any]:
    found = {"cores": len(os.sched_getaffinity(0)), "cpu": platform.machine(), "system": platform.platform()}
    info, mounts = Path("/proc/cpuinfo"), Path("/proc/mounts")
    models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    places = [line.split() for line in mounts.read_text().splitlines()]
    here = [place for place in places if folder.resolve().is_relative_to(place[1])]
    return found | {
        "cpu": models[0] if models else platform.machine(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "filesystem": max(here, key=lambda place: len(place[1]))[2] if here else "unknown",
    }


def versions(mergekit: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "upcycle": __version__, "torch": version("torch")}
    if mergekit:
        code = "from importlib.metadata import version; print(version('mergekit'), version('torch'))"
        done = subprocess.run([str(Path(mergekit).with_name("python")), "-c", code], stdout=subprocess.PIPE, text=True)
        found["mergekit"], found["mergekit's torch"] = done.stdout.split() or ["unknown", "unknown"]
    return found


def table(result: dict[str, Any]) -> str:
    where, size = result["machine"], result["moe_bytes"]
    repeats = len(next(iter(result["runs"].values())))
    lines = [
        f"{result['dense_bytes'] / 1e9:.2f} GB dense model to {size / 1e9:.2f} GB MoE of {result['experts']} experts; "
        f"{where['cores']} cores of {where['cpu']}, {where['memory'] / 2**30:.0f} GiB, {where['filesystem']}; "
        f"median of {repeats} (least to most)",
        "",
        f"{'':22}{'returned s':>22}{'on disk s':>22}{'CPU s':>9}{'peak MB':>9}{'GB/s':>7}",
    ]
    for name, runs in result["runs"].items():
        cells = []
        for key in ("returned", "on_disk"):
            each = [run[key] for run in runs]
            cells.append(f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})")
        cpu, peak, on_disk = (statistics.median(run[key] for run in runs) for key in ("cpu", "peak", "on_disk"))
        speed = size / on_disk / 1e9
        lines.append(f"{name:22}{cells[0]:>22}{cells[1]:>22}{cpu:>9.1f}{peak / 1e6:>9.0f}{speed:>7.2f}")
    return "\n".join(lines)


@dataclass(frozen=True)
class BenchConfig:
    layers: int = 22  # layers of the dense model
    experts: int = 8  # copies of each FFN
    top_k: int = 2  # experts for each token
    repeat: int = 3  # runs of each program; the table shows medians
    mergekit: str = ""  # the path of mergekit-moe, to compare with it; "": do not compare
    folder: str = ""  # a folder on the disk to measure; "": the system's temporary folder


@cli.command()
def main(words: Sequence[str]) -> int:
    from upcycle.config.reading import read

    options = read(BenchConfig, "", words)
    if options.mergekit and not os.access(options.mergekit, os.X_OK):
        raise ValueError(f"mergekit={options.mergekit} is not a program that can run; write the path of mergekit-moe")
    with tempfile.TemporaryDirectory(prefix="upcycle-bench-", dir=options.folder or None) as folder:
        result = bench(options, Path(folder))
    print(f"\n{table(result)}\n\n{json.dumps(result)}")
    return 0


if __name__ == "__main__":
    cli.program("benchmarks.converting")
