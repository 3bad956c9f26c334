from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokens.decoders import LineDecoder
from router.tokens.detokenizer import IncrementalDetokenizer, StopScanner
from router.tokens.vocabulary import Vocabulary
from tests.router.tiny_tokenizer import sentencepiece


def scanned(pieces: list[str], stops: list[str]) -> str:
    scanner = StopScanner(stops)
    shown = "".join(scanner.feed(piece) for piece in pieces)
    return shown if scanner.match is not None else shown + scanner.flush()


def cut_by_hand(text: str, stops: list[str]) -> str:
    """Return the text before the stop string that is complete first, found by character."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@settings(deadline=None, derandomize=True)
@given(
    st.text("abc🌍日", max_size=12),
    st.lists(st.text("abc🌍日", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_cuts_do_not_depend_on_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert scanned(pieces, stops) == cut_by_hand(text, stops)


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("the E") == "the "
    assert scanner.feed("N") == ""
    assert scanner.feed("gine E") == "ENgine "
    assert scanner.flush() == "E"


@pytest.mark.parametrize("text", ["wait 🌍🏽 STOP", "日本語STOP日本", "a\n\nb STOPST", "é́STOP"])
def test_a_stop_string_at_every_offset_neither_leaks_nor_splits_a_character(
    text: str, vocabulary: Vocabulary, tokenizer: Any
) -> None:
    ids = tokenizer.encode(text).ids
    for start in range(len(text)):
        for end in range(start + 1, min(start + 5, len(text)) + 1):
            stop = text[start:end]
            stream = IncrementalDetokenizer(vocabulary.decoder(), [stop])
            shown = read(stream, ids)
            assert shown == cut_by_hand(text, [stop])
            assert "\ufffd" not in shown
            assert stream.stopped


def test_the_end_shows_what_was_held_back_unless_it_completes_a_stop_string(
    vocabulary: Vocabulary, tokenizer: Any
) -> None:
    ids, half = tokenizer.encode("a lo").ids, tokenizer.encode("日").ids[:2]
    held = IncrementalDetokenizer(vocabulary.decoder(), ["lots"])
    assert ("".join(map(held.feed, ids)), held.finish()) == ("a ", "lo")
    broken = IncrementalDetokenizer(vocabulary.decoder(), ["lo\ufffd"])
    assert ("".join(map(broken.feed, [*ids, *half])), broken.finish()) == ("a ", "")
    assert broken.stopped


def test_half_a_character_waits_for_its_other_half(vocabulary: Vocabulary, tokenizer: Any) -> None:
    ids = tokenizer.encode("é🌍").ids
    assert len(ids) == 6
    stream = IncrementalDetokenizer(vocabulary.decoder())
    assert [stream.feed(token) for token in ids] == ["", "é", "", "", "", "🌍"]


def read(stream: IncrementalDetokenizer, ids: list[int]) -> str:
    """Return the text of an output that ends with ``ids``."""
    return "".join(map(stream.feed, ids)) + stream.finish()


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(sentencepiece(tmp_path_factory.mktemp("spm")))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_text_is_its_tokens_bytes(
    kind: str, vocabulary: Vocabulary, spm: Vocabulary, data: st.DataObject
) -> None:
    known, tokens = vocabulary, st.integers(0, 300)
    if kind == "spm":
        known, tokens = spm, st.one_of(st.integers(250, 265), st.integers(3, 300))
    ids = data.draw(st.lists(tokens, max_size=12))
    stream = IncrementalDetokenizer(known.decoder())
    whole = b"".join(map(known.token_bytes, ids)).decode(errors="replace")
    assert read(stream, ids) == (whole.removeprefix(" ") if kind == "spm" else whole)


def test_a_text_keeps_its_indentation(loaded: Any, vocabulary: Vocabulary) -> None:
    """mlx-lm's detokenizer drops a space, which is part of the text with byte-level BPE."""
    for text in (" one", "    return x"):
        ids = loaded.encode(text, add_special_tokens=False)
        assert read(IncrementalDetokenizer(vocabulary.decoder()), ids) == text


@pytest.mark.parametrize("text", ["é 🌍🏽 日本, and  words.", "no space\n\n  x"])
def test_text_is_that_of_mlx_lm(text: str, loaded: Any, vocabulary: Vocabulary) -> None:
    theirs = loaded.detokenizer
    ids = loaded.encode(text, add_special_tokens=False)
    for token in ids:
        theirs.add_token(token)
    theirs.finalize()
    assert read(IncrementalDetokenizer(vocabulary.decoder()), ids) == theirs.text


@pytest.mark.parametrize("byte", [b" ", b"\x80", b"\xf0"])
def test_a_repeated_token_is_shown_at_once(byte: bytes, vocabulary: Vocabulary) -> None:
    """mlx-lm's detokenizer keeps single spaces and what is no character back, and goes through all
    of it with each token."""
    (token,) = (each for each in range(300) if vocabulary.token_bytes(each) == byte)
    stream = IncrementalDetokenizer(vocabulary.decoder())
    shown = [stream.feed(token) for _ in range(100)]
    assert all(len(piece) == 1 for piece in shown[2:])


@pytest.mark.parametrize("text", ["日本語 🌍🏽 é, and words . " * 40, "a line\n" * 60, "🌍" * 100])
def test_a_line_is_not_decoded_from_its_beginning(
    text: str, loaded: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

    decoded: list[int] = []
    inner = loaded._tokenizer
    decode = inner.decode

    def counted(ids: list[int]) -> Any:
        decoded.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(inner, "decode", counted)
    stream = IncrementalDetokenizer(LineDecoder(NaiveStreamingDetokenizer(inner)))
    pieces = [stream.feed(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert max(decoded) <= 16 + 65


@pytest.mark.parametrize(
    ("min_tokens", "shown", "counted"), [(0, "a", 2), (3, "a.b", 4)], ids=("none", "three")
)
def test_a_stop_string_is_found_after_min_tokens_and_ends_the_count(
    vocabulary: Vocabulary, tokenizer: Any, min_tokens: int, shown: str, counted: int
) -> None:
    stream = IncrementalDetokenizer(vocabulary.decoder(), ["."], min_tokens=min_tokens)
    assert "".join(map(stream.feed, tokenizer.encode("a.b.c").ids)) == shown
    assert stream.num_tokens == counted
