"""Asks vLLM's CPU build, in float32. See asking.py."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip

import asking
from vllm import LLM, SamplingParams


def without_fp8_kernels() -> None:
    """Multiply FP8 weights by their scales after vLLM has loaded them, and compute in the model's dtype.

    vLLM's FP8 kernels for experts on a CPU need AMX. This asks for the rest: the config, the names and the numbers.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as experts,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as matrices,
    )

    def multiply(layer: Any, name: str) -> None:
        weight, scale = getattr(layer, name), getattr(layer, f"{name}_scale")
        assert weight.dtype == torch.float8_e4m3fn and scale.shape == (*weight.shape[:-1], 1), (
            weight.dtype,
            scale.shape,
        )
        setattr(layer, name, torch.nn.Parameter(weight.float() * scale.float(), requires_grad=False))

    def load_experts(self: Any, layer: Any) -> None:
        multiply(layer, "w13_weight")
        multiply(layer, "w2_weight")
        layer._replace_quant_method(UnquantizedFusedMoEMethod(self.moe))
        layer.quant_method.process_weights_after_loading(layer)

    def load_matrix(self: Any, layer: Any) -> None:
        multiply(layer, "weight")

    def linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.weight, bias)

    experts.CompressedTensorsW8A8Fp8MoEMethod.process_weights_after_loading = load_experts
    matrices.CompressedTensorsW8A8Fp8.process_weights_after_loading = load_matrix
    matrices.CompressedTensorsW8A8Fp8.apply_weights = linear


def answer(question: dict[str, Any]) -> asking.Answer:
    if question.get("without_fp8_kernels"):
        without_fp8_kernels()
    folder, prompt, text = question["folder"], question["prompt"], question["text"]
    model = LLM(
        model=folder, dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=False, trust_remote_code=question["code"],
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=question["new"], ignore_eos=True, detokenize=False)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": tokens} for tokens in (prompt, text)]
    first, second = model.generate(inputs, [greedy, scored], use_tqdm=False)
    rows = second.prompt_logprobs[1:]
    return {
        "greedy": list(first.outputs[0].token_ids),
        "logprobs": [row[token].logprob for row, token in zip(rows, text[1:], strict=True)],
    }


asking.main(answer)
