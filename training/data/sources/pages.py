"""Read how large the pages of a parquet file are, from the pages themselves.

pyarrow unpacks each page into as many bytes as the page's own header says. The footer says it too, for whole columns,
but nothing compares the two, so a file whose footer lies would take any amount of memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, BinaryIO

HEADER = 1 << 24  # bytes of one header at most, as in pyarrow
NUMBERS = (4, 5, 6)  # types of Thrift's compact protocol
DEPTH = 10  # structs in structs


@dataclass(frozen=True)
class Column:
    unpacked: int  # bytes of all its pages
    packed: int  # bytes of them on disk


def sizes(file: BinaryIO, chunk: Any) -> Column:
    """Return the size of one column of a row group; `chunk`: pyarrow's metadata about it."""
    at = begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
    values = unpacked = 0
    while values < chunk.num_values and at < begin + chunk.total_compressed_size:
        header, length = read_header(file, at)
        wide, packed = header.get(2), header.get(3)
        if not isinstance(wide, int) or not isinstance(packed, int) or min(wide, packed) < 0:
            raise ValueError(f"the page at byte {at} has no size")
        page = header.get(5) or header.get(8)  # data pages of version 1 and 2
        values += page.get(1, 0) if isinstance(page, dict) else 0
        unpacked += wide
        at += length + packed
    return Column(unpacked, at - begin)


def read_header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """Return (the fields of the header at byte `at`, its length)."""
    room = 1 << 10
    while True:
        raw = os.pread(file.fileno(), room, at)
        try:
            return Thrift(raw).struct()
        except IndexError:
            if len(raw) < room or room > HEADER:
                raise ValueError(f"the header of the page at byte {at} does not end") from None
            room <<= 4


class Thrift:
    """Read a struct of Thrift's compact protocol; an IndexError means that the bytes end too early."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def struct(self, depth: int = 0) -> tuple[dict[int, Any], int]:
        if depth > DEPTH:
            raise ValueError("the header of a page is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.signed()
            fields[number] = self.value(head & 15, depth)
        return fields, self.at

    def value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true and false, which are in the type
            return kind == 1
        if kind in NUMBERS:
            return self.signed()
        if kind == 12:
            return self.struct(depth + 1)[0]
        if kind not in (3, 7, 8):
            raise ValueError(f"the header of a page has a field of type {kind}")
        length = {3: 1, 7: 8}.get(kind) or self.unsigned()  # a byte, a float, and text
        self.at += length
        if self.at > len(self.raw):
            raise IndexError
        return None

    def signed(self) -> int:
        number = self.unsigned()
        return number >> 1 ^ -(number & 1)

    def unsigned(self) -> int:
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number
            if shift > 63:
                raise ValueError("the header of a page has a number of more than 64 bits")

    def byte(self) -> int:
        self.at += 1
        return self.raw[self.at - 1]
