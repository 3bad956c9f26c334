"""The file of one page or state: safetensors, readable by any safetensors library.

The payload buffers are the tensors "0", "1", ... (dtype U8, their bytes unchanged), in order and
without gaps. The metadata identifies the block and holds a CRC-32 of the payload's sizes and bytes.
A file that is truncated, damaged or holds another block is detected before its bytes are used.
(BLAKE2b took six times as long, which was most of the time to read a block.)
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import msgspec

FORMAT = "mlx-lm-server-page-1"
MAX_FILE_BYTES = 256 * 1024 * 1024
"""Larger files are not blocks: they are neither sent nor read into memory."""

MAX_HEADER_BYTES = 1024 * 1024
_LENGTH_BYTES = 8


class BlockFileError(Exception):
    """The bytes are not the expected block."""


def encode(hash: bytes, namespace: str, payload: Sequence[bytes | memoryview]) -> bytes:
    """Return the file of the block ``hash`` of ``namespace`` with these buffers."""
    buffers = [memoryview(buffer).cast("B") for buffer in payload]
    header: dict[str, object] = {
        "__metadata__": _Metadata(
            format=FORMAT,
            hash=hash.hex(),
            namespace=namespace,
            checksum=_checksum([buffer.nbytes for buffer in buffers], buffers),
        )
    }
    offset = 0
    for number, buffer in enumerate(buffers):
        end = offset + buffer.nbytes
        header[str(number)] = _Tensor("U8", [buffer.nbytes], (offset, end))
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # aligned payload, as the format recommends
    return b"".join([len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *buffers])


def decode(data: bytes | memoryview, hash: bytes, namespace: str) -> tuple[memoryview, ...]:
    """Return the payload buffers in ``data``, as views without a copy.

    Raises: `BlockFileError` unless ``data`` is exactly what `encode` made for this ``hash`` and
    ``namespace``.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or view.nbytes < start:
        raise BlockFileError("too short, or not a block file")
    metadata, tensors = _parse_header(view[_LENGTH_BYTES:start])
    if metadata.format != FORMAT:
        raise BlockFileError(f"unknown format {metadata.format!r}")
    if metadata.hash != hash.hex() or metadata.namespace != namespace:
        raise BlockFileError(f"holds another block, {metadata.namespace}/{metadata.hash}")

    content = view[start:]
    end = 0
    for tensor in tensors:
        begin, stop = tensor.data_offsets
        if tensor.dtype != "U8" or begin != end or tensor.shape != [stop - begin] or stop < begin:
            raise BlockFileError("the buffers are not contiguous")
        end = stop
    if end != content.nbytes:
        raise BlockFileError(f"payload of {content.nbytes} bytes, expected {end}")
    if metadata.checksum != _checksum([tensor.shape[0] for tensor in tensors], [content]):
        raise BlockFileError("checksum mismatch")
    return tuple(content[slice(*tensor.data_offsets)] for tensor in tensors)


class _Metadata(msgspec.Struct, frozen=True):
    format: str
    hash: str
    namespace: str
    checksum: str


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _parse_header(header: memoryview) -> tuple[_Metadata, list[_Tensor]]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__"), type=_Metadata)
        tensors = [
            msgspec.json.decode(entries[str(number)], type=_Tensor)
            for number in range(len(entries))
        ]
    except (KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise BlockFileError(f"malformed header: {error!r}") from error
    return metadata, tensors


def _checksum(sizes: Sequence[int], payload: Sequence[memoryview]) -> str:
    checksum = crc32(",".join(map(str, sizes)).encode() + b"\n")
    for buffer in payload:
        checksum = crc32(buffer, checksum)  # releases the GIL
    return f"{checksum:08x}"
