"""Train one model on machines that a slow link joins: islands differ in speed, and they come and go.

An island trains with the normal loop for H steps. Then it sends what it learned to a server, and the server answers
with what the other islands learned. Both messages hold few numbers. docs/islands.md says when islands pay.

    rules/NAME     choose what an island sends and what the server answers; only tensors
    center         the server as values: events go in, answers come out
    journal        the server's log and snapshots on disk
    link/wire      turn numbers into bytes and back
    link/frames    authenticate and frame the bytes on a socket
    link/server    sockets around a center
    link/client    an island's end of the socket
    island         the steps of the training loop that exchange
    places         find each number of the model in one long vector

Letters: P numbers of the whole model; S segments (an expert's matrix, or a tensor) of N numbers.
"""
