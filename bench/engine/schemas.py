"""JSON schemas whose answers end: random ones, and some like those of clients."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_NAMES = "id name title city tags items price count kind note owner state from_to größe".split()
_WORDS = "low high red green open closed north south one two ja 未知".split()


@dataclass(frozen=True)
class Sizes:
    """The nesting depth, and the max number of properties, items and characters of a schema."""

    depth: int = 3
    properties: int = 4
    items: int = 3
    characters: int = 20


def generate(count: int, seed: int = 0, sizes: Sizes | None = None) -> list[Schema]:
    """Return ``count`` random schemas of objects; the same seed gives the same ones."""
    sizes = sizes or Sizes()
    return [_Generator(random.Random(f"{seed}/{i}"), sizes).root() for i in range(count)]


class _Generator:
    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        self._rng = rng
        self._sizes = sizes
        self._definitions: dict[str, Schema] = {}

    def root(self) -> Schema:
        schema = self._object(self._sizes.depth)
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        leaves = [self._string, self._integer, self._digits, self._fixed, self._plain]
        nested = [self._object, self._array, self._either, self._reference]
        if depth > 0 and self._rng.random() < 0.5:
            return self._rng.choice(nested)(depth - 1)
        return self._rng.choice(leaves)()

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_NAMES, self._rng.randint(1, self._sizes.properties))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "additionalProperties": False,
        }
        required = [name for name in names if self._rng.random() < 0.7]
        return schema | ({"required": required} if required else {})

    def _array(self, depth: int) -> Schema:
        if self._rng.random() < 0.2:
            first = [self._any(depth) for _ in range(self._rng.randint(1, 2))]
            exact = {"minItems": len(first), "maxItems": len(first)}
            return {"type": "array", "prefixItems": first, "items": False, **exact}
        least = self._rng.randint(0, 1)
        most = self._rng.randint(max(1, least), self._sizes.items)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": most}

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _string(self) -> Schema:
        kind = self._rng.randrange(4)
        if kind == 0:
            most = self._rng.randint(1, self._sizes.characters)
            return {"type": "string", "pattern": f"^[a-z][a-z0-9_]{{0,{most}}}$"}
        if kind == 1:
            return {"type": "string", "format": self._rng.choice(["date", "time", "uuid"])}
        least = self._rng.randint(0, 2)
        most = self._rng.randint(max(1, least), self._sizes.characters)
        return {"type": "string", "minLength": least, "maxLength": most}

    def _integer(self) -> Schema:
        least = self._rng.randint(-1000, 1000)
        most = least + self._rng.randint(0, 5000)
        return {"type": "integer", "minimum": least, "maximum": most}

    def _digits(self) -> Schema:
        decimals = self._rng.randint(0, 2)
        digits = "[0-9]{1,5}" + (f"[.][0-9]{{{decimals}}}" if decimals else "")
        return {"type": "string", "pattern": f"^-?{digits}$"}

    def _fixed(self) -> Schema:
        values: list[Any] = [*_WORDS, 0, -1, 2.5, True, None]
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(1, 5))}

    def _plain(self) -> Schema:
        return {"type": self._rng.choice(["boolean", "null"])}


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def _count(most: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Schema, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


COMMON: tuple[Schema, ...] = (
    _record(name=_text(30), age=_count(120), email=_optional(_text(30))),
    _record(sentiment={"enum": ["positive", "neutral", "negative"]}, score=_count(100)),
    _record(city=_text(30), unit={"enum": ["celsius", "fahrenheit"]}),
    _record(title=_text(40), date={"type": "string", "format": "date"}, people=_list(_text(20))),
    _record(steps=_list(_record(explanation=_text(40), output=_text(20))), answer=_text(20)),
    _record(query=_text(40), filters=_list(_record(field=_text(15), value=_text(15)), 2)),
    _record(street=_text(30), zip={"type": "string", "pattern": "^[0-9]{5}$"}, country=_text(20)),
    _record(sku={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, quantity=_count(99)),
    _record(labels=_list({"enum": ["bug", "feature", "question", "docs"]}, 4), body=_text(60)),
    _record(answer={"type": "boolean"}, reason=_text(60)),
    _record(id={"type": "string", "format": "uuid"}, status={"enum": ["todo", "done"]}),
    _record(dish=_text(30), ingredients=_list(_record(name=_text(20), grams=_count(999)), 4)),
    _record(x={"type": "integer"}, y={"type": "integer"}) | {"description": "a point"},
    _record(language={"const": "python"}, code=_text(80)),
    _record(rating={"type": "integer", "minimum": 1, "maximum": 5}, pros=_list(_text(20))),
    _record(kind={"enum": ["a"]}, next=_optional(_record(kind={"enum": ["b"]}))),
    {
        "anyOf": [
            _record(type={"const": "card"}, digits={"type": "string", "pattern": "^[0-9]{4}$"}),
            _record(type={"const": "cash"}),
        ]
    },
    {
        "$defs": {"node": _record(value=_count(9), children=_list({"$ref": "#/$defs/leaf"}, 2))}
        | {"leaf": _record(value=_count(9))},
        "$ref": "#/$defs/node",
    },
)
