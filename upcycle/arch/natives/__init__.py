"""MoE architectures that no dense model becomes here, one file each, named as `model_type` in config.json, with one
name: NATIVE, a targets.common.Native. They are trained, evaluated and exported as they are."""
