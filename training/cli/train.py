"""Train a model, or resume the run in `output`.

usage: upcycle train [CONFIG] [key=value ...] [nproc=N]

CONFIG is a YAML file or the name of a ready config (configs/train). First turn text into token shards with `upcycle
prepare`. `upcycle estimate` says whether a run fits, and `upcycle report RUN output=loss.png` draws it.

  upcycle train stories model.upcycle.source=./llama output=runs/moe
  upcycle train model.source=./llama data.train=[runs/stories-data] output=runs/dense steps=1000 batch=8
  upcycle train my.yaml profile=10-12                                  # record a trace
  upcycle train my.yaml mesh.ep=8 nproc=8                              # on 8 GPUs, the same run
  torchrun --nproc-per-node 8 -m training my.yaml mesh.ep=8            # the same with torch's own launcher

Islands are runs that share one model over a slow link. A server keeps the model; all use one config and one secret:

  openssl rand -hex 32 > secret && chmod 600 secret                    # once; copy it to every island
  upcycle train my.yaml islands.serve=true output=runs/server islands.secret=secret islands.count=2 export=moe-islands
  upcycle train my.yaml output=runs/island-0 islands.join=localhost:29600 islands.secret=secret   # one per machine
  upcycle train my.yaml output=runs/try islands.local=2                # everything on this machine

A run that is asked to stop saves and exits with code 75 (with nproc: 130 or 143). Keys with defaults: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame

# exit code of a run that was asked to stop: EX_TEMPFAIL, so that `a && b` ends; the same command continues
STOPPED = 75


@frame.command(resumes=True)
def main(words: Sequence[str]) -> int:
    from training.api import train
    from training.config.reading import read_config
    from training.parallel.processes import rank
    from training.run.stop import Stopped

    config = read_config(*frame.file_and_words(words))
    if config.islands.serve or config.islands.local:
        from training.islands.run import local, serve

        print(serve(config)[0] if config.islands.serve else local(config, words))
        return 0
    said, code = f"{config.output} is trained: metrics.jsonl, checkpoints/", 0
    said += f"; {config.export} is its model" if config.export else ""
    try:
        train(config)
    except Stopped as stopped:
        said = f"{config.output} {stopped} of {config.steps}; the same command continues from there"
        code = STOPPED
    if rank() == 0:  # rank 0 speaks for all
        print(said)
    return code
