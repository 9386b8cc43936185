"""A class of vLLM for models with `target=upcycled`. It fuses experts that vLLM's Transformers backend cannot fuse.

The backend takes all experts for gated SiLU of one width, so modeling_upcycled.py hides other experts from it. They
then run one after another, in code that torch.compile cannot trace. This class shows them to the backend and names
their activation. Experts without a kernel still run one after another, but torch.compile traces the rest of the model.
"""

# mypy: disable-error-code="misc, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
from vllm.model_executor.models.transformers import TransformersMoEForCausalLM, moe
from vllm.utils.torch_utils import direct_register_custom_op

# by the name that transformers gives an activation; vLLM adds "_no_mul" for FFNs without a gate
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


class UpcycledForCausalLM(TransformersMoEForCausalLM):
    def recursive_replace(self) -> None:
        """Replace the modules of the model by vLLM's own."""
        config, blocks = self.text_config, dict(find_blocks(self.model))
        if config.has_stacked_experts or not blocks:
            super().recursive_replace()
            return
        loose = {name: block.experts for name, block in blocks.items()}
        if may_have_kernel(config, self.parallel_config.tensor_parallel_size):
            for block in blocks.values():
                block.experts = nn.ModuleList(block.experts.children())  # the backend looks for a list
            try:
                with patch.object(moe, "FusedMoEFactory", experts_like(config)):
                    super().recursive_replace()
                return
            except NotImplementedError:  # vLLM has no kernel for them on this platform
                for name, block in blocks.items():
                    block.experts = loose[name]
        super().recursive_replace()
        for name, experts in loose.items():
            self.compilation_config.static_forward_context[name] = experts
            experts.forward = partial(torch.ops.vllm.upcycled_loose_experts, name=name)


def find_blocks(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the MoE blocks with their names; their class comes from the folder of the model."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == "UpcycledMoE"]


def may_have_kernel(config: Any, ranks: int) -> bool:
    """Return whether vLLM has a name for the activation and divides every width among tensor-parallel ranks."""
    return config.hidden_act in ACTIVATIONS and all(width % ranks == 0 for width in config.expert_widths)


def experts_like(config: Any) -> Any:
    """Return vLLM's constructor of fused experts, with what the backend does not read from the config."""
    activation = ACTIVATIONS[config.hidden_act]
    known = {
        "activation": activation if config.gated else f"{activation}_no_mul",
        "ckpt_names": ("gate_proj", "down_proj", "up_proj") if config.gated else ("up_proj", "down_proj", None),
        "routed_experts_cls": PaddedExperts,
    }
    return lambda **asked: FusedMoEFactory(**asked | known)


class PaddedExperts(RoutedExperts):
    """Experts that may be narrower than their tensors: the rest is zero and adds nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.parameters():
            parameter.data.zero_()


def loose_experts(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, name: str) -> Tensor:
    """Run the experts of one layer one after another, as a single operation for torch.compile."""
    experts = moe.get_forward_context().no_compile_layers[name]
    y_TD: Tensor = type(experts).forward(experts, x_TD, expert_TK, weight_TK)
    return y_TD


def fake_loose_experts(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, name: str) -> Tensor:
    return torch.empty_like(x_TD)


direct_register_custom_op("upcycled_loose_experts", loose_experts, fake_impl=fake_loose_experts)
