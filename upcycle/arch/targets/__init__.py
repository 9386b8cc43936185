"""MoE architectures that a dense model can become, one file each.

The file has the name of its `model_type` in config.json and defines TARGET, a common.Target.
"""
