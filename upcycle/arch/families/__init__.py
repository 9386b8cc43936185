"""Dense architectures, one file each; the file has the name of its `model_type` and defines FAMILY, a common.Family."""
