"""Read Arrow files, as `datasets.save_to_disk` writes them, straight from a memory map.

pyarrow unpacks a packed batch into as many bytes as the batch itself says, and reads strings at any place that it says.
So packed batches are refused, and each batch is checked before its rows are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

COMPRESSION = 3  # the field of a RecordBatch in Arrow's Message.fbs that says how it is packed
HEADER = 2  # the field of a Message that holds the RecordBatch


def batches(place: str, choose: Callable[[Sequence[str]], list[str]], watch: Callable[[int], object]) -> Iterator[Any]:
    """Yield the record batches of a file with the columns that `choose` returns for the names of all columns."""
    pyarrow = import_module("pyarrow")
    with pyarrow.memory_map(place) as file:
        messages = pyarrow.ipc.MessageReader.open_stream(file)
        schema = pyarrow.ipc.read_schema(messages.read_next_message())
        columns, at = choose(schema.names), 0
        for message in messages:
            if message.type != "record batch" or is_packed(message.metadata.to_pybytes()):
                raise ValueError(
                    f"{place} has a packed or encoded batch (a {message.type}); write it with datasets.save_to_disk"
                )
            batch = pyarrow.ipc.read_record_batch(message, schema).select(columns)
            batch.validate(full=True)
            yield batch
            watch(file.tell() - at)
            at = file.tell()


def is_packed(message: bytes) -> bool:
    """Return whether the metadata of a record batch, a flatbuffer, names a compression."""
    (root,) = struct.unpack_from("<I", message)
    at = field(message, root, HEADER)
    return bool(at) and bool(field(message, at + struct.unpack_from("<I", message, at)[0], COMPRESSION))


def field(message: bytes, table: int, number: int) -> int:
    """Return where a field of a flatbuffer's table is stored; 0 if it is left out."""
    head = table - struct.unpack_from("<i", message, table)[0]
    (length,) = struct.unpack_from("<H", message, head)
    slot = 4 + 2 * number
    (at,) = struct.unpack_from("<H", message, head + slot) if slot < length else (0,)
    return table + at if at else 0
