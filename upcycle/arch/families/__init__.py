"""Dense architectures, one file each, named as `model_type` in config.json.

A family is three names:

    read(config) -> DenseSpec         config.json as a mapping; raises ValueError for what this architecture cannot be
    sources(spec) -> {role: Source}   where each role of spec.roles() lies in the checkpoint
    IGNORED                           regular expressions of tensors that are not weights (old rotary buffers)
"""
