"""Islands: runs of one model on machines that a slow link joins, unequal in speed, that come and go.

An island trains as the loop does, H steps at a time, and tells a server what it has learned; the server answers with
what the others have. Both ways carry few numbers. docs/islands.md says when that pays.

    rules/NAME  what is sent and what is answered, on tensors alone        wire    numbers to bytes and back
    center      the server as values: events in, answers out               journal what of it is on the disk
    frames      bytes on a socket, from whom they say they are             serve   sockets around a center
    link        an island's end of the socket                              island  the loop's end of it

Letters: P numbers of the whole model; S segments (an expert's matrix, or a tensor) of N numbers.
"""
