"""MoE architectures, one file each, named as `model_type` in config.json.

A target is four names:

    ABILITIES            what it can hold, as data; common.refusals() turns a mismatch into sentences
    config(moe)          the config.json that stock transformers reads
    slots(moe)           every tensor on disk: Slot(name, roles, shape), in file order
    notes(moe)           sentences the plan prints about this choice (may be empty)
"""
