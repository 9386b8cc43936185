"""What transformers' own modelling makes of a bench config's blocks: forward and backward, beside upcycle bench's row.

usage: python -m tests.gpu.peer_transformers bench-deepseek-v3 layers=4 stack=true [compile=true] [key=value ...]

The same random tokens, weights drawn alike, bfloat16, no head, the same stand-in for a loss, experts by torch's grouped_mm
(experts_implementation), attention by FlexAttention where heads have sinks, else by SDPA with cuDNN first.
"""

from __future__ import annotations

import json
import statistics
import sys

import torch
import transformers
from torch.nn.attention import sdpa_kernel

from training.estimating.bench import BLOCKS, BenchConfig, batch, spec_of, timed
from training.model.attention import BACKENDS
from training.observe.flops import model_flops
from upcycle.arch.spec import MoESpec
from upcycle.cli import frame as cli
from upcycle.config.reading import read
from upcycle.config.ready import TRAIN


def main(words: list[str]) -> None:
    file, words = cli.file_and_words(words)
    config = read(BenchConfig, file, words, TRAIN)
    spec = spec_of(config)
    assert isinstance(spec, MoESpec) and config.stack and not config.optimizer and not config.documents
    layers = spec.dense.layers
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = (
        "flex_attention" if spec.dense.sinks and device.type == "cuda" else "eager" if spec.dense.sinks else "sdpa"
    )
    keys = {key: value for key, value in config.architecture.items() if key != "architectures"} | {
        "num_hidden_layers": layers, "use_cache": False,
    }  # fmt: skip
    with device:
        model = transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model(**keys), dtype=getattr(torch, config.weights), attn_implementation=attention,
            experts_implementation="grouped_mm",
        )  # fmt: skip
    model.train()
    if config.model.compile:
        for layer in model.layers:
            layer.compile()
    count = config.batch // (config.micro_batch or config.batch)
    size = config.batch // count
    tokens = [batch(config, spec.dense.vocab, number * size, size).tokens.to(device) for number in range(count)]

    def step() -> None:
        for tokens_BS in tokens:
            out = model(input_ids=tokens_BS).last_hidden_state
            (out.float().square().mean(-1).sum() / (config.batch * config.data.sequence)).backward()
        model.zero_grad(set_to_none=True)

    with sdpa_kernel(BACKENDS, set_priority=True):
        for _ in range(config.warmup):
            step()
        seconds = statistics.median(timed(step, device, config.steps) for _ in range(BLOCKS))
    rate = config.batch * config.data.sequence / seconds
    flops = model_flops(spec, config.data.sequence) - 6 * spec.dense.vocab * spec.dense.hidden
    row = {
        "peer": f"transformers {transformers.__version__}, grouped_mm, {attention}", "compile": config.model.compile,
        "layers": layers, "micro_batch": size, "parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds,
        "tokens_per_s": rate, "tflops": flops * rate / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
