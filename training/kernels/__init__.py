"""Fused operations: each has a Triton kernel for CUDA, and a torch reference that specifies its result."""
