"""How models write reasoning, calls and answers: in Qwen3's format and in that of gpt-oss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.serving.models import template


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Step(NamedTuple):
    """A reply of the model: calls, or a text."""

    calls: tuple[Call, ...] = ()
    text: str = ""
    reasoning: str = ""
    endless: bool = False
    """Whether the text is said again and again."""


class Format:
    """Qwen3's: JSON between markers, several calls in a reply."""

    name = "qwen3"
    parallel = True
    special_tokens: Sequence[str] = ("<|im_start|>", "<|im_end|>")
    markers: Sequence[str] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    end = "<|im_end|>"
    template = template("qwen3")

    def write(self, step: Step) -> str:
        calls = (
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in step.calls
        )
        thought = f"<think>\n{step.reasoning}\n</think>\n\n" if step.reasoning else ""
        return thought + "\n".join([*([step.text] if step.text else []), *calls])

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Return ``steps`` as a model of this format makes them."""
        if self.parallel:
            return list(steps)
        single = [step._replace(calls=(call,)) for step in steps for call in step.calls]
        return single + [step for step in steps if not step.calls]


class Harmony(Format):
    """That of gpt-oss: messages in channels, one call in a reply.

    https://developers.openai.com/cookbook/articles/openai-harmony
    """

    name = "gpt-oss"
    parallel = False
    special_tokens = (
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        *("<|call|>", "<|return|>", "<|constrain|>"),
    )
    markers = ()
    end = "<|return|>"
    template = template("gpt_oss")

    def write(self, step: Step) -> str:
        messages = []
        if step.reasoning:
            messages.append(f"<|channel|>analysis<|message|>{step.reasoning}")
        for name, arguments in step.calls:
            header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
            messages.append(f"{header}<|message|>{json.dumps(arguments)}")
        if step.text:
            messages.append(f"<|channel|>final<|message|>{step.text}")
        return "<|end|><|start|>assistant".join(messages)


FORMATS = (Format(), Harmony())
