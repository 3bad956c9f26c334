"""Takes a reply apart at the markers of its model's format."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from router.tokens.parsing.calls import (
    JSON,
    Call,
    Described,
    calls_in,
    complete_json_calls_in,
    is_unfinished_json,
    may_become_json_calls,
    with_plain_properties,
)
from router.tokens.parsing.formats import Marker, ReplyFormat, State, harmony_state
from router.tokens.parsing.live import LiveCalls
from router.tokens.parsing.prose import Prose
from router.tokens.reply import CallDelta, Part
from router.tokens.text import possible_beginning

_MAX_ENDS = 100
"""So many markers within the strings of a call are its text; each means to read all of it again."""


def call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def short_call_id() -> str:
    """As Mistral's templates take them."""
    return uuid.uuid4().hex[:9]


class MarkedReply:
    """A `router.tokens.reply.ReplyParser` for a reply in ``format``, which begins in ``state``.

    Calls count if they are of ``tools``, each as a whole; what looks like one and does not
    parse stays the text that it is. With ``live`` nothing but calls can come behind reasoning.
    With ``one_call`` nothing matters after the first.
    """

    def __init__(
        self,
        format: ReplyFormat,
        state: State,
        tools: Described,
        *,
        one_call: bool = False,
        new_id: Callable[[], str] = call_id,
        live: LiveCalls | None = None,
    ) -> None:
        self._format = format
        self._state = state
        self._tools = with_plain_properties(tools)
        self._one_call = one_call
        self._new_id = new_id
        self._live = live
        self._markers = format.markers(calls=bool(tools))
        self._pending = ""
        self._header = ""
        self._titled = False
        self._call: list[str] = []
        self._called_from = state
        self._ends = 0
        self._maybe_json: list[str] | None = [] if tools and format.tools is JSON else None
        self._text = Prose()
        self._reasoning = Prose(beside=True)
        self._ids: set[str] = set()

    @property
    def in_reasoning(self) -> bool:
        return self._state is State.REASONING

    @property
    def called(self) -> bool:
        cut_short = self._live is not None and self._live.begun > self._live.ended
        return len(self._ids) > cut_short

    @property
    def _live_here(self) -> LiveCalls | None:
        """Reasoning may speak of calls too: no grammar binds it."""
        apart = self._state is State.TOOL and self._called_from is State.REASONING
        return None if apart else self._live

    @property
    def _speaks(self) -> bool:
        """Whether something other than reasoning has been said, text or the beginning of calls."""
        return not self._text.fresh or any(piece.strip() for piece in self._maybe_json or ())

    @property
    def complete(self) -> bool:
        """Whether nothing that comes now would count."""
        return self._one_call and self.called

    def feed(self, text: str) -> Part:
        self._pending += text
        out = _Gathered()
        while not self.complete:
            markers = self._markers[self._state]
            found = _first(self._pending, markers)
            if found is None:
                wanted = [marker.text for marker in markers]
                sure = len(self._pending) - possible_beginning(self._pending, wanted)
                self._say(self._pending[:sure], out)
                self._pending = self._pending[sure:]
                break
            start, marker = found
            self._say(self._pending[:start], out)
            self._pending = self._pending[start + len(marker.text) :]
            self._cross(marker, out)
        return out.part()

    def finish(self, *, cut: bool = False) -> Part:
        out = _Gathered()
        if self.complete:
            return out.part()
        live = self._live
        if live is not None and live.begun:
            if live.begun > live.ended:
                self._say(self._pending, out)
            return out.part()  # or else it is the beginning of another call
        self._say(self._pending, out)
        self._pending = ""
        if self._state is State.TOOL and not self._close_call("", out, parse=not cut):
            self._state = self._called_from
        if self._state is State.HEADER and not self._titled:
            out.text.append(self._text.add(self._header))
        if self._maybe_json:
            held, self._maybe_json = "".join(self._maybe_json), None
            if not self._take_calls(held, out):
                if cut:
                    calls, held = complete_json_calls_in(held, self._tools)
                    self._give(calls, out)
                if not self.complete:
                    out.text.append(self._text.add(held))
        out.text.append(self._text.rest())
        return out.part()

    def _say(self, text: str, out: _Gathered) -> None:
        """``text`` is of the present state."""
        if not text:
            return
        match self._state:
            case State.NORMAL if self._maybe_json is not None:
                self._maybe_json.append(text)
                self._follow(text, out)
                if not may_become_json_calls(self._maybe_json):
                    out.text.append(self._text.add("".join(self._maybe_json)))
                    self._maybe_json = None
            case State.NORMAL:
                out.text.append(self._text.add(text))
            case State.REASONING:
                out.reasoning.append(self._reasoning.add(text))
            case State.TOOL:
                self._call.append(text)
                self._follow(text, out)
            case State.HEADER:
                self._header += text

    def _cross(self, marker: Marker, out: _Gathered) -> None:
        before, after = self._state, marker.to
        if before is State.TOOL:
            if after is not None and self._close_call(marker.text, out):
                self._state = after
            return
        if before is State.HEADER:
            self._titled = True
        if after is None:
            after = harmony_state(self._header)
        if after is State.REASONING and before is State.NORMAL and self._speaks:
            self._say(marker.text, out)  # in the middle of a text it is only spoken of
            return
        if after is State.TOOL and not self._tools:
            self._state = State.NORMAL
            self._say(marker.text if marker.to is not None else "", out)
            return
        if after is State.TOOL:
            self._call = [self._header + marker.text] if before is State.HEADER else [marker.text]
            self._ends = 0
            self._called_from = State.NORMAL if before is State.HEADER else before
        else:
            self._text.marker()
            self._reasoning.marker()
        self._header = ""
        self._state = after
        if after is State.TOOL:
            self._follow(self._call[0], out)

    def _close_call(self, end: str, out: _Gathered, *, parse: bool = True) -> bool:
        """Whether the call that goes up to ``end`` is over; without one it is in any case."""
        live = self._live_here
        if live is not None and live.begun:
            if live.begun > live.ended:
                self._follow(end, out)  # part of a string
                return False
            self._state = State.NORMAL
            return True
        opening, *inner = self._call
        text = "".join(inner)
        syntax = self._format.tools
        if syntax is not None and not syntax.start:
            text = opening + text
        if parse and self._take_calls(text, out):
            self._state = State.NORMAL
            return True
        if end and self._ends < _MAX_ENDS and is_unfinished_json(text.strip()):
            self._call.append(end)  # part of a string
            self._ends += 1
            return False
        self._state = self._called_from
        self._say("".join(self._call) + end, out)
        return False

    def _follow(self, text: str, out: _Gathered) -> None:
        """Tells of the calls in ``text`` as far as it goes, where it can be nothing else."""
        if self._live_here is None:
            return
        for name, arguments in self._live_here.feed(text):
            if name is not None:
                self._text.marker()
                out.calls.append(self._numbered(Call(name, arguments)))
            elif arguments:
                out.calls.append(CallDelta(len(self._ids) - 1, arguments))

    def _take_calls(self, text: str, out: _Gathered) -> bool:
        assert self._format.tools is not None
        calls = calls_in(text, self._format.tools, self._tools)
        self._give(calls, out)
        return bool(calls)

    def _give(self, calls: list[Call], out: _Gathered) -> None:
        if calls:
            self._text.marker()
        for call in calls[:1] if self._one_call else calls:
            out.calls.append(self._numbered(call))

    def _numbered(self, call: Call) -> CallDelta:
        own = call.id if call.id is not None and call.id not in self._ids else self._new_id()
        number = len(self._ids)
        self._ids.add(own)
        return CallDelta(number, call.arguments, own, call.name)


class _Gathered:
    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: list[str] = []
        self.calls: list[CallDelta] = []

    def part(self) -> Part:
        return Part("".join(self.reasoning), "".join(self.text), tuple(self.calls))


def _first(text: str, markers: tuple[Marker, ...]) -> tuple[int, Marker] | None:
    """Where the marker that is complete first begins, and which it is."""
    found = [
        (start + len(marker.text), start, order)
        for order, marker in enumerate(markers)
        if (start := text.find(marker.text)) >= 0
    ]
    if not found:
        return None
    _, start, order = min(found)
    return start, markers[order]
