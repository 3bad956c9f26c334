from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.errors import InvalidRequest
from router.schemas.conversation import MAX_SCHEMA_DEPTH, FunctionDefinition, Tool


def tool(parameters: Any) -> Tool:
    return msgspec.convert({"function": {"name": "get", "parameters": parameters}}, type=Tool)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ({"type": "object", "required": None}, {"type": "object", "properties": {}}),
        ({"properties": [], "required": []}, {"properties": {}}),
        ({"properties": None}, {"properties": {}}),
        ({"required": ["a"]}, {"required": ["a"]}),
        ({"properties": {}, "required": []}, {"properties": {}, "required": []}),
    ],
)
def test_what_clients_send_for_an_empty_schema_is_an_empty_schema(given: Any, kept: Any) -> None:
    assert tool(given).function.parameters == kept


@pytest.mark.parametrize(
    "parameters",
    [
        *({"properties": ["a"]}, {"properties": "a"}, {"required": 1}),
        *({"properties": {"a": {}}, "required": required} for required in ("a", [["a"]])),
    ],
)
def test_parameters_that_are_no_schema_are_an_error_that_names_the_tool(parameters: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool 'get'") as raised:
        tool(parameters)
    assert raised.value.param == "tools"


def test_parameters_nest_only_so_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_SCHEMA_DEPTH - 1):
        schema = {"not": schema}
    assert FunctionDefinition(name="get", parameters=schema).parameters == schema
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        FunctionDefinition(name="get", parameters=schema)
