"""A few small arrays as safetensors bytes, written and read in microseconds. Imports no torch.

    blob = length of the table (8) | table, JSON filled up with spaces to a multiple of 8 | the arrays, one behind the other

What is written here safetensors reads, and the other way round. Its own functions take ten times as long for arrays of the
size of a group's. Reading makes views: nothing is copied, and nothing can be written into what was signed.
"""

import math
import struct
from typing import Annotated, Any

import msgspec
import numpy as np

MAX_TABLE_BYTES = 4096  # reading a million empty arrays would take gigabytes
DTYPES: dict[str, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in (("F64", "<f8"), ("F32", "<f4"), ("I32", "<i4"), ("BOOL", "?"))
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class BlobError(ValueError):
    """Bytes that are not a blob, or arrays that cannot be one; the text says why."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One array in the table; offsets in bytes, counted from the end of the table."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=2)]
    data_offsets: tuple[Size, Size]


_decoder = msgspec.json.Decoder(dict[str, Entry])
_encoder = msgspec.json.Encoder()


def write_arrays(arrays: dict[str, np.ndarray]) -> bytes:
    """Write contiguous arrays in their order; the widest dtype first keeps all of them aligned. Raises BlobError."""
    table, at = {}, 0
    for name, array in arrays.items():
        code = CODES.get(array.dtype)
        if code is None:
            raise BlobError(f"{name}: {array.dtype} cannot be written, only {', '.join(DTYPES)}")
        table[name] = Entry(code, array.shape, (at, at + array.nbytes))
        at += array.nbytes
    head = _encoder.encode(table)
    head += b" " * (-len(head) % 8)
    return b"".join((struct.pack("<Q", len(head)), head, *(a.data for a in arrays.values())))


def read_arrays(blob: bytes | memoryview) -> dict[str, np.ndarray]:
    """Views of the arrays in a blob, read-only. Raises BlobError unless every byte of it is accounted for."""
    size = int.from_bytes(blob[:8], "little")
    start = 8 + size
    if size > MAX_TABLE_BYTES or start > len(blob):
        raise BlobError(f"{len(blob)} bytes, without a table of arrays of a sane size")
    try:
        table = _decoder.decode(blob[8:start])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BlobError(f"table of arrays: {error}") from error
    arrays, at = {}, 0
    for name, entry in table.items():
        dtype, (begin, end) = DTYPES.get(entry.dtype), entry.data_offsets
        if dtype is None:
            raise BlobError(f"{name!r}: dtype {entry.dtype!r}, expected one of {', '.join(DTYPES)}")
        count = math.prod(entry.shape)
        if begin != at or end - begin != count * dtype.itemsize or start + end > len(blob):
            raise BlobError(
                f"{name!r}: {entry.dtype} {list(entry.shape)} at {begin} to {end}, expected from {at} on, "
                f"within {len(blob) - start} bytes"
            )
        try:
            array = np.frombuffer(blob, dtype, count, start + begin)
            arrays[name] = array if len(entry.shape) == 1 else array.reshape(entry.shape)
        except (ValueError, OverflowError) as error:  # a side of 0 lets the other be any size
            raise BlobError(f"{name!r}: {list(entry.shape)}: {error}") from error
        at = end
    if start + at != len(blob):
        raise BlobError(f"{len(blob) - start} bytes behind the table, which accounts for {at}")
    return arrays
