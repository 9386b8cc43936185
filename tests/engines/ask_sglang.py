"""Asks SGLang's Transformers backend on a CPU, in float32. See asking.py.

SGLang imports packages that have builds for GPUs only, and uses none of them on a CPU: stand-ins take their place. A
model's processes are forked, because each would import SGLang for minutes otherwise.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import asking
import transformers

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
FOR_GPUS = ("torchvision", "sgl_kernel", "flashinfer", "decord", "torchcodec", "torchaudio", "soundfile", "pynvml")


class StandIn(types.ModuleType):
    __path__: Sequence[str] = []
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock())
        return getattr(self, name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.split(".")[0] in FOR_GPUS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


for name in ("AutoProcessor", "AutoTokenizer", "AutoModel"):  # transformers looks for packages when it loads these
    getattr(transformers, name)
sys.meta_path.insert(0, StandIns())

import sglang  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.transformers  # noqa: E402

multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]


def answer(question: dict[str, Any]) -> asking.Answer:
    engine = sglang.Engine(
        model_path=question["folder"], device="cpu", dtype="float32", attention_backend="torch_native",
        sampling_backend="pytorch", trust_remote_code=question["code"], model_impl="transformers",
        disable_cuda_graph=True, disable_overlap_schedule=True, skip_tokenizer_init=True, mem_fraction_static=0.3,
        max_total_tokens=512, context_length=256, chunked_prefill_size=256, disable_radix_cache=True,
        skip_server_warmup=True,
    )  # fmt: skip
    settings = {"temperature": 0, "ignore_eos": True}
    try:
        greedy = engine.generate(
            input_ids=question["prompt"], sampling_params=settings | {"max_new_tokens": question["new"]}
        )
        scored = engine.generate(
            input_ids=question["text"], sampling_params=settings | {"max_new_tokens": 1}, return_logprob=True,
            logprob_start_len=0,
        )  # fmt: skip
    finally:
        engine.shutdown()
    logprobs = [logprob for logprob, *_ in scored["meta_info"]["input_token_logprobs"][1:]]
    return {"greedy": greedy["output_ids"], "logprobs": logprobs}


asking.main(answer)
