"""Fused pieces: a Triton kernel for CUDA, a torch reference beside it that says what it must compute."""
