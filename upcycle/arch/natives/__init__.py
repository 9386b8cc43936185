"""MoE architectures that we train, evaluate and export but do not convert dense models to, one file each.

The file has the name of its `model_type` in config.json and defines NATIVE, a targets.common.Native.
"""
