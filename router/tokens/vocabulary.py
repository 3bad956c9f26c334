"""What single tokens are as bytes and text, for log-probabilities."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The bytes of each token of one tokenizer.

    Taken from the token maps of mlx-lm's streaming detokenizers where these have one: byte-level
    BPE as text in GPT-2's alphabet of bytes, SentencePiece as bytes.
    ``trims_space`` says that the detokenizer leaves out a text's leading space.
    """

    def __init__(self, tokenizer: Any) -> None:
        detokenizer = tokenizer.detokenizer
        self._tokenizer = tokenizer
        self._token_map: list[str | bytes | None] | None = getattr(detokenizer, "tokenmap", None)
        self.trims_space = False
        for token in tokenizer.encode(" a", add_special_tokens=False):
            detokenizer.add_token(token)
        detokenizer.finalize()
        self.trims_space = not detokenizer.text.startswith(" ")

    def token_bytes(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not know, as padded vocabularies have."""
        if self._token_map is None:
            return self._decoded(token)
        piece = self._token_map[token] if token < len(self._token_map) else None
        if isinstance(piece, bytes):
            return piece.replace("\u2581".encode(), b" ")
        return b"".join(_BYTES.get(char) or char.encode() for char in piece or "")

    def token_text(self, token: int) -> str:
        """With replacement characters for what is no whole character."""
        return self.token_bytes(token).decode(errors="replace")

    def unique_name(self, token: int) -> str:
        """Its text, or ``bytes:\\xe2\\x96`` where that is not whole: no two are the same."""
        try:
            return self.token_bytes(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, as the detokenizer makes it, without half a character at
        the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(b"".join(map(self.token_bytes, tokens)))
        return text[1:] if self.trims_space and text.startswith(" ") else text

    def _decoded(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return str(self._tokenizer.decode([token])).encode()


def _gpt2_alphabet() -> dict[str, bytes]:
    """The character that stands for each byte in byte-level BPE, and the byte: printable
    ones for themselves, the others for those from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _gpt2_alphabet()
