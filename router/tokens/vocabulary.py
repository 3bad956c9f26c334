"""The bytes and text of tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from router.tokens.decoders import ByteDecoder, LineDecoder, TokenDecoder

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The bytes of each token of one tokenizer.

    They come from the token map of mlx-lm's streaming detokenizer, if it has one: byte-level BPE
    has text in GPT-2's byte alphabet, SentencePiece has bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        detokenizer = tokenizer.detokenizer
        self._tokenizer = tokenizer
        self._token_map: list[str | bytes | None] | None = getattr(detokenizer, "tokenmap", None)
        for token in tokenizer.encode(" a", add_special_tokens=False):
            detokenizer.add_token(token)
        detokenizer.finalize()
        first = next(iter(self._token_map or ()), None)
        drops_space = not detokenizer.text.startswith(" ")
        self.trims_space = drops_space and not isinstance(first, str)
        """Whether the tokenizer adds a space at the start of a text, as SentencePiece does.
        mlx-lm's detokenizer of byte-level BPE drops one too, which belongs to the text."""
        self._known: dict[int, bytes] = {}

    def decoder(self) -> TokenDecoder:
        """Return a decoder of a text, for one thread."""
        if self._token_map is None:
            return LineDecoder(self._tokenizer.detokenizer)
        return self.byte_decoder(self.trims_space)

    def byte_decoder(self, trims_space: bool) -> ByteDecoder:
        """Return a decoder that treats all tokens as bytes, as log-probabilities do."""
        return ByteDecoder(self.token_bytes, trims_space)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of ``token``; empty for an id of a padded vocabulary, which the
        tokenizer does not know."""
        found = self._known.get(token)
        if found is None:
            found = self._bytes_of(token)
            if found:  # do not cache ids that clients make up
                self._known[token] = found
        return found

    def _bytes_of(self, token: int) -> bytes:
        if self._token_map is None:
            return self._decoded(token)
        piece = self._token_map[token] if token < len(self._token_map) else None
        if isinstance(piece, bytes):
            return piece.replace("\u2581".encode(), b" ")
        return b"".join(_BYTES.get(char) or char.encode() for char in piece or "")

    def token_text(self, token: int) -> str:
        """Return the text of ``token``, with replacement characters for incomplete characters."""
        return self.token_bytes(token).decode(errors="replace")

    def unique_name(self, token: int) -> str:
        """Return the text of ``token``, or ``bytes:\\xe2\\x96`` if it contains an incomplete
        character. No two tokens have the same name."""
        try:
            return self.token_bytes(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, without an incomplete character at the end. A leading
        space is kept unless a SentencePiece-like tokenizer added it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(b"".join(map(self.token_bytes, tokens)))
        return text[1:] if self.trims_space and text.startswith(" ") else text

    def last_text(self, tokens: Sequence[int]) -> list[int]:
        """Return the last of ``tokens`` that has text, or nothing. After decoding it, a decoder
        keeps the leading space of the following text. The decoder must not hold back part of a
        character or a single space, which it would return with the following text."""
        for token in reversed(tokens):
            text = self.token_text(token)
            if text.strip(" ") and not text.endswith("\ufffd"):
                return [token]
        return []

    def _decoded(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return str(self._tokenizer.decode([token])).encode()


def _gpt2_alphabet() -> dict[str, bytes]:
    """Return the characters of byte-level BPE and the byte of each. Printable bytes stand for
    themselves, the others have the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTES = _gpt2_alphabet()
