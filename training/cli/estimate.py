"""Estimate whether a run fits, how long it takes and whether it pays, for any mapping, without a GPU or weights.

usage: upcycle estimate [CONFIG] gpus=N [hardware=NAME] [budget=AMOUNT] [price=P] [seen=AMOUNT]
       [islands=N link=SPEED] [key=value ...]

  upcycle estimate my.yaml gpus=8                  # the config's mapping, and others by memory
  upcycle estimate llama3-8b-e8t2 model.upcycle.source=./llama gpus=16 mesh.ep=4 model.recompute=full
  upcycle estimate my.yaml gpus=8 hardware=h100 budget="100B tokens" price=2.5 seen=15T   # the fastest that fit
  upcycle estimate my.yaml gpus=1 islands=4 link=1Gb/s    # also what islands send each other
  upcycle estimate bench-deepseek-v3 gpus=256 hardware=h100 mesh.ep=64 mesh.pp=4 batch=512   # from sizes alone
  upcycle estimate measure=mine.yaml                      # write this machine's hardware file, in a minute
  upcycle estimate measure=mine.yaml nproc=8              # also measure the links between its cards

Weights, gradients and moments are counted parameter by parameter. Gathered weights and activations are estimated from
what modules keep in bf16 on a GPU. The allocator's waste, NCCL's buffers and CUDA's context (about 3 GB together) are
not included. `host` is the host memory of an asynchronous checkpoint. Frozen parameters (optim.groups) have no
gradients or moments, and half of the bytes in bfloat16, less in nf4 (model.frozen); activations are counted as if
everything learned. A dense teacher (teacher.weight) has its own column. A run in stages has a line for each stage, with
the moments of all stages, and with `hardware` the hours of each.

With `hardware` the mappings that fit are ranked by predicted tokens/s. `budget`, `price` and `seen` add hours, money
and the published law of upcycling. docs/scaling.md says how accurate the predictions are.

keys of estimate and of training, with defaults and meaning: docs/config.md
"""

from __future__ import annotations

from collections.abc import Sequence

from upcycle.cli import frame


@frame.command()
def main(words: Sequence[str]) -> int:
    if any(word.startswith("measure=") for word in words):
        from training.estimating.measure import MeasureConfig, measure
        from upcycle.config.reading import read

        said = measure(read(MeasureConfig, *frame.file_and_words(words)))
    else:
        from training.estimating.estimate import estimate_words

        said = estimate_words(*frame.file_and_words(words))
    if said:
        print(said)
    return 0
