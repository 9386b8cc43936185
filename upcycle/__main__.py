"""The command line: plan, convert, verify, inspect, push. What a user can cause is one sentence and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

from upcycle import __version__
from upcycle.cli import frame as cli

if TYPE_CHECKING:  # imported when a command runs: --help should not wait for torch
    from upcycle.library import Upcycling

PROMISE_BROKEN = 1
NOTHING_PROMISED = 3
KEYS = "keys, with defaults and meaning: docs/config.md"

EXAMPLES = f"""examples:
  upcycle plan tiny source=./llama      # what the ready config `tiny` would make of it
  upcycle plan source=meta-llama/Llama-3.1-8B experts=8 top_k=2
  upcycle convert source=./llama output=./moe method.name=virtual_group granularity=4 top_k=4
  torchrun --nproc-per-node 8 -m upcycle convert llama3-8b-e8t2 source=./llama output=./moe
  upcycle verify ./llama ./moe
  upcycle inspect ./moe
  upcycle push ./moe org/name --dry-run

{KEYS}
"""


def parser() -> argparse.ArgumentParser:
    main = cli.parser(
        prog="upcycle", description="Turn a dense language model into a mixture of experts.", epilog=EXAMPLES
    )
    main.add_argument("--version", action="version", version=__version__)
    commands = main.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, about: str, examples: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about, epilog=f"examples:\n{examples}")

    config_help = "a YAML file or the name of a ready config, then key=value words; either may be left out"
    plan = add(
        "plan",
        "What would be made: every tensor, sizes, exactness. Reads headers only and writes nothing.",
        "  upcycle plan tiny source=./llama\n"
        "  upcycle plan llama3-8b-e8t2 source=./llama layers=every:2 target=auto\n"
        "  upcycle plan source=./llama router.normalize=false scale=published    # shows how inexact that is\n"
        f"  upcycle plan source=./llama --tensors | grep experts.0\n\n{KEYS}",
    )
    plan.add_argument("words", nargs="*", metavar="CONFIG key=value", help=config_help)
    plan.add_argument("--tensors", action="store_true", help="also every output tensor with its sources and recipe")
    plan.add_argument("--json", action="store_true", help="the same as one JSON object")

    convert = add(
        "convert",
        "Make the MoE checkpoint. Kill it and start it again as you like: it goes on where it was.",
        "  upcycle convert tiny source=./llama output=./moe\n"
        f"  torchrun --nproc-per-node 8 -m upcycle convert llama3-8b-e8t2 source=./llama output=./moe\n\n{KEYS}",
    )
    convert.add_argument("words", nargs="*", metavar="CONFIG key=value", help=config_help)

    verify = add(
        "verify",
        "Hold a converted folder to its plan: files and random slices of weights bit for bit, and both models' "
        "logits, layer by layer, on text or random tokens. Exit code 0 if the plan's promise held, 1 if not, 3 if "
        "nothing was promised (a trained model, or another's).",
        "  upcycle verify ./llama ./moe\n"
        "  upcycle verify ./llama ./moe --text book.txt --dtype bfloat16\n"
        "  upcycle verify ./llama ./moe --tolerance 1e-4    # any two models with one vocabulary",
    )
    verify.add_argument("dense")
    verify.add_argument("moe")
    verify.add_argument("--text", nargs="*", default=[], help=".txt, .jsonl or .jsonl.zst files; random tokens if none")
    verify.add_argument("--tokens", type=int, default=1024, help="how many (default 1024)")
    verify.add_argument("--length", type=int, default=256, help="tokens a sequence (default 256)")
    verify.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    verify.add_argument(
        "--tolerance",
        type=float,
        help="compare logits alone, of any two models: largest allowed |difference| / largest |logit|",
    )
    verify.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...: where layers are computed")
    verify.add_argument("--json", action="store_true")

    inspect = add(
        "inspect",
        "What a checkpoint folder holds, dense or MoE; with --check, whether its bytes are those that were written.",
        "  upcycle inspect ./llama\n  upcycle inspect ./moe --check\n  upcycle inspect ./moe --tensors",
    )
    inspect.add_argument("folder")
    inspect.add_argument("--tensors", action="store_true", help="name, shape, dtype and file of every tensor")
    inspect.add_argument(
        "--check",
        action="store_true",
        help="compare sizes and sha256 with the manifest, and all of the source, if it is here, with what was read; "
        "look for NaN",
    )

    push = add(
        "push",
        "Put a model's folder on the Hub, in one commit: weights, configs, tokenizer, terms, card; nothing else.",
        "  upcycle push ./moe org/name --dry-run    # what would be sent; without the flag it is",
    )
    push.add_argument("folder")
    push.add_argument("name", help="org/name; made if it is not there")
    push.add_argument("--private", action="store_true", help="a new repository that only its owners see")
    push.add_argument("--dry-run", action="store_true", help="only list the files")
    return main


@cli.command(resumes=True)
def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    run = {"plan": run_plan, "convert": run_convert, "verify": run_verify, "inspect": run_inspect, "push": run_push}
    return run[options.command](options)


def load(words: Sequence[str]) -> Upcycling:
    from upcycle.config.reading import read
    from upcycle.config.schema import UpcycleConfig
    from upcycle.library import Upcycling

    return Upcycling(read(UpcycleConfig, *cli.file_and_words(words)))


def run_plan(options: argparse.Namespace) -> int:
    from upcycle.converting import card
    from upcycle.planning import engines, size
    from upcycle.planning.plan import sizes

    plan = load(options.words).plan
    if options.json:
        moe, config = plan.moe, plan.config
        result = {
            "plan": plan.hash,
            "target": plan.target,
            "why": plan.why,
            "promise": asdict(plan.promise),
            "parameters": asdict(sizes(plan)),
            "flops_per_token": {
                "moe": size.moe_flops(moe, config.sequence, gated=plan.gated),
                "dense": size.dense_flops(plan.dense, config.sequence),
            },
            "bytes": plan.bytes,
            "files": len(plan.shards),
            "config": card.settings(plan),
            "config.json": plan.hf_config,
            "runs_on": engines.sentence(plan.target, plan.hf_config),
            "notes": plan.notes,
            "warnings": plan.warnings,
            "dropped": dict(plan.dropped),
        }
        if options.tensors:
            result["tensors"] = [
                {"name": o.name, "shape": o.shape, "dtype": o.dtype, "recipe": [str(part) for part in o.parts]}
                for o in plan.outputs
            ]
        print(json.dumps(result, indent=1, default=str))
        return 0
    print(plan)
    if options.tensors:
        print()
        for line in card.tensors(plan):
            print(line)
    return 0


def run_convert(options: argparse.Namespace) -> int:
    from upcycle.io.job import Worker

    worker = Worker.here()
    moe = load(options.words)
    if not moe.config.output:
        raise ValueError("output is not set; write output=FOLDER")
    if worker.rank == 0:
        print(moe.plan, flush=True)
    folder = moe.convert(worker=worker)
    if worker.rank == 0:
        print(f"\n{folder} is complete. Check it: upcycle verify {moe.dense} {folder}")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    from upcycle.verifying import verify

    report = verify.verify(
        options.dense,
        options.moe,
        options.text,
        options.tokens,
        options.length,
        options.dtype,
        options.tolerance,
        options.device,
    )
    print(json.dumps(asdict(report), indent=1) if options.json else report)
    if report.nothing:
        print(
            f"upcycle: {options.moe} has no upcycle.json, so nothing was promised and nothing was held; "
            "--tolerance compares any two models",
            file=sys.stderr,
        )
        return NOTHING_PROMISED
    return 0 if report.held else PROMISE_BROKEN


def run_inspect(options: argparse.Namespace) -> int:
    from upcycle.io.checkpoint import Checkpoint
    from upcycle.verifying.inspect import check, describe

    with Checkpoint.open(options.folder) as checkpoint:  # a folder, or a hub id
        folder = checkpoint.folder
    print(describe(folder, tensors=options.tensors))
    return 0 if not options.check or check(folder) else PROMISE_BROKEN


def run_push(options: argparse.Namespace) -> int:
    from upcycle.converting import card
    from upcycle.io import hub

    hub.check_id(options.name)
    what = hub.upload(options.folder)
    for name, content in what.files:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"{card.human(size, 'B'):>10}  {name}")
    for name in what.left:
        print(f"      stays  {name}")
    print(f"{card.human(what.bytes, 'B'):>10}  in {len(what.files)} files to {options.name}", flush=True)
    if not options.dry_run:
        print(hub.send(what, options.name, private=options.private))
    return 0


def script() -> NoReturn:
    """Entry point. Exits without tearing torch down, which takes 0.4 s: everything written is on the disk by now."""
    code = cli.start("upcycle.__main__", own_help=True)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    script()
