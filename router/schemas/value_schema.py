"""The types of values in a JSON schema, for parsers of text without types."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
"""By the Python type of a value other than a string."""


class ValueSchema:
    """A schema with its alternatives (``anyOf``, ``oneOf``, ``allOf``). References are ignored."""

    def __init__(self, schema: Any) -> None:
        self._schemas = list(with_alternatives(schema))
        self._members: dict[str, ValueSchema] = {}

    @cached_property
    def types(self) -> frozenset[str]:
        """The types it specifies, by ``type`` or by values; empty if it specifies none."""
        return frozenset(name for each in self._schemas for name in _named_types(each))

    @cached_property
    def items(self) -> ValueSchema:
        """The schema of an array's items."""
        return ValueSchema(self._first("items"))

    def member(self, key: str) -> ValueSchema:
        """Return the schema of an object's member."""
        if key not in self._properties:
            return self._other
        if key not in self._members:
            self._members[key] = ValueSchema(self._properties[key])
        return self._members[key]

    def is_free(self, key: str) -> bool:
        """Return whether an object may have the member ``key``, without a schema of its own."""
        others = (each.get("additionalProperties") for each in self._schemas)
        free = not self._properties or any(each not in (None, False) for each in others)
        return free and key not in self._properties

    def names_type_of(self, value: Any) -> bool:
        """Return whether it specifies the type of ``value``, which is not a string."""
        name = _TYPES.get(type(value))
        return name in self.types or (name == "integer" and "number" in self.types)

    @cached_property
    def _properties(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in reversed(self._schemas):
            if isinstance(properties := each.get("properties"), dict):
                found |= properties
        return found

    @cached_property
    def _other(self) -> ValueSchema:
        return ValueSchema(self._first("additionalProperties"))

    def _first(self, keyword: str) -> Any:
        return next((each[keyword] for each in self._schemas if keyword in each), None)


def with_alternatives(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield ``schema`` and its alternatives at any depth; nothing if it is no object."""
    if isinstance(schema, dict):
        yield schema
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(others := schema.get(keyword), list):
                for each in others:
                    yield from with_alternatives(each)


def _named_types(schema: dict[str, Any]) -> Iterator[str]:
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    yield from (name for name in names if isinstance(name, str))
    if named is None:
        implied = (("object", "properties"), ("array", "items"))
        yield from (name for name, keyword in implied if keyword in schema)
    values = schema.get("enum")
    for value in values if isinstance(values, list) else []:
        yield _TYPES.get(type(value), "string")
    if "const" in schema:
        yield _TYPES.get(type(schema["const"]), "string")
