"""Convert a dense model to an MoE checkpoint. After a stop, the same command continues.

usage: upcycle convert [CONFIG] [SOURCE] [key=value ...] [nproc=N]

  upcycle convert ./llama output=./moe
  upcycle convert ./llama output=./moe method.name=virtual_group target=upcycled    # slices, as we recommend
  upcycle convert llama3-8b-e8t2 ./llama output=./moe nproc=8     # eight processes share the work

keys, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    from upcycle import api
    from upcycle.config.reading import config_and_source, read
    from upcycle.config.schema import UpcycleConfig
    from upcycle.io.job import Worker

    worker = Worker.here()
    plan = api.plan(read(UpcycleConfig, *config_and_source(words)))
    if not plan.config.output:
        raise ValueError("output is not set; write output=FOLDER")
    if worker.rank == 0:
        print(plan, flush=True)
    folder = api.convert(plan, worker=worker)
    if worker.rank == 0:
        dense = plan.config.source or plan.config.donors[0]
        print(f"\n{folder} is complete. Check it: upcycle verify {dense} {folder}")
    return 0
