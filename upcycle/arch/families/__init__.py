"""Dense architectures, one file each, named as `model_type` in config.json, with one name: FAMILY, a common.Family."""
