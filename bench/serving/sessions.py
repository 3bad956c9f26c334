"""Recorded sessions of coding agents, as small files.

The structure of each request is complete, and so are short texts. A long text is an agent's own
work: only the lengths and digests of its pieces are stored, and words of the same lengths
replace it. Thus equal parts of two requests are equal here, and different parts differ in the
same place."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.measuring.workloads import WORDS

DIRECTORY = Path(__file__).parent / "sessions"
REASONING_KEY = "recorded"
"""The `--reasoning-key` with which their reasoning is sealed."""
_TEXT, _PART = "$text", "$part"
_SHORT_CHARS = 120
"""Texts up to this length stay as they are."""
_PIECE_CHARS = 1500
_PART_CHARS = 60
"""Values that are longer in JSON, and occur more than once, are written once."""
_VERBATIM = ("arguments", "encrypted_content", "signature", "pattern")
"""Fields whose content has a syntax."""
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_HEX = re.compile(r"\b[0-9a-f]{32,}\b")


class Request(NamedTuple):
    """One request of a session."""

    line: str
    """The conversation that it belongs to: main, a sub-agent's, or another."""
    path: str
    body: dict[str, Any]


def names() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.json"))


def read(name: str) -> list[Request]:
    """Return the requests of the session ``name``, in their order."""
    file = json.loads((DIRECTORY / f"{name}.json").read_text())
    parts: list[Any] = []
    for part in file["parts"]:
        parts.append(_expand(part, parts))
    return [Request(line, path, _expand(body, parts)) for line, path, body in file["requests"]]


def with_titles(requests: Sequence[Request], every: int = 5) -> list[Request]:
    """Return ``requests`` with a title request after each ``every``: without tools, on the first
    question. Agents in a terminal request titles; in scripted use, only opencode does."""
    titled = []
    for number, request in enumerate(requests, 1):
        titled.append(request)
        if number % every == 0:
            first = requests[0].body
            field = "input" if "input" in first else "messages"
            question = next(m for m in reversed(first[field]) if m["role"] == "user")
            body = {field: [question], "model": first["model"], "stream": True}
            if request.path == "/v1/messages":
                body |= {"system": "Give a title.", "max_tokens": first["max_tokens"]}
            titled.append(Request("title", request.path, body))
    return titled


def write(name: str, requests: Sequence[Request], hidden: dict[str, str]) -> None:
    """Write the session ``name``. ``hidden`` replaces names of this machine, such as paths."""
    bodies = [_cut(each.body, hidden) for each in requests]
    counts: Counter[str] = Counter()
    for body in bodies:
        _count(body, counts)
    shared = {text for text, count in counts.items() if count > 1 and len(text) > _PART_CHARS}
    parts: list[Any] = []
    places: dict[str, int] = {}
    packed = [
        [each.line, each.path, {k: _pack(v, shared, parts, places) for k, v in body.items()}]
        for each, body in zip(requests, bodies, strict=True)
    ]
    lines = [",\n".join(map(_json, each)) for each in (parts, packed)]
    DIRECTORY.mkdir(exist_ok=True)
    text = f'{{"parts": [\n{lines[0]}\n],\n"requests": [\n{lines[1]}\n]}}\n'
    (DIRECTORY / f"{name}.json").write_text(text)


def _cut(value: Any, hidden: dict[str, str], field: str = "") -> Any:
    """Return ``value`` without its long texts."""
    if isinstance(value, dict):
        return {key: _cut(each, hidden, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, hidden) for each in value]
    if not isinstance(value, str):
        return value
    for old, new in hidden.items():
        value = value.replace(old, new)
    if field not in _VERBATIM:
        value = _HEX.sub(lambda found: _digest(found[0], 32), _UUID.sub(_other_uuid, value))
    if len(value) <= _SHORT_CHARS or field in _VERBATIM:
        return value
    return {_TEXT: " ".join(f"{_digest(piece)}:{len(piece)}" for piece in _pieces(value))}


def _pieces(text: str) -> list[str]:
    """Return ``text`` in pieces of whole lines."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if pieces[-1] and len(pieces[-1]) + len(line) > _PIECE_CHARS:
            pieces.append("")
        pieces[-1] += line
    return pieces


def _expand(value: Any, parts: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_expand(each, parts) for each in value]
    if not isinstance(value, dict):
        return value
    if _PART in value:
        return parts[value[_PART]]
    if _TEXT in value:
        return "".join(_words(*piece.split(":")) for piece in value[_TEXT].split())
    return {key: _expand(each, parts) for key, each in value.items()}


def _words(digest: str, chars: str) -> str:
    """Return words, ``chars`` characters in total."""
    rng = random.Random(digest)
    text = f"{digest} "
    while len(text) < int(chars):
        text += rng.choice(WORDS) + (" " if rng.random() < 0.9 else "\n")
    return text[: int(chars)]


def _count(value: Any, counts: Counter[str]) -> None:
    if isinstance(value, dict | list):
        text = _json(value)
        counts[text] += 1
        if counts[text] == 1:  # values inside a shared part are written once with it
            for each in value.values() if isinstance(value, dict) else value:
                _count(each, counts)


def _pack(value: Any, shared: set[str], parts: list[Any], places: dict[str, int]) -> Any:
    """Return ``value`` with ``shared`` values replaced by references to ``parts``."""
    if not isinstance(value, dict | list):
        return value
    text = _json(value)
    if text in places:
        return {_PART: places[text]}
    if isinstance(value, list):
        packed: Any = [_pack(each, shared, parts, places) for each in value]
    else:
        packed = {key: _pack(each, shared, parts, places) for key, each in value.items()}
    if text not in shared:
        return packed
    places[text] = len(parts)
    parts.append(packed)
    return {_PART: places[text]}


def _other_uuid(found: re.Match[str]) -> str:
    return f"00000000-0000-4000-8000-{_digest(found[0], 12)}"


def _digest(text: str, chars: int = 8) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:chars]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
