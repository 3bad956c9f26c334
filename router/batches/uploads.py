"""Uploads of files: `multipart/form-data` (RFC 7578), written to disk as they arrive."""

from __future__ import annotations

import re
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

_MAX_FORM_BYTES = 32 * 1024
"""Max bytes of a body besides the content of its file: headers, other fields, padding."""
_SLICE_BYTES = 16 * 1024
"""The limits are checked after each."""
_MAX_NAME_CHARS = 255
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


def boundary_of(content_type: str | None) -> bytes:
    """Return the boundary between the parts. Raises `UnsupportedMediaType`."""
    media_type, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if media_type != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise UnsupportedMediaType("Files must be uploaded as multipart/form-data with a boundary.")
    return boundary


class Upload:
    """One upload, which writes its part "file" to ``file``. Its methods may run on any thread, one
    at a time."""

    def __init__(self, boundary: bytes, file: BinaryIO, max_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """The client's name for the file; None until it has arrived. It is not used as a path."""
        self.size = 0
        self._max_bytes = max_bytes
        self._file = file
        self._fed = 0
        self._is_complete = False
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name, self._in_file = "", False
        self._delimiter, self._tail = b"\r\n--" + boundary, b""
        self._broken_delimiter = re.compile(
            re.escape(self._delimiter) + rb"(?!\r\n|--|\r\Z|-\Z|\Z)"
        )
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Process the next bytes of the body. Raises `InvalidRequest`, `BodyTooLarge`, OSError."""
        for start in range(0, len(data), _SLICE_BYTES):
            self._feed(data[start : start + _SLICE_BYTES])

    def _feed(self, data: bytes) -> None:
        # The parser reads content that begins like a boundary byte by byte: that takes a thousand
        # times as long as other content.
        window = self._tail + data
        if self._broken_delimiter.search(window):
            raise InvalidRequest(
                "A line of the body begins with the boundary but continues after it."
            )
        self._tail = window[-len(self._delimiter) - 1 :]
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise InvalidRequest(f"The body is not multipart/form-data: {error}") from None
        self._fed += len(data)
        if self._fed - self.size > _MAX_FORM_BYTES:
            raise InvalidRequest(
                f"The body has more than {_MAX_FORM_BYTES} bytes besides the content of its file."
            )

    def check(self) -> None:
        """Raise `InvalidRequest` if something is missing at the end of the body."""
        if not self._is_complete:
            raise InvalidRequest("The body is empty or ends inside a part.")
        if self.filename is None:
            raise InvalidRequest("'file' is required.", param="file")

    # -- what the parser finds -------------------------------------------------

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _begin_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._in_file = self._name == "file"
        if self._in_file:
            if self.filename is not None:
                raise InvalidRequest("There are two files; send each by itself.", param="file")
            self.filename = _tidied(options.get(b"filename", b"").decode(errors="replace"))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._value += data[start:end]
            return
        self.size += end - start
        if self.size > self._max_bytes:
            raise BodyTooLarge(f"The file is larger than {self._max_bytes} bytes.", param="file")
        self._file.write(data[start:end])

    def _end_part(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode(errors="replace")
            self._value = bytearray()

    def _end(self) -> None:
        self._is_complete = True


def _tidied(name: str) -> str:
    """Return a file name that is safe to display."""
    last = re.split(r"[/\\]", name)[-1]
    return _UNPRINTABLE.sub("", last)[:_MAX_NAME_CHARS] or "upload"
