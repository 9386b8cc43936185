"""MoE architectures that a dense model can become, one file each, named as `model_type` in config.json, with one name:
TARGET, a common.Target."""
