"""Will it fit, how long will it take, does it pay? For any mapping, without a GPU and without a byte of weights.

usage: upcycle estimate [CONFIG] gpus=N [hardware=NAME] [budget=AMOUNT] [price=P] [seen=AMOUNT]
       [islands=N link=SPEED] [key=value ...]

  upcycle estimate my.yaml gpus=8                  # the config's own mapping, and the others by their size
  upcycle estimate llama3-8b-e8t2 model.upcycle.source=./llama gpus=16 mesh.ep=4 model.recompute=full
  upcycle estimate my.yaml gpus=8 hardware=h100 budget="100B tokens" price=2.5 seen=15T   # the fastest that fit
  upcycle estimate my.yaml gpus=1 islands=4 link=1Gb/s    # and what islands send each other
  upcycle estimate bench-deepseek-v3 gpus=256 hardware=h100 mesh.ep=64 mesh.pp=4 batch=512   # of sizes alone
  upcycle estimate measure=mine.yaml                      # this machine's own hardware file, in a minute
  upcycle estimate measure=mine.yaml nproc=8              # and the wires between its cards

Weights, gradients and moments are counted, parameter by parameter. Gathered weights and activations are estimated from
what the modules keep in bf16 on a GPU (attention without its square, experts without their product); the allocator's
own waste, NCCL's buffers and CUDA's context (some 3 GB together) are not in it. `host` is what an asynchronous
checkpoint copies to host memory. Frozen parameters (optim.groups) have neither gradients nor moments, and where they
are bfloat16 (model.frozen) half of the bytes; activations are counted as if all learned. A dense teacher
(teacher.weight) has a column of its own. A run in stages has a line for each, with the moments of all stages in every
one, and with `hardware` the hours of each.

With `hardware` those that fit are ranked by predicted tokens/s; `budget`, `price` and `seen` make hours, money and what
the law of upcycling expects of that. docs/scaling.md says how good these predictions are.

keys, with defaults and meaning: docs/config.md, its own and those of training
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
