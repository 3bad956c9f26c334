"""The fields of a chat that say whether, and for how long, the model reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import InvalidValue
from router.schemas.body import parse_body
from router.schemas.requests import ChatRequest


def chat(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(json.dumps(body).encode(), ChatRequest)


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
THINK = {"thinking": {"type": "enabled"}}
SEVEN = {"thinking": {"type": "enabled", "budget_tokens": 7}}
NINE = {"reasoning": {"max_tokens": 9, "enabled": True}}


@pytest.mark.parametrize(
    ("fields", "args"),
    [
        (THINK, ON),
        ({"thinking": {"type": "adaptive"}}, ON),
        ({"thinking": {"type": "disabled", "clear_thinking": True}}, OFF),
        ({"thinking": {"type": "auto"}}, {}),
        ({"thinking": None}, {}),
        ({"thinking": True}, ON),
        ({"thinking": False}, OFF),
        (SEVEN, ON | {"thinking_budget": 7}),
        ({"thinking": {"type": "auto", "budget_tokens": 0}}, {"thinking_budget": 0}),
        (THINK | {"enable_thinking": False}, OFF),
        (THINK | {"reasoning_effort": "none"}, OFF),
        (THINK | {"chat_template_kwargs": OFF}, OFF),
        (SEVEN | {"thinking_budget": 9}, ON | {"thinking_budget": 9}),
        ({"reasoning": {}}, {}),
        ({"reasoning": {"enabled": True, "exclude": False}}, ON),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, OFF),
        ({"reasoning": {"effort": "none"}, "reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"max_tokens": 9}}, {"thinking_budget": 9}),
        (NINE | {"thinking": False, "thinking_budget": 7}, OFF | {"thinking_budget": 7}),
    ],
)
def test_thinking_goes_to_template_and_budget(fields: dict[str, Any], args: dict[str, Any]) -> None:
    request = chat(**fields)
    assert request.template_args == args
    assert request.max_thinking_tokens == args.get("thinking_budget")


@pytest.mark.parametrize(
    "value", ["on", {"type": "maybe"}, {}, {"type": "auto", "budget_tokens": -1}]
)
def test_an_unknown_way_of_thinking_is_named(value: Any) -> None:
    with pytest.raises(InvalidValue) as raised:
        chat(thinking=value)
    assert str(raised.value.param).startswith("thinking")
