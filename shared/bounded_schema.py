"""JSON schemas with bounds for the numbers that they leave free.

A small model may write digits without end. llguidance has no limit for digits, but takes a number
within limits, and a multiple of a small one, only with as many digits as it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_VALUES = ("items", "additionalProperties", "additionalItems", "not")
"""The keywords that have schemas as members, as items, and as their value."""

_MAX = 10**18
_STEP = 1e-9
"""Numbers without limits have up to 18 digits before the point and 9 after it, and no exponent."""
_NAME = r"\S"
"""The names of the members of an object without a schema: a small model may write member after
member whose names are blank."""
_OF_MEMBERS = {"properties", "additionalProperties", "patternProperties", "propertyNames",
               "minProperties", "maxProperties", "unevaluatedProperties", "dependentRequired",
               "dependentSchemas", "dependencies"}  # fmt: skip
_COMBINED = ("anyOf", "oneOf", "allOf", "$ref")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}


def bounded(schema: Any) -> Any:
    """Return ``schema`` with bounds for numbers. Numbers that it names stay possible: if one is
    larger than the bounds, there are none."""
    try:
        named = list(_numbers(schema))
        if any(abs(each) >= _MAX for each in named):
            return schema
        return _Bounds(schema, any(round(each, 6) != each for each in named)).root()
    except RecursionError:  # llguidance is likely to refuse it
        return schema


def schemas_in(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that are parts of ``schema``, with their JSON pointers."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _MAPS and isinstance(value, dict):
            for name, inner in value.items():
                yield f"/{key}/{name.replace('~', '~0').replace('/', '~1')}", inner
        elif key in (*_LISTS, *_VALUES) and isinstance(value, list):
            yield from ((f"/{key}/{index}", inner) for index, inner in enumerate(value))
        elif key in _VALUES:
            yield f"/{key}", value


def _all(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield ``schema`` and the schemas in it."""
    if isinstance(schema, dict):
        yield schema
        for _, each in schemas_in(schema):
            yield from _all(each)


def _numbers(schema: Any) -> Iterator[float]:
    """Yield the numbers that ``schema`` names."""
    for each in _all(schema):
        values = [each.get(key) for key in (*BOUNDS, "const")]
        values += each["enum"] if isinstance(each.get("enum"), list) else []
        for value in values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value


class _Bounds:
    """Adds bounds to the schemas in ``schema``; ``fine``: not to the digits after the point."""

    def __init__(self, schema: Any, fine: bool) -> None:
        self._schema = schema
        self._limits = {"minimum": -_MAX, "maximum": _MAX} | ({} if fine else {"multipleOf": _STEP})
        self._any: dict[str, Any] | None = None  # a reference to the schema of any value
        definitions = schema.get("$defs", {}) if isinstance(schema, dict) else None
        # llguidance cannot combine a recursive schema with others.
        if isinstance(definitions, dict) and not any(map(_is_combined, _all(schema))):
            self._name = "any"
            while self._name in definitions:
                self._name += "_"
            self._any = {"$ref": f"#/$defs/{self._name}"}
            self._others = {"patternProperties": {_NAME: self._any}, "additionalProperties": False}

    def root(self) -> Any:
        out = self._bounded(self._schema)
        if self._any is None or f'"{self._any["$ref"]}"' not in json.dumps(out):
            return out
        value = {**self._limits, "items": self._any, **self._others}
        return {**out, "$defs": {**out.get("$defs", {}), self._name: value}}

    def _bounded(self, schema: Any) -> Any:
        if schema is True and self._any is not None:
            return self._any
        if not isinstance(schema, dict):
            return schema
        out = {key: self._within(key, value) for key, value in schema.items()}
        if "enum" in out or "const" in out or any(key in out for key in _COMBINED):
            return out
        named = out.get("type", ["number", "object", "array"])
        kinds = named if isinstance(named, list) else [named]
        if "number" in kinds or "integer" in kinds:
            for side, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
                if other not in out:
                    out.setdefault(side, self._limits[side])
        if "number" in kinds and "multipleOf" in self._limits:
            out.setdefault("multipleOf", _STEP)
        if "array" in kinds and "prefixItems" not in out and self._any is not None:
            out.setdefault("items", self._any)
        if "object" in kinds and self._any is not None:
            if not _OF_MEMBERS & out.keys():
                out |= self._others
            out.setdefault("additionalProperties", self._any)
        return out

    def _within(self, key: str, value: Any) -> Any:
        """Return the ``value`` of a keyword."""
        if key in _MAPS and isinstance(value, dict):
            return {name: self._bounded(each) for name, each in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self._bounded(each) for each in value]
        return self._bounded(value) if key in _VALUES else value


def _is_combined(schema: dict[str, Any]) -> bool:
    """Return whether ``schema`` must hold together with others."""
    others = schema.keys() - _ANNOTATIONS - {"$defs", "definitions", "$schema"}
    return (
        "allOf" in others
        or "$id" in others
        or (len(others) > 1 and any(key in others for key in _COMBINED))
    )
