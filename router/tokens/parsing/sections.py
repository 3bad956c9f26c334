"""Reading of the calls in one section of an answer, as they arrive."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import regex

from router.schemas.value_schema import ValueSchema
from router.tokens.parsing.calls import CallFormat
from router.tokens.parsing.json_reader import JsonReader, repaired
from router.tokens.parsing.tagged import TaggedArguments

_MAX_BEGINNING_CHARS = 2000
_NAME = r"(?P<name>[\w.:/@-]{1,256}?)"
_MEMBER = regex.compile(r'\s*+"(?P<key>[^"\\]{0,64}+)"\s*+:\s*+(?=(?P<value>\S))')
_TEXT = regex.compile(r'"(?P<text>(?:[^"\\]|\\.){0,256}+)"')
_OTHER_KEYS = ("id", "type")
_FENCES = r"(?:```(?:json|tool_call|tool_code)?+|<\|python_(?:tag|start|end)\|>)"
_BEFORE_OBJECT = regex.compile(rf"(?:\s*+{_FENCES})*+\s*+(?P<list>\[\s*+)?(?=\{{\s*+[\"}}])")
_JSON_END = ("```", "<|python_end|>", "}", "]")


class CallFragment(NamedTuple):
    """A part of a call."""

    name: str | None  # in the first part only
    arguments: str = ""
    id: str | None = None  # the model's own, in the first part
    is_last: bool = False


class _Arguments(Protocol):
    """Reads the arguments of one call."""

    out: list[str]
    complete: bool

    def feed(self, text: str) -> str | None:
        """Add ``text``. Return the text after the call, or None if it continues."""

    def finish(self, *, cut: bool) -> str:
        """End the call at the end of the answer, and return the text after it."""


class CallObject:
    """Reads a call that is a JSON object with a name and arguments. It is a call as soon as both
    the name of a tool and the start of arguments are there (`name`), or turns out to be none
    (`failed`). In ``plain`` JSON, other members are not those of a call."""

    def __init__(self, names: Collection[str], stops: Sequence[str], *, plain: bool) -> None:
        self._names, self._stops, self._plain = names, stops, plain
        self._buffer = ""
        self._found = ""  # the name
        self._depth = 0
        self._expected = "object"  # or: member, value, after
        self._key = ""
        self._reader: JsonReader | None = None  # of the open value
        self._streams = False  # whether the open value are the arguments
        self._collected: list[str] = []  # of the open value
        self._arguments: str | None = None  # complete, before the name
        self._others = False  # whether there were other members
        self.name: str | None = None
        self.id: str | None = None
        self.failed = self.complete = False
        self.is_known = False  # whether a tool is named
        self.out: list[str] = []

    def feed(self, text: str) -> str | None:
        self._buffer += text
        while True:
            if self._reader is not None:
                if not self._read_value(self._reader):
                    return None
                continue
            done = self._step()
            if done is not None:
                return self._buffer if done else None

    def finish(self, *, cut: bool) -> str:
        if self._streams and self._reader is not None and not cut:
            self._buffer = self._reader.finish()
            self.out.append(self._reader.take())
        elif self.name is None:
            self.failed = True
        return "" if self._reader is not None and not self._streams else self._buffer

    def _fail(self) -> bool:
        self.failed = self.name is None
        return True

    def _step(self) -> bool | None:
        """Read a part outside of values. Return True after the object, False if more text is
        needed."""
        text = self._buffer.lstrip()
        if not text:
            self._buffer = ""
            return False
        if self._expected == "object":
            self._buffer, self._depth, self._expected = text[1:], 1, "member"
            return None
        if text[0] == "}" and self._expected != "value":
            self._buffer = text[1:]
            self._depth -= 1
            self._expected = "after"
            return self._end() if not self._depth else None
        if self._expected == "after":
            if text[0] != ",":
                return self._fail()
            self._buffer, self._expected = text[1:], "member"
            return None
        return self._member(text)

    def _end(self) -> bool:
        if self.name is None:
            without = self._arguments is None
            if not self._found or (without and self._others):
                return self._fail()
            self._take_arguments(self._arguments or "{}")
        return True

    def _take_arguments(self, arguments: str) -> None:
        self.name, self.complete = self._found, True
        self.out.append(arguments)

    def _member(self, text: str) -> bool | None:
        found = _MEMBER.match(text, partial=True)
        if found is None:
            return self._fail()
        if found.partial:
            return False
        self._key, start = found["key"], found["value"]
        value = text[found.end() :]
        if self._key == "function" and start == "{" and self._depth == 1:
            self._buffer, self._depth = value[1:], 2
            return None
        if self._key in ("name", "function") and self.name is None:
            return self._name(value)
        is_arguments = self._key in ("arguments", "parameters")
        if is_arguments and start not in '{"n':
            return self._fail()
        if not is_arguments and self.name is None:
            if self._plain and self._key not in _OTHER_KEYS:
                return self._fail()
            self._others |= self._key not in _OTHER_KEYS
        self._buffer = value
        self._streams = is_arguments and start == "{" and self._found != "" and self.name is None
        if self._streams:
            self.name = self._found
        self._collected = []
        outer = "}" * self._depth
        self._reader = JsonReader(stops=self._stops, outer=outer if self._streams else "")
        return None

    def _name(self, value: str) -> bool | None:
        found = _TEXT.match(value, partial=True)
        if found is None:
            return self._fail()
        begun = (found["text"] or "") if not found.partial else value[1:]
        short = begun.removeprefix("functions.")
        if found.partial:
            either = (begun, short)
            if any(name.startswith(each) for name in self._names for each in either):
                return False
            return False if "functions.".startswith(begun) else self._fail()
        name = begun if begun in self._names else short
        if name not in self._names:
            return self._fail()
        self._found, self.is_known = name, True
        self._buffer, self._expected = value[found.end() :], "after"
        if self._arguments is not None and self.name is None:
            self._take_arguments(self._arguments)
        return None

    def _read_value(self, reader: JsonReader) -> bool:
        """Return whether the value ended."""
        self._buffer = reader.feed(self._buffer) or ""
        (self.out if self._streams else self._collected).append(reader.take())
        if reader.broken and not self._streams and self.name is None:
            self.failed = True
        if not reader.complete:
            return False
        self._reader, self._expected = None, "after"
        if self._streams:
            self._streams, self.complete = False, True
        elif not self._take("".join(self._collected)):
            self._fail()
        return True

    def _take(self, value: str) -> bool:
        """Take a complete value. Return False if it is not that of a call."""
        if self.name is not None:
            return True
        if self._key in ("arguments", "parameters"):
            if value[:1] == '"':
                text = json.loads(value).strip()
                value = "{}" if not text else repaired(text) or ""
            value = "{}" if value == "null" else value
            if value[:1] != "{":
                return False
            self._arguments = value
            if self._found:
                self._take_arguments(value)
        elif self._key == "type":
            return not self._plain or value == '"function"'
        elif self._key == "id" and value[:1] == '"':
            self.id = json.loads(value) or None
        return True


class SectionReader:
    """Reads the calls of ``tools`` in one section of an answer, which begins after a marker.

    A section ends at its marker, and where it cannot go on. Until a call has `started`, it may
    still turn out to have none.
    """

    def __init__(self, format: CallFormat, schemas: Mapping[str, Any], ends: Sequence[str]) -> None:
        self._format = format
        self._schemas = schemas
        self._ends = tuple(filter(None, ends))
        self._heads = _heads(format.heads)
        self._buffer = ""
        self._begun = 0  # characters of the buffer after which the next call begins
        self._arguments: _Arguments | None = None  # of the open call
        self._object: CallObject | None = None  # the open call, if it may be none
        self._object_text: list[str] = []
        self._in_list = False
        self._again = (format.start,) if format.start else ()  # the marker may come twice
        self._fragments: list[CallFragment] = []
        self._has_arguments = False  # whether the arguments of the open call are complete
        self.started = self.in_call = self.ended = False
        self.ended_by = ""  # the marker
        self.rest = ""  # the text after the section

    @property
    def is_known(self) -> bool:
        """Whether a tool is named, so that this is likely to be a call."""
        return self.started or (self._object is not None and self._object.is_known)

    @property
    def num_held(self) -> int:
        """The number of characters of an open value that are read when it is complete."""
        return getattr(self._arguments, "num_held", 0)

    def feed(self, text: str) -> list[CallFragment]:
        """Return the parts of calls that are final now."""
        self._buffer += text
        while not self.ended:
            if self._object is not None or self._arguments is not None:
                if not self._read_call():
                    break
            elif not self._read_between(ended=False):
                break
        fragments, self._fragments = self._fragments, []
        return fragments

    def finish(self, *, cut: bool) -> list[CallFragment]:
        """Return the rest at the end of the answer."""
        while not self.ended:
            reader = self._object or self._arguments
            if reader is None:
                if cut and not self._read_between(ended=False):
                    self._end("")
                elif not cut:
                    self._read_between(ended=True)
                continue
            rest = reader.finish(cut=cut)
            if self._object is not None and self._object.failed:
                self._end("" if cut else "".join(self._object_text))
                break
            self._take(reader.out)
            if cut and not reader.complete:
                self._end("")
                break
            self._end_call(rest)
        fragments, self._fragments = self._fragments, []
        return fragments

    def _end(self, rest: str) -> None:
        self.ended, self.rest = True, rest

    def _read_call(self) -> bool:
        """Return whether the call ended."""
        text, self._buffer = self._buffer, ""
        call = self._object
        if call is None:
            assert self._arguments is not None
            rest = self._arguments.feed(text)
            self._take(self._arguments.out)
        else:
            self._object_text.append(text)
            rest = call.feed(text)
            if call.failed:
                self._end("".join(self._object_text))
                return True
            if call.name is not None:
                if not self.in_call:
                    self._start(call.name, call.id)
                self._object_text.clear()
                self._take(call.out)
                if call.complete:
                    self._end_arguments()
        if rest is None:
            return False
        self._end_call(rest)
        return True

    def _start(self, name: str, id: str | None) -> None:
        self.started, self.in_call, self._has_arguments = True, True, False
        self._fragments.append(CallFragment(name, "", id))

    def _take(self, pieces: list[str]) -> None:
        if arguments := "".join(pieces):
            self._fragments.append(CallFragment(None, arguments))
        pieces.clear()

    def _end_call(self, rest: str) -> None:
        self._object = self._arguments = None
        self.in_call = False
        self._end_arguments()
        self._buffer = rest

    def _end_arguments(self) -> None:
        if not self._has_arguments:
            self._fragments.append(CallFragment(None, "", is_last=True))
        self._has_arguments = True

    def _read_between(self, *, ended: bool) -> bool:
        """Begin the next call, or end the section. Return False if more text is needed."""
        skipped = (*self._format.call_ends, *(() if self._heads else _JSON_END))
        if not self.started:
            skipped = self._again
        space = " \t\r\n,;" if self.started else " \t\r\n"
        while True:
            rest = self._buffer.lstrip(space)
            if (found := _start_of(rest, self._ends)) is not None:
                self.ended_by = found
                self._end(rest[len(found) :])
                return True
            own = "]" if self._in_list and rest.startswith("]") else None
            own = own or _start_of(rest, skipped)
            if own is None:
                break
            self._in_list &= own != "]"
            if not self.started:
                self._again = skipped = ()
            self._buffer = rest[len(own) :]
        waits = not rest or any(each.startswith(rest) for each in (*self._ends, *skipped))
        position = len(self._buffer) - len(rest)
        if position <= _MAX_BEGINNING_CHARS:
            if (begun := self._begin(position, ended)) is not None:
                if begun:
                    return True
                waits = True
            if waits and not ended:
                return False
        self._end(self._buffer)
        return True

    def _begin(self, position: int, ended: bool) -> bool | None:
        """Begin the call at ``position``. Return False if more text is needed, None if there is
        no call."""
        buffer, waits = self._buffer, False
        for head in self._heads:
            found = head.match(buffer, position, partial=not ended)
            if found is None or found.end() - position > _MAX_BEGINNING_CHARS:
                continue
            if found.partial:
                waits = True
            elif found["name"] in self._schemas:
                self._in_list |= bool(found.groupdict().get("list"))
                self._buffer = buffer[found.end() :]
                self._arguments = self._arguments_of(found["name"])
                self._start(found["name"], found.groupdict().get("id"))
                return True
        found = _BEFORE_OBJECT.match(buffer, position, partial=not ended)
        if found is not None and found.end() - position > _MAX_BEGINNING_CHARS:
            found = None
        if found is not None and not found.partial:
            self._in_list |= found["list"] is not None
            plain = not self._format.start and not self._format.heads
            self._object = CallObject(self._schemas, self._ends, plain=plain)
            self._object_text = []
            self._buffer = buffer[found.end() :]
            return True
        return False if waits or found is not None else None

    def _arguments_of(self, name: str) -> _Arguments:
        format, schema = self._format, self._schemas[name]
        if format.tags is not None and not self._buffer.lstrip().startswith("{"):
            return TaggedArguments(format.tags, ValueSchema(schema), self._ends)
        names = list((schema or {}).get("properties") or {})
        stops = (*format.call_ends, *self._ends)
        return JsonReader(format.style, stops=stops, names=names)


def _start_of(text: str, targets: Sequence[str]) -> str | None:
    """Return the target that ``text`` starts with."""
    return next((each for each in targets if text.startswith(each)), None)


@lru_cache(maxsize=64)
def _heads(heads: tuple[str, ...]) -> tuple[regex.Pattern[str], ...]:
    return tuple(regex.compile(r"\s*+" + each.replace("NAME", _NAME)) for each in heads)
