"""Which way of writing calls and of reasoning a tokenizer has, by its template and its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.tokens.parsing.formats import REASONING, detect_format
from router.tokens.parsing.syntaxes import detected_syntax
from router.tokens.reply_parser import ReplyDelta
from tests.router.chat_tokenizer import TEMPLATE, chat_tokenizer
from tests.router.tokens.parsing.test_marked import read

HERE = Path(__file__).parents[1] / "templates"


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        *((name, "deepseek_v3") for name in ("deepseek-r1", "deepseek-r1-llama")),
        *((name, "mistral") for name in ("devstral", "mistral-small-3.2")),
        *((name, "") for name in ("gemma-3", "llama-3")),
        *(("deepseek-v3.1", "deepseek_v31"), ("glm-4.6", "glm47"), ("granite-3.3", "granite")),
        *(("kimi-k2", "kimi_k2"), ("qwen3", "json_tools"), ("qwen3-coder", "qwen3_coder")),
    ],
)
def test_a_published_template_has_its_parser(tmp_path: Path, name: str, parser: str) -> None:
    template = (HERE / f"{name}.jinja").read_text(encoding="utf-8")
    assert detected_syntax(chat_tokenizer(tmp_path, template)) == parser


@pytest.mark.parametrize(
    ("template", "tokens", "parser"),
    [
        ('{%- set dsml = "｜DSML｜" %}<{{ dsml }}function_calls>', (), "deepseek_v32"),
        ("", ("｜DSML｜",), "deepseek_v32"),
        ("'<｜DSML｜tool_calls>'", (), "deepseek_v4"),
        ("respond with <TOOLCALL>[...]</TOOLCALL>", (), "nemotron"),
        ("'<tool_calls>[' ~ calls ~ ']</tool_calls>'", (), "jamba"),
        ("'<seed:tool_call>'", (), "seed_oss"),
        ("']<]minimax[>[' ~ '<tool_call>' ~ tool_call.name", (), "minimax_m3"),
        ("{{ messages }}", ("<|tool_call|>", "<|/tool_call|>"), "phi4_mini"),
        ("within <tool_call></tool_call> XML tags", (), "json_tools"),
        ("{{ messages }}", ("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
    ],
)
def test_formats_are_told_by_the_template_or_by_tokens(
    tmp_path: Path, template: str, tokens: tuple[str, ...], parser: str
) -> None:
    assert detected_syntax(chat_tokenizer(tmp_path, template, *tokens)) == parser


def test_of_several_templates_the_one_for_tools_counts(tmp_path: Path) -> None:
    """As with Hermes and Command R."""
    both = [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": TEMPLATE},
    ]
    tokenizer = chat_tokenizer(tmp_path, both)
    assert isinstance(tokenizer.chat_template, dict)
    assert detected_syntax(tokenizer) == "json_tools"


def test_a_reply_of_minimax_m3_may_begin_with_the_end_of_reasoning(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{{ messages }}", "<mm:think>", "</mm:think>")
    format = detect_format(tokenizer, reasoning="auto", tools="auto")
    assert format.think == REASONING["minimax_m3"]
    assert read("</mm:think>Hi", format) == ReplyDelta("", "Hi")
    assert read("<mm:think>Hm</mm:think>Hi", format) == ReplyDelta("Hm", "Hi")


def test_reasoning_is_found_where_its_markers_are_not_tokens(tmp_path: Path) -> None:
    """As with Llama Nemotron, whose template takes it out of earlier replies."""
    template = "{{ messages[0].content.split('</think>')[-1] }}"
    format = detect_format(chat_tokenizer(tmp_path, template), reasoning="auto", tools="auto")
    assert format.think == REASONING["think"]
    format = detect_format(chat_tokenizer(tmp_path, template), reasoning="none", tools="auto")
    assert format.think is None
