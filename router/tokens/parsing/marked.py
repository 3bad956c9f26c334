"""Takes a reply apart at the markers of its model's format."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from router.tokens.detokenizer import partial_match_length
from router.tokens.parsing.calls import (
    JSON,
    ParsedCall,
    ToolSchemas,
    is_unfinished_json,
    may_become_json_calls,
    parse_calls,
    parse_complete_json_calls,
    with_plain_properties,
)
from router.tokens.parsing.formats import Marker, ReplyFormat, ReplyState, harmony_state
from router.tokens.parsing.streaming_calls import StreamingCallParser
from router.tokens.parsing.trimmer import WhitespaceTrimmer
from router.tokens.reply_parser import CallDelta, ReplyDelta

_MAX_ENDS = 100
"""So many markers within the strings of a call are its text; each means to read all of it again."""


def call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def short_call_id() -> str:
    """As Mistral's templates take them."""
    return uuid.uuid4().hex[:9]


class MarkedReplyParser:
    """A `router.tokens.reply_parser.ReplyParser` for a reply in ``format``, which begins in
    ``state``.

    Calls count if they are of ``tools``, each as a whole; what looks like one and does not parse
    stays the text that it is. With ``call_stream`` nothing but calls can come behind reasoning.
    With ``single_call`` nothing matters after the first.
    """

    def __init__(
        self,
        format: ReplyFormat,
        state: ReplyState,
        tools: ToolSchemas,
        *,
        single_call: bool = False,
        new_id: Callable[[], str] = call_id,
        call_stream: StreamingCallParser | None = None,
    ) -> None:
        self._format = format
        self._state = state
        self._tools = with_plain_properties(tools)
        self._single_call = single_call
        self._new_id = new_id
        self._call_stream = call_stream
        self._markers = format.markers(calls=bool(tools))
        self._pending = ""
        self._header = ""
        self._header_ended = False
        self._call: list[str] = []
        self._called_from = state
        self._ends = 0
        self._maybe_json: list[str] | None = [] if tools and format.tools is JSON else None
        self._text = WhitespaceTrimmer()
        self._reasoning = WhitespaceTrimmer(at_marker=True)
        self._ids: set[str] = set()

    @property
    def in_reasoning(self) -> bool:
        return self._state is ReplyState.REASONING

    @property
    def called(self) -> bool:
        cut_short = (
            self._call_stream is not None
            and self._call_stream.num_begun > self._call_stream.num_ended
        )
        return len(self._ids) > cut_short

    @property
    def _active_call_stream(self) -> StreamingCallParser | None:
        """Reasoning may speak of calls too: no grammar binds it."""
        apart = self._state is ReplyState.TOOL and self._called_from is ReplyState.REASONING
        return None if apart else self._call_stream

    @property
    def _has_text(self) -> bool:
        """Whether something other than reasoning has been said, text or the beginning of calls."""
        return not self._text.blank or any(piece.strip() for piece in self._maybe_json or ())

    @property
    def complete(self) -> bool:
        """Whether nothing that comes now would count."""
        return self._single_call and self.called

    def feed(self, text: str) -> ReplyDelta:
        self._pending += text
        out = _DeltaBuilder()
        while not self.complete:
            markers = self._markers[self._state]
            found = _first(self._pending, markers)
            if found is None:
                wanted = [marker.text for marker in markers]
                sure = len(self._pending) - partial_match_length(self._pending, wanted)
                self._emit(self._pending[:sure], out)
                self._pending = self._pending[sure:]
                break
            start, marker = found
            self._emit(self._pending[:start], out)
            self._pending = self._pending[start + len(marker.text) :]
            self._on_marker(marker, out)
        return out.delta()

    def finish(self, *, cut: bool = False) -> ReplyDelta:
        out = _DeltaBuilder()
        if self.complete:
            return out.delta()
        live = self._call_stream
        if live is not None and live.num_begun:
            if live.num_begun > live.num_ended:
                self._emit(self._pending, out)
            return out.delta()  # or else it is the beginning of another call
        self._emit(self._pending, out)
        self._pending = ""
        if self._state is ReplyState.TOOL and not self._close_call("", out, parse=not cut):
            self._state = self._called_from
        if self._state is ReplyState.HEADER and not self._header_ended:
            out.text.append(self._text.feed(self._header))
        if self._maybe_json:
            held, self._maybe_json = "".join(self._maybe_json), None
            if not self._take_calls(held, out):
                if cut:
                    calls, held = parse_complete_json_calls(held, self._tools)
                    self._emit_calls(calls, out)
                if not self.complete:
                    out.text.append(self._text.feed(held))
        out.text.append(self._text.finish())
        return out.delta()

    def _emit(self, text: str, out: _DeltaBuilder) -> None:
        """``text`` is of the present state."""
        if not text:
            return
        match self._state:
            case ReplyState.NORMAL if self._maybe_json is not None:
                self._maybe_json.append(text)
                self._stream_call(text, out)
                if not may_become_json_calls(self._maybe_json):
                    out.text.append(self._text.feed("".join(self._maybe_json)))
                    self._maybe_json = None
            case ReplyState.NORMAL:
                out.text.append(self._text.feed(text))
            case ReplyState.REASONING:
                out.reasoning.append(self._reasoning.feed(text))
            case ReplyState.TOOL:
                self._call.append(text)
                self._stream_call(text, out)
            case ReplyState.HEADER:
                self._header += text

    def _on_marker(self, marker: Marker, out: _DeltaBuilder) -> None:
        before, after = self._state, marker.next_state
        if before is ReplyState.TOOL:
            if after is not None and self._close_call(marker.text, out):
                self._state = after
            return
        if before is ReplyState.HEADER:
            self._header_ended = True
        if after is None:
            after = harmony_state(self._header)
        if after is ReplyState.REASONING and before is ReplyState.NORMAL and self._has_text:
            self._emit(marker.text, out)  # in the middle of a text it is only spoken of
            return
        if after is ReplyState.TOOL and not self._tools:
            self._state = ReplyState.NORMAL
            self._emit(marker.text if marker.next_state is not None else "", out)
            return
        if after is ReplyState.TOOL:
            self._call = (
                [self._header + marker.text] if before is ReplyState.HEADER else [marker.text]
            )
            self._ends = 0
            self._called_from = ReplyState.NORMAL if before is ReplyState.HEADER else before
        else:
            self._text.at_marker()
            self._reasoning.at_marker()
        self._header = ""
        self._state = after
        if after is ReplyState.TOOL:
            self._stream_call(self._call[0], out)

    def _close_call(self, end: str, out: _DeltaBuilder, *, parse: bool = True) -> bool:
        """Whether the call that goes up to ``end`` is over; without one it is in any case."""
        live = self._active_call_stream
        if live is not None and live.num_begun:
            if live.num_begun > live.num_ended:
                self._stream_call(end, out)  # part of a string
                return False
            self._state = ReplyState.NORMAL
            return True
        opening, *inner = self._call
        text = "".join(inner)
        syntax = self._format.tools
        if syntax is not None and not syntax.start:
            text = opening + text
        if parse and self._take_calls(text, out):
            self._state = ReplyState.NORMAL
            return True
        if end and self._ends < _MAX_ENDS and is_unfinished_json(text.strip()):
            self._call.append(end)  # part of a string
            self._ends += 1
            return False
        self._state = self._called_from
        self._emit("".join(self._call) + end, out)
        return False

    def _stream_call(self, text: str, out: _DeltaBuilder) -> None:
        """Tells of the calls in ``text`` as far as it goes, where it can be nothing else."""
        if self._active_call_stream is None:
            return
        for name, arguments in self._active_call_stream.feed(text):
            if name is not None:
                self._text.at_marker()
                out.calls.append(self._call_delta(ParsedCall(name, arguments)))
            elif arguments:
                out.calls.append(CallDelta(len(self._ids) - 1, arguments))

    def _take_calls(self, text: str, out: _DeltaBuilder) -> bool:
        assert self._format.tools is not None
        calls = parse_calls(text, self._format.tools, self._tools)
        self._emit_calls(calls, out)
        return bool(calls)

    def _emit_calls(self, calls: list[ParsedCall], out: _DeltaBuilder) -> None:
        if calls:
            self._text.at_marker()
        for call in calls[:1] if self._single_call else calls:
            out.calls.append(self._call_delta(call))

    def _call_delta(self, call: ParsedCall) -> CallDelta:
        own = call.id if call.id is not None and call.id not in self._ids else self._new_id()
        number = len(self._ids)
        self._ids.add(own)
        return CallDelta(number, call.arguments, own, call.name)


class _DeltaBuilder:
    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: list[str] = []
        self.calls: list[CallDelta] = []

    def delta(self) -> ReplyDelta:
        return ReplyDelta("".join(self.reasoning), "".join(self.text), tuple(self.calls))


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
