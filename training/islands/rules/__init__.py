"""Define how islands learn from each other: one rule in each file, on tensors alone.

    Push(residual, momentum, gain=...).push(delta, counts) -> Sparse    island: choose what to send of start - end
    Pull(model, secondary, worth)                                       server: keep the model and each island's copy
        .join(island), .leave(island)
        .push(island, sent)                                             take in what an island sent
        .pull(island, all=False) -> Sparse | None                       numbers to add to its copy; None: not yet
        .undo(change)                                                   take back what an island changed
    SHARE                                                               share that is sent; None: the config's
    gain(islands) -> float                                              factor of everything that is sent
    KEEPS                                                               an island keeps its unsent residual

The server *subtracts* a push from the model. The server and the island *add* an answer to the island's copy, in the
same order and dtype, so that both hold the same bits.
"""
