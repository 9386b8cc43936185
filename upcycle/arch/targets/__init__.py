"""MoE architectures, one file each, named as `model_type` in config.json.

A target is five names:

    ABILITIES            the models it can hold, as data; common.refusals() turns a mismatch into clauses
    config(moe)          the config.json that transformers reads
    read(config)         the way back, for any model of this architecture: a view, the MoESpec as the target sees it.
                         slots(view) are the tensors in the model's folder, and config(view) is its config.json if we
                         wrote that. A ValueError for what an MoESpec cannot hold
    slots(moe)           every tensor on disk: Slot(name, roles, shape), in file order
    notes(moe)           sentences that the plan prints about this target (may be empty)
"""
