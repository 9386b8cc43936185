"""MoE architectures, one file each, named as `model_type` in config.json.

A target is five names:

    ABILITIES            what it can hold, as data; common.refusals() turns a mismatch into sentences
    config(moe)          the config.json that stock transformers reads
    read(config)         the same way back, for any model of this architecture: the target's own view of it, such that
                         slots(view) are the tensors in its folder, and config(view) is its config.json where we wrote
                         it; raises ValueError for what an MoESpec cannot say
    slots(moe)           every tensor on disk: Slot(name, roles, shape), in file order
    notes(moe)           sentences the plan prints about this choice (may be empty)
"""
