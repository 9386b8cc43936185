"""How islands learn from each other, one rule a file, on tensors alone.

    Push(residual, momentum, gain=...).push(delta, counts) -> Sparse    an island: what it sends of delta = start - end
    Pull(model, secondary, worth)                             the server: keeps the model, and what each island has
        .join(island), .leave(island)
        .push(island, sent)                                   takes in what an island has sent
        .pull(island, all=False) -> Sparse | None             what it is to add to what it has; None: not yet
    SHARE                                                     what share is sent: None, as the config says
    gain(islands) -> float                                    what is multiplied with as it is sent
    KEEPS                                                     whether an island keeps its unsent residual

`delta` and what is sent are *taken from* the model; what is pulled is *added* to what the island has, by the server and
the island in the same order and in the same dtype, so that both hold the same bits.
"""
