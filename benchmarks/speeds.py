"""Compare every measured speed with the speed that the time model predicts, and write the tables of the pages.

python -m benchmarks.speeds        # write the tables of results/2026-11-planning.md and -performance.md again
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from training.config.schema import ModelConfig, TrainConfig
from training.data.mixture import DataConfig
from training.estimating import bench, hardware
from training.estimating.hardware import Hardware
from training.estimating.seconds import RANDOM, Routing, Seconds, step
from training.observe.flops import model_flops
from upcycle.arch.spec import DenseSpec, MoESpec
from upcycle.config.reading import read
from upcycle.config.ready import TRAIN

RESULTS = Path(__file__).parent / "results"
PAGE, PERFORMANCE = RESULTS / "2026-11-planning.md", RESULTS / "2026-11-performance.md"
NATURAL, IN_TURN, EVEN = Routing(RANDOM), Routing(0.0, in_turn=True), Routing(0.0, in_turn=True)
SMOL = DenseSpec(
    family="llama", layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, context=2048, tied=True
)  # fmt: skip
SLICES = MoESpec(SMOL, tuple(range(30)), (384,) * 32, top_k=4, copies=8, granularity=4)
MORE_SLICES = replace(SLICES, widths=(384,) * 64, copies=16)
COPIES = MoESpec(SMOL, tuple(range(30)), (1536,) * 8, top_k=2, copies=8)


@dataclass(frozen=True)
class Row:
    what: str
    card: str
    gpus: int
    measured: float  # tokens/s of a GPU
    use: str  # own: on the machine of the hardware file | calibration | check | elsewhere: by another trainer
    file: str = ""
    words: str = ""
    routing: Routing = NATURAL
    spec: DenseSpec | MoESpec | None = None  # of a training run with 64 sequences of 1,024 tokens
    micro_batch: int = 32
    graph: bool | None = False  # of a training run; older runs did not record their steps
    host: float = 1.0  # factor of the hardware file's host times, for a machine with slower cores


# The host factor of the machine that ran the Qwen2-57B rows with a capacity. It was set by the third row of that run, a
# calibration. The four Qwen3-30B-A3B rows with "slower cores" ran in the same session, perhaps on another machine
SLOW_CORES = 2.5
QWEN, LLAMA, MIXTRAL, QWEN2 = "bench-qwen3-30b", "bench-llama3-8b-e8t2", "bench-mixtral-8x22b", "bench-qwen2-57b"
DEEPSEEK, GPT_OSS = "bench-deepseek-v3", "bench-gpt-oss-20b"
HYBRID = " mesh.dispatcher=hybridep"
SIXTEEN = "mesh.ep=4 batch=16 micro_batch=4 model.recompute=experts"
ALL_32 = "mesh.ep=4 batch=8 micro_batch=2 model.recompute=experts optim.moments=bfloat16 mesh.reshard=true"
TWELVE = "mesh.ep=4 batch=8 micro_batch=1 layers=12" + HYBRID
SIX = "layers=6 model.compile=false batch=8 micro_batch=2"  # all mappings of the search for two GPUs, one process a day
TWO = "layers=2 batch=8 model.compile=false balance.capacity_factor=1 mesh.tp=2"
AUTOMODEL = "optim.moments=bfloat16 mesh.dispatcher=deepep"
FOLDED, COUPLED = "mesh.tp=2 mesh.ep=4", "mesh.tp=2 mesh.ep=2 mesh.etp=2"
PAPER = "batch=256 balance.capacity_factor=1 mesh.tp=2"


def of(kind: str, card: str, gpus: int, file: str, *rows: tuple[Any, ...], host: float = 1.0) -> list[Row]:
    """Return rows of one bench config from (what, tokens/s of a GPU, words, routing if it is not natural)."""
    found = [(*row, NATURAL)[:4] for row in rows]
    return [Row(what, card, gpus, rate, kind, file, words, way, host=host) for what, rate, words, way in found]


def small(kind: str, card: str, what: str, rate: float, spec: DenseSpec | MoESpec, micro_batch: int = 32) -> Row:
    return Row(f"SmolLM2-135M, {what}", card, 1, rate, kind, spec=spec, micro_batch=micro_batch)


# One run on one H200 with recorded steps (training/run/record.py). These rows set no constant of the time model
RECORDED = [
    replace(small("check", "h200", f"{what}, recorded", rate, spec, 64), graph=None)
    for what, rate, spec in (
        ("dense", 390220, SMOL), ("8 x 4 slices", 326221, SLICES), ("16 x 4 slices", 309171, MORE_SLICES),
        ("8 copies, top-2", 246062, COPIES),
    )
]  # fmt: skip
# The same models on another day on an H200, with steps that are not recorded
PLAIN_STEPS = [
    small("check", "h200", f"{what}, one micro-batch, plain", rate, spec, 64)
    for what, rate, spec in (
        ("dense", 365300, SMOL), ("8 x 4 slices", 266200, SLICES), ("16 x 4 slices", 253400, MORE_SLICES),
        ("8 copies, top-2", 215800, COPIES),
    )
]  # fmt: skip
ROWS = [
    *of(
        "calibration", "h100", 1, f"{QWEN}-4l", ("Qwen3-30B-A3B, 4 blocks", 240500, "model.compile=true"),
        ("the same, balanced", 249500, "model.compile=true", IN_TURN),
    ),
    small("calibration", "h100", "dense", 65536 / 0.252, SMOL),
    small("calibration", "h100", "8 x 4 slices", 65536 / 0.616, SLICES),
    *of("calibration", "h200", 1, f"{QWEN}-4l", ("Qwen3-30B-A3B, 4 blocks", 253000, "model.compile=true")),
    small("calibration", "h200", "8 x 4 slices", 195000, SLICES),
    *of(
        "calibration", "h200", 2, QWEN,
        ("Qwen3-30B-A3B, 12 layers, ep 2", 48379, "layers=12 mesh.ep=2 batch=16 micro_batch=4"),
    ),
    *of(
        "check", "h200", 2, QWEN,
        ("the same, another day", 47409, "layers=12 mesh.ep=2 batch=16 micro_batch=4"),
        ("the same, nvlink", 56615, "layers=12 mesh.ep=2 batch=16 micro_batch=4 mesh.dispatcher=nvlink"),
        ("Qwen3-30B-A3B, 6 layers, ep 2", 60692, f"{SIX} mesh.ep=2"),
        ("pp 2", 58061, f"{SIX} mesh.pp=2"),
        ("etp 2", 54714, f"{SIX} mesh.etp=2"),
        ("all on FSDP, the first in its process, never steady", 18370, SIX),
    ),
    *of(
        "calibration", "h200", 2, QWEN,
        ("tp 2, ep 2", 52207, f"{SIX} mesh.tp=2 mesh.ep=2"),
        ("tp 2", 49338, f"{SIX} mesh.tp=2"),
        ("tp 2, etp 2", 47594, f"{SIX} mesh.tp=2 mesh.etp=2"),
        ("cp 2", 48197, f"{SIX} mesh.cp=2"),
        ("cp 2, ep 2", 45909, f"{SIX} mesh.cp=2 mesh.ep=2"),
        ("cp 2, etp 2", 42764, f"{SIX} mesh.cp=2 mesh.etp=2"),
    ),
    *of(
        "check", "h200", 2, QWEN,
        ("6 layers, ep 2, another day", 69068, f"{SIX} mesh.ep=2"),
        ("all on FSDP, another day", 62684, SIX),
        ("pp 2, another day", 59350, f"{SIX} mesh.pp=2"),
        ("etp 2, another day", 56004, f"{SIX} mesh.etp=2"),
        ("tp 2, another day", 49005, f"{SIX} mesh.tp=2"),
        ("tp 2, ep 2, another day", 44713, f"{SIX} mesh.tp=2 mesh.ep=2"),
        ("cp 2, another day", 46693, f"{SIX} mesh.cp=2"),
        ("cp 2, ep 2, another day", 43377, f"{SIX} mesh.cp=2 mesh.ep=2"),
    ),
    *of(
        "check", "h200", 2, MIXTRAL,
        ("Mixtral-8x22B, 2 layers, capacity 1, folded, alltoall", 40595, f"{TWO} mesh.ep=2"),
        ("2 layers, coupled, alltoall", 39517, f"{TWO} mesh.etp=2"),
        ("2 layers, folded, nvlink", 41653, f"{TWO} mesh.ep=2 mesh.dispatcher=nvlink"),
    ),
    *of("check", "h100", 1, f"{LLAMA}-2l", ("Llama-3-8B E8T2, 2 blocks", 108200, "model.compile=true")),
    *of("check", "h200", 1, f"{LLAMA}-2l", ("Llama-3-8B E8T2, 2 blocks", 109700, "model.compile=true")),
    *of("check", "h200", 1, f"{QWEN}-4l", ("Qwen3-30B-A3B, 4 blocks, balanced", 265500, "model.compile=true", IN_TURN)),
    small("check", "h100", "8 x 4 slices, one micro-batch", 180000, SLICES, 64),
    small("check", "h200", "dense", 361000, SMOL),
    small("check", "h200", "8 copies, top-2", 185000, COPIES),
    small("check", "h200", "dense, one micro-batch", 355500, SMOL, 64),
    small("check", "h200", "8 x 4 slices, one micro-batch, after fewer launches", 240900, SLICES, 64),
    small("check", "h200", "8 x 4 slices, one micro-batch, by the bench", 328921, SLICES, 64),
    small("check", "h200", "8 x 4 slices, by the bench", 151424, SLICES),
    small("own", "h200", "dense, one micro-batch", 379570, SMOL, 64),
    small("own", "h200", "dense", 358285, SMOL),
    small("own", "h200", "8 x 4 slices, one micro-batch", 266927, SLICES, 64),
    small("calibration", "h200", "8 x 4 slices, on the file's machine", 186770, SLICES),
    small("own", "h200", "8 copies, top-2, one micro-batch", 230011, COPIES, 64),
    small("own", "h200", "8 copies, top-2", 186109, COPIES),
    *PLAIN_STEPS,
    *RECORDED,
    *of(
        "own", "h200", 1, f"{QWEN}-4l", ("Qwen3-30B-A3B, 4 blocks", 254324, "model.compile=true"),
        ("the same, balanced", 267257, "model.compile=true", IN_TURN), ("not compiled", 258034, ""),
    ),
    *of("own", "h200", 1, f"{LLAMA}-2l", ("Llama-3-8B E8T2, 2 blocks", 109172, "model.compile=true")),
    *of(
        "check", "h200", 4, QWEN,
        ("Qwen3-30B-A3B, hybridep, recompute experts", 13349, SIXTEEN + HYBRID),
        ("the same, balanced", 14670, SIXTEEN + HYBRID, IN_TURN),
        ("hybridep, recompute full", 12409, SIXTEEN + HYBRID + " model.recompute=full"),
        ("the same, two of 2, an earlier state", 10173, SIXTEEN + HYBRID + " model.recompute=full micro_batch=2"),
    ),
    *of(
        "check", "h200", 4, QWEN,
        ("recompute experts, natural, slower cores", 12475, SIXTEEN + HYBRID),
        ("the same, balanced, slower cores", 13944, SIXTEEN + HYBRID, IN_TURN),
        ("the same, deepep, slower cores", 10835, SIXTEEN + " mesh.dispatcher=deepep"),
        ("the same, alltoall, slower cores", 10606, SIXTEEN),
        host=SLOW_CORES,
    ),
    *of(
        "check", "h200", 4, LLAMA,
        ("Llama-3-8B E8T2, 32 layers, hybridep", 4893, ALL_32 + HYBRID),
        ("the same, capacity 1", 4885, ALL_32 + HYBRID + " balance.capacity_factor=1"),
        ("the same, padded, alltoall", 4989, ALL_32 + " balance.capacity_factor=1 balance.pad_to_capacity=true"),
        ("12 layers, hybridep", 14250, TWELVE),
        ("the same, capacity 1", 14716, TWELVE + " balance.capacity_factor=1"),
    ),
    *of(
        "check", "h200", 4, MIXTRAL,
        ("Mixtral-8x22B, 3 layers, capacity 1, folded, hybridep", 30950, f"layers=3 {FOLDED} balance.capacity_factor=1" + HYBRID),
        ("folded, alltoall", 29850, f"layers=3 {FOLDED} balance.capacity_factor=1"),
        ("coupled, alltoall", 28100, f"layers=3 {COUPLED} balance.capacity_factor=1"),
        ("dropless, folded, hybridep", 29700, f"layers=3 {FOLDED}" + HYBRID),
        ("dropless, folded, alltoall", 28400, f"layers=3 {FOLDED}"),
        ("dropless, coupled, alltoall", 27900, f"layers=3 {COUPLED}"),
    ),
    *of(
        "check", "h200", 4, QWEN2,
        ("Qwen2-57B, 7 layers, dropless, folded, hybridep", 15725, FOLDED + HYBRID),
    ),
    *of(
        "calibration", "h200", 4, QWEN2, ("dropless, coupled, alltoall, slower cores", 44514 / 4, COUPLED), host=SLOW_CORES
    ),
    *of(
        "check", "h200", 4, QWEN2,
        ("capacity 1, folded, hybridep, slower cores", 12532, FOLDED + HYBRID + " balance.capacity_factor=1"),
        ("capacity 1, coupled, alltoall, slower cores", 11617, COUPLED + " balance.capacity_factor=1"),
        host=SLOW_CORES,
    ),
    *of(
        "check", "h200", 1, DEEPSEEK,
        ("DeepSeek-V3, 4 layers", 32309, "layers=4 stack=true micro_batch=2"),
        ("not compiled", 30663, "layers=4 stack=true micro_batch=2 model.compile=false"),
    ),
    *of(
        "check", "h200", 2, DEEPSEEK,
        ("DeepSeek-V3, 6 layers, ep 2", 18190, "layers=6 stack=true mesh.ep=2 batch=4 micro_batch=2"),
    ),
    *of(
        "check", "h200", 1, GPT_OSS,
        ("GPT-OSS-20B, 12 layers", 40096, "layers=12 stack=true batch=2 micro_batch=2"),
        ("compiled", 43510, "layers=12 stack=true batch=2 micro_batch=2 model.compile=true"),
    ),
    *of(
        "check", "h200", 2, GPT_OSS,
        ("GPT-OSS-20B, ep 2", 13007, "mesh.ep=2 optimizer=true optim.moments=bfloat16 batch=4 micro_batch=2"),
        ("the same, balanced", 13685, "mesh.ep=2 optimizer=true optim.moments=bfloat16 batch=4 micro_batch=2", IN_TURN),
    ),
    *of(
        "elsewhere", "h100", 8, QWEN,
        (
            "NeMo Automodel, Qwen3-30B-A3B, balanced", 12040,
            f"{AUTOMODEL} mesh.ep=8 batch=512 micro_batch=4 model.recompute=full", IN_TURN,
        ),
    ),
    *of(
        "elsewhere", "h100", 8, GPT_OSS,
        ("NeMo Automodel, GPT-OSS-20B, balanced", 13058, f"{AUTOMODEL} mesh.ep=8 batch=256 micro_batch=2", IN_TURN),
    ),
    *of(
        "elsewhere", "h100", 64, "bench-gpt-oss-120b",
        ("NeMo Automodel, GPT-OSS-120B, balanced", 7626, f"{AUTOMODEL} mesh.ep=64 batch=512 micro_batch=2", IN_TURN),
    ),
    *of(
        "elsewhere", "h100", 256, DEEPSEEK,
        (
            "NeMo Automodel, DeepSeek-V3, balanced", 1002,
            f"{AUTOMODEL} mesh.ep=64 mesh.pp=4 mesh.schedule=interleaved batch=512 micro_batch=1 model.recompute=full", IN_TURN,
        ),
    ),
    *of(
        "elsewhere", "h100", 256, "bench-kimi-k2",
        (
            "NeMo Automodel, Kimi-K2, balanced", 924,
            f"{AUTOMODEL} mesh.ep=32 mesh.pp=8 mesh.schedule=interleaved batch=512 micro_batch=1 model.recompute=full", IN_TURN,
        ),
    ),
    *of(
        "elsewhere", "h100", 128, MIXTRAL,
        ("Megatron, Mixtral-8x22B, folded", 2014, f"{PAPER} mesh.ep=8 mesh.pp=8"),
        ("Megatron, Mixtral-8x22B, coupled", 1891, f"{PAPER} mesh.ep=4 mesh.etp=2 mesh.pp=8"),
    ),
    *of(
        "elsewhere", "h100", 64, QWEN2,
        ("Megatron, Qwen2-57B, folded", 4559, f"{PAPER} mesh.ep=4 mesh.pp=4 layers=28"),
        ("Megatron, Qwen2-57B, coupled", 4126, f"{PAPER} mesh.ep=4 mesh.etp=2 mesh.pp=4 layers=28"),
    ),
    *of(
        "elsewhere", "h100", 128, LLAMA,
        (
            "Megatron, Llama-3-8B E8T2", 5043,
            "mesh.ep=8 mesh.cp=2 mesh.pp=4 batch=512 micro_batch=1 balance.capacity_factor=1 mesh.schedule=interleaved",
        ),
    ),
]  # fmt: skip
# In the first two rows the host kept the device waiting longer than the host of the hardware file does. On the machine of
# the second, another process was faster than predicted. In the third row the turns took from 0.70 to 0.93 s
MISSED = {
    "SmolLM2-135M, 8 x 4 slices, one micro-batch, after fewer launches", "SmolLM2-135M, 8 x 4 slices, by the bench",
    "all on FSDP, the first in its process, never steady",
}  # fmt: skip
WITHIN = {"own": 0.10, "calibration": 0.10, "check": 0.15}


@lru_cache
def card_of(name: str, host: float) -> Hardware:
    """Return the card of a hardware file with its host times multiplied by `host`."""
    card = hardware.read(name)
    return replace(card, host=(card.host[0] * host, card.host[1] * host))


def predicted(row: Row) -> tuple[float, Seconds]:
    """Return (tokens/s of a GPU, the seconds of a step by part)."""
    card = card_of(row.card, row.host)
    if row.spec is not None:
        config = TrainConfig(
            model=ModelConfig(source="x", graph=row.graph), data=DataConfig(sequence=1024), batch=64,
            micro_batch=row.micro_batch,
        )  # fmt: skip
        found = step(row.spec, config, row.gpus, card, row.routing)
        return 65536 / found.total, found
    asked = read(bench.BenchConfig, row.file, row.words.split(), TRAIN)
    spec = bench.spec_of(asked)
    mesh = asked.mesh
    micro = asked.micro_batch or asked.batch // (row.gpus // (mesh.tp * mesh.cp * mesh.pp))
    found = step(spec, asked.run(micro), row.gpus, card, row.routing, blocks=asked.stack)
    return asked.batch * asked.data.sequence / found.total / row.gpus, found


def teraflops(row: Row, rate: float) -> float:
    asked = read(bench.BenchConfig, row.file, row.words.split(), TRAIN)
    return model_flops(bench.spec_of(asked), asked.data.sequence) * rate / 1e12


def published() -> str:
    """Return the table of the speeds that others publish for whole models, next to those computed for our trainer."""
    lines = ["| whole model | GPUs | published, Automodel | ours, computed | command |", "|---|---|---|---|---|"]
    for row in ROWS:
        if not row.what.startswith("NeMo Automodel, "):
            continue
        rate, name = predicted(row)[0], row.what.split(", ")[1]
        mine, theirs = (f"{each:,.0f} = {teraflops(row, each):.0f}" for each in (rate, row.measured))
        command = f"upcycle estimate {row.file} gpus={row.gpus} hardware={row.card} routing=balanced {row.words}"
        lines.append(f"| {name} | {row.gpus} {row.card.upper()} | {theirs} | *{mine}* | `{command}` |")
    return "\n".join(lines)


def error(row: Row) -> float:
    return predicted(row)[0] / row.measured - 1


def shown() -> str:
    """Return the page's table of steps."""
    lines = ["| step | GPUs | tokens/s of a GPU | predicted | error | |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        rate = predicted(row)[0]
        words = f"**{row.use}**" if row.use == "calibration" else "missed" if row.what in MISSED else row.use
        lines.append(
            f"| {row.what} | {row.gpus} {row.card.upper()} | {row.measured:,.0f} | {rate:,.0f} | "
            f"{rate / row.measured - 1:+.1%} | {words} |"
        )
    return "\n".join(lines)


def on_page(page: str, head: str = "| step |") -> str:
    return page[page.index(head) : page.index("\n\n", page.index(head))]


# label, `what` of the folded row, `what` of the coupled row
PAIRS = (
    ("Megatron, Mixtral-8x22B, 128 H100", "Megatron, Mixtral-8x22B, folded", "Megatron, Mixtral-8x22B, coupled"),
    ("Megatron, Qwen2-57B, 64 H100", "Megatron, Qwen2-57B, folded", "Megatron, Qwen2-57B, coupled"),
    (
        "Mixtral-8x22B, capacity 1, hybridep over alltoall", "Mixtral-8x22B, 3 layers, capacity 1, folded, hybridep",
        "coupled, alltoall",
    ),
    ("the same, alltoall both", "folded, alltoall", "coupled, alltoall"),
    ("dropless, hybridep over alltoall", "dropless, folded, hybridep", "dropless, coupled, alltoall"),
    ("the same, alltoall both", "dropless, folded, alltoall", "dropless, coupled, alltoall"),
    (
        "Qwen2-57B, capacity 1, hybridep over alltoall", "capacity 1, folded, hybridep, slower cores",
        "capacity 1, coupled, alltoall, slower cores",
    ),
    (
        "Mixtral-8x22B on two GPUs, capacity 1, alltoall both", "Mixtral-8x22B, 2 layers, capacity 1, folded, alltoall",
        "2 layers, coupled, alltoall",
    ),
    ("the same, nvlink over alltoall", "2 layers, folded, nvlink", "2 layers, coupled, alltoall"),
)  # fmt: skip
NEAR_ENOUGH = 0.03  # largest error of a predicted ratio, for ratios that are not in FAR
FAR = {"Mixtral-8x22B, capacity 1, hybridep over alltoall"}


def ratios() -> list[tuple[str, float, float]]:
    """Return (label, measured ratio, predicted ratio) of folded over coupled for each pair."""
    by_name = {row.what: row for row in ROWS}
    pairs = [(what, by_name[folded], by_name[coupled]) for what, folded, coupled in PAIRS]
    return [(what, a.measured / b.measured, predicted(a)[0] / predicted(b)[0]) for what, a, b in pairs]


def folding() -> str:
    """Return the page's table of these ratios."""
    lines = ["| folded over coupled | measured | predicted | |", "|---|---|---|---|"]
    for what, measured, said in ratios():
        lines.append(f"| {what} | {measured:.3f} | {said:.3f} | {'missed' if what in FAR else ''} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text()
    page = page.replace(on_page(page), shown())
    PAGE.write_text(page.replace(on_page(page, "| folded over"), folding()))
    page = PERFORMANCE.read_text()
    PERFORMANCE.write_text(page.replace(on_page(page, "| whole model |"), published()))
    for row in ROWS:
        parts = " ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in vars(predicted(row)[1]).items())
        print(f"{row.what:64} {row.card} {row.gpus:4} {error(row):+7.1%}  {parts}")


if __name__ == "__main__":
    main()
