"""Texts of embedding models that are too long."""

from __future__ import annotations

from typing import Any, cast

from router.tokens.rendering import Renderer
from router.tokens.text_tokens import text_tokens


class Counted(list[int]):
    """Tokens that count how often a part of them is copied."""

    copies = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.copies += isinstance(index, slice)
        return super().__getitem__(index)


class OddRenderer:
    """Its special tokens change the text's own."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return Counted([7, *[1] * len(text), 8]) if add_special_tokens else [2] * len(text)


def test_a_long_text_is_not_compared_at_each_of_its_tokens() -> None:
    found = text_tokens(cast(Renderer, OddRenderer()), "x" * 1000, 10, truncate=True)
    assert found == [7, *[1] * 9]
    assert Counted.copies < 10
