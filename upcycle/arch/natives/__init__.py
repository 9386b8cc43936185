"""MoE architectures that no dense model becomes here, one file each, named as `model_type` in config.json: they are
trained, evaluated and exported as they are. A native is two names, which a target has too:

    read(config)         the MoESpec; a ValueError for what an MoESpec cannot hold
    slots(moe)           every tensor on disk: Slot(name, roles, shape), in file order
"""
