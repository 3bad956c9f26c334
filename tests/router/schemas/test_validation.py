"""Errors of fields, made from msgspec's messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import InvalidValue
from router.schemas.body import parse_body
from router.schemas.requests import ChatRequest


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"bad": 5}, "Invalid key in 'logit_bias': Expected 'int', got 'str'."),
        ({"-1": 5}, "Invalid key in 'logit_bias': Expected 'int' >= 0."),
        ({"1": "bad"}, "Invalid 'logit_bias': Expected 'float', got 'str'."),
    ],
)
def test_an_invalid_key_is_told_from_an_invalid_value(biases: Any, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": biases}
    with pytest.raises(InvalidValue) as raised:
        parse_body(json.dumps(body).encode(), ChatRequest)
    assert (raised.value.message, raised.value.param) == (message, "logit_bias")
