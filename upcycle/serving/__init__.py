"""The plug-in for vLLM. The wheel names `register` in the entry-point group vllm.general_plugins, and vLLM calls it."""

from __future__ import annotations


def register() -> None:
    """Tell vLLM which class runs models with `target=upcycled`. vLLM imports the class when it meets such a model."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("UpcycledForCausalLM", f"{__name__}.vllm:UpcycledForCausalLM")
