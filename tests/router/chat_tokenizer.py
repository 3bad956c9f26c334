"""A tokenizer and a template like those of models that reason and call tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.router.tiny_tokenizer import write_tokenizer

CONTROL = ("<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
  {%- if m.role == 'function' %}{{ raise_exception('no function role here') }}{% endif %}
{%- endfor %}
{%- for m in messages %}
  {{- '<|im_start|>' ~ m.role ~ '\n' }}
  {%- if m.role == 'tool' %}{{ '[' ~ m.name ~ '] ' }}{% endif %}
  {%- if m.reasoning_content is defined and (loop.index0 > last.user or keep_reasoning) %}
    {{- '<think>\n' ~ m.reasoning_content.strip() ~ '\n</think>\n\n' }}
  {%- endif %}
  {{- m.content.strip() }}
  {%- for tool_call in m.tool_calls or [] %}
    {%- set tool_call = tool_call.function %}
    {%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
    {{- '<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
    {{- tool_call.arguments | tojson }}
    {{- '}\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if explode %}{{ raise_exception('boom') }}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- elif open_thinking %}{{ '<think>\n' }}{% endif %}
{{- '(effort ' ~ reasoning_effort ~ ')' if reasoning_effort else '' }}
"""


def write_chat_tokenizer(
    directory: Path, template: str = TEMPLATE, markers: tuple[str, ...] = MARKERS
) -> Tokenizer:
    """Write the files of `write_tokenizer`, with control tokens and markers of replies."""
    tokenizer = write_tokenizer(directory)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in markers])
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"chat_template": template, "eos_token": "<|im_end|>"}
    path.write_text(json.dumps(config))
    return tokenizer


def chat_tokenizer(directory: Path, template: Any = TEMPLATE, *markers: str) -> Any:
    """Return a tokenizer that is written to ``directory``, as mlx-lm loads it."""
    from mlx_lm import tokenizer_utils

    write_chat_tokenizer(directory, template, markers)
    return tokenizer_utils.load(directory)
