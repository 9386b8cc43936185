"""Measure how fast vLLM serves models: the latency of one request, and the tokens a second of several at once.

.venv-vllm/bin/python -P benchmarks/serving.py DENSE SLICES ... [turns=3] [dtype=auto] [eager=false] [batches=1,8,64]

It runs in vLLM's own environment and imports nothing of ours (-P: a file of this folder has the name of a package). One process holds all models, and each turn measures each of them
once, so that other load on the machine meets all. A request has 8 random tokens and asks for 8 more. Seconds
are those of the processor, which with OMP_NUM_THREADS=1 do not depend on what else runs; `wall` is told too.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip

PROMPT, NEW = 8, 8


def main(words: list[str]) -> None:
    from vllm import LLM, SamplingParams

    folders = [word for word in words if "=" not in word]
    asked = {"turns": "3", "dtype": "auto", "eager": "false", "batches": "1,8,64"}
    asked |= dict(word.split("=", 1) for word in words if "=" in word)
    batches = [int(batch) for batch in asked["batches"].split(",")]
    models = {}
    # the dense model last: the first model decides whether vLLM makes its groups for experts
    for folder in reversed(folders):
        start = time.monotonic()
        models[folder] = LLM(
            model=folder, dtype=asked["dtype"], enforce_eager=asked["eager"] == "true", max_model_len=256, seed=0,
            max_num_seqs=max(batches), max_num_batched_tokens=1024, skip_tokenizer_init=True, enable_prefix_caching=False, trust_remote_code=True,
        )  # fmt: skip
        print(json.dumps({"folder": folder, "loaded": round(time.monotonic() - start, 1)}), file=sys.stderr, flush=True)
    random.seed(0)
    prompts = [{"prompt_token_ids": random.choices(range(1000, 40000), k=PROMPT)} for _ in range(max(batches))]
    ask = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    seconds: dict[tuple[str, int], list[float]] = {(folder, batch): [] for folder in folders for batch in batches}
    for turn in range(-1, int(asked["turns"])):  # turn -1 warms up
        for batch in batches if turn >= 0 else batches[:2]:
            for folder in folders:
                start, used, load = time.monotonic(), time.process_time(), os.getloadavg()[0]
                done = models[folder].generate(prompts[:batch], ask, use_tqdm=False)
                wall, taken = time.monotonic() - start, time.process_time() - used
                assert all(len(each.outputs[0].token_ids) == NEW for each in done)
                row = {
                    "turn": turn,
                    "batch": batch,
                    "folder": folder,
                    "seconds": round(taken, 3),
                    "wall": round(wall, 2),
                    "load": load,
                }
                print(json.dumps(row), file=sys.stderr, flush=True)
                if turn >= 0:
                    seconds[folder, batch].append(taken)
    print("| model | " + " | ".join(f"batch {batch}: s | tokens/s | times the first" for batch in batches) + " |")
    print("|---" * (3 * len(batches) + 1) + "|")
    for folder in folders:
        cells = []
        for batch in batches:
            taken, first = (statistics.median(seconds[each, batch]) for each in (folder, folders[0]))
            cells += [f"{taken:.2f}", f"{batch * NEW / taken:.0f}", f"{taken / first:.2f}"]
        print(f"| {Path(folder).name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
