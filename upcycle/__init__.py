"""Turn a dense Hugging Face language model into a mixture of experts: planned, exact, streamed, verified."""

__version__ = "0.1.0"
