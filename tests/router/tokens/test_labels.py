"""Labels of one token, and where answers begin, in templates of several families."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from router.errors import InvalidRequest
from router.schemas.conversation import ChatMessage
from router.tokens.labels import LETTERS, find_labels
from router.tokens.rendering import Renderer
from tests.router.chat_tokenizer import CONTROL, write_chat_tokenizer
from tests.router.tiny_tokenizer import sentencepiece, write_tokenizer

MESSAGES = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
)
HEADER = MESSAGES + "{{ '<|im_start|>assistant\n' }}"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}"
QWEN3 = HEADER + SWITCH + "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
OPENS = HEADER + "{{ '<think>\n' }}"
GEMMA4 = MESSAGES + "{{ '<|im_start|>model\n' }}"
GEMMA4_LARGE = GEMMA4 + SWITCH + "{{ '<|channel>thought\n<channel|>' }}{% endif %}"
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}"
    "{% endfor %}{{ '<|start|>assistant' }}"
)
THINK, CHANNEL = ("<think>", "</think>"), ("<|channel>", "<channel|>")
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
EMPTY_THOUGHT, EMPTY_CHANNEL = "<think>\n\n</think>\n\n", "<|channel>thought\n<channel|>"


def renderer(path: Path, template: str, *markers: str, reasoning: str = "auto") -> Renderer:
    write_chat_tokenizer(path, template, markers)
    return asyncio.run(
        Renderer.load(
            path,
            tokenizer_options={},
            chat_template=None,
            template_args={},
            reasoning_parser=reasoning,
        )
    )


def around(found: Renderer, text: str = "state MARK") -> tuple[str, str]:
    prompt, ending = found.render_around(
        "MARK", [ChatMessage("user", text)], {"enable_thinking": False}
    )
    return found.decode(prompt.token_ids), ending


@pytest.mark.parametrize(
    ("template", "markers", "reasoning", "ending"),
    [
        (HEADER, (), "auto", "<|im_end|>\n<|im_start|>assistant\n"),
        (QWEN3, THINK, "auto", "<|im_end|>\n<|im_start|>assistant\n" + EMPTY_THOUGHT),
        (OPENS, THINK, "auto", "<|im_end|>\n<|im_start|>assistant\n" + EMPTY_THOUGHT),
        (HEADER, THINK, "auto", "<|im_end|>\n<|im_start|>assistant\n" + EMPTY_THOUGHT),
        (HEADER + "{{ '<think>' }}", THINK, "auto", "assistant\n<think></think>"),
        (HEADER + "{{ '</think>' }}", THINK, "auto", "assistant\n</think>"),
        (GEMMA4, CHANNEL, "gemma4", "<|im_start|>model\n" + EMPTY_CHANNEL),
        (GEMMA4_LARGE, CHANNEL, "gemma4", "<|im_start|>model\n" + EMPTY_CHANNEL),
        (HARMONY, HARMONY_TOKENS, "auto", "<|start|>assistant<|channel|>final<|message|>"),
    ],
    ids="plain qwen3 opens forgets opens-without-line closes gemma4 gemma4-large gpt-oss".split(),
)
def test_answers_begin_after_the_reasoning_that_the_family_writes_when_it_does_not_reason(
    tmp_path: Path, template: str, markers: tuple[str, ...], reasoning: str, ending: str
) -> None:
    found = renderer(tmp_path, template, *markers, reasoning=reasoning)
    before, after = around(found)
    assert before.endswith("state ") and after.endswith(ending) and after.count(ending) == 1
    labels = found.labels(after)
    assert [label.text for label in labels.letters] == list(LETTERS)
    assert [label.text for label in labels.digits] == list("0123456789")
    assert labels.yes_no == ()  # three bytes each
    whole = found.encode_ending("Q", after)
    for label in labels.letters:
        assert found.encode_ending("Q", after + label.text) == [*whole, label.token_id]


def test_text_of_clients_stays_text_beside_the_template(tmp_path: Path) -> None:
    found = renderer(tmp_path, QWEN3, *THINK)
    _, ending = around(found)
    tokens = found.encode_ending("<|im_end|>", ending)
    control = found.encode(CONTROL[1], add_special_tokens=False)
    assert tokens.count(control[0]) == 1  # the template's own
    assert found.decode(tokens).startswith("<|im_end|><|im_end|>")


def encoder(tokenizer: Any) -> Any:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def test_labels_that_become_the_same_token_are_one_label(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    tokenizer.normalizer = normalizers.Lowercase()
    found = find_labels(lambda text: tokenizer.encode(text).ids, "x:", after_space=False)
    assert len(found.letters) == 26
    assert len({label.token_id for label in found.letters}) == 26


def test_a_label_that_merges_with_the_text_before_it_is_none(tmp_path: Path) -> None:
    found = find_labels(encoder(sentencepiece(tmp_path)), "a", after_space=False)
    assert "b" not in [label.text for label in found.letters]  # "ab" is one token
    assert len(found.letters) >= 26


def test_words_after_a_space_are_labels_where_the_template_ends_with_a_word() -> None:
    vocabulary = {"x:": 1, " A": 2, "A": 3, " B": 4, "B": 5, " Yes": 6, " No": 7, " 0": 8, " 2": 9}

    def encode(text: str) -> list[int]:
        found = []
        while text:
            piece = next(p for n in range(len(text), 0, -1) if (p := text[:n]) in vocabulary)
            found.append(vocabulary[piece])
            text = text[len(piece) :]
        return found

    def lenient(text: str) -> list[int]:
        try:
            return encode(text)
        except StopIteration:
            return [0, 0, 0]

    found = find_labels(lenient, "x:", after_space=True)
    assert [tuple(label) for label in found.letters] == [("A", 2), ("B", 4)]
    assert [tuple(label) for label in found.yes_no] == [("Yes", 6), ("No", 7)]
    assert [tuple(label) for label in found.digits] == [("0", 8)]  # 1 is missing
    assert found.for_levels(2) is found.letters
    close = find_labels(lenient, "x:", after_space=False)
    assert [tuple(label) for label in close.letters] == [("A", 3), ("B", 5)]


def test_the_tokenizer_is_asked_once_for_each_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = renderer(tmp_path, HEADER)
    _, ending = around(found)
    first = found.labels(ending)
    monkeypatch.setattr(found, "_encode_rendered", lambda *_: pytest.fail("asked again"))
    assert found.labels(ending) is first


def test_a_template_that_hides_the_last_message_is_refused(tmp_path: Path) -> None:
    found = renderer(tmp_path, "{{ '<|im_start|>assistant\n' }}")
    with pytest.raises(InvalidRequest, match="last message"):
        around(found)


def test_this_tokenizer_is_of_bytes(tmp_path: Path) -> None:
    """The tests above need it: no letter is part of a merge that begins an answer."""
    tokenizer: Tokenizer = write_tokenizer(tmp_path)
    assert all(len(tokenizer.encode(letter).ids) == 1 for letter in LETTERS)
