"""Splitting of an answer at the markers of its model's format."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from router.tokens.detokenizer import partial_match_length
from router.tokens.parsing.begun_arguments import ArgumentParser
from router.tokens.parsing.begun_calls import BegunCallParser
from router.tokens.parsing.calls import (
    JSON,
    ParsedCall,
    ParseWork,
    ToolSchemas,
    add_to_beginning,
    is_unfinished_json,
    may_become_json_calls,
    parse_calls,
    parse_complete_json_calls,
    with_plain_properties,
)
from router.tokens.parsing.formats import Marker, ReplyFormat, ReplyState, harmony_state
from router.tokens.parsing.streaming_calls import CallFragment, StreamingCallParser
from router.tokens.parsing.trimmer import WhitespaceTrimmer
from router.tokens.reply_parser import CallDelta, ReplyDelta

_MAX_INNER_ENDS = 100
"""Max number of end markers inside the strings of a call: the whole call is parsed again after
each."""


def call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def short_call_id() -> str:
    """Return an id in the format that Mistral's templates require."""
    return uuid.uuid4().hex[:9]


class MarkedReplyParser:
    """A `router.tokens.reply_parser.ReplyParser` for answers in ``format``, starting in ``state``.

    Only calls of ``tools`` are reported. A call is reported as soon as it can be nothing else if
    the model writes its arguments as JSON after a marker, and otherwise when it is complete. Text
    that looks like a call but does not parse is reported as text. With ``call_stream``, a grammar
    allows only calls after the reasoning. With ``single_call``, everything after the first call is
    ignored; with ``only_calls``, everything from the first call on that exactly repeats an earlier
    one.
    """

    def __init__(
        self,
        format: ReplyFormat,
        state: ReplyState,
        tools: ToolSchemas,
        *,
        single_call: bool = False,
        only_calls: bool = False,
        new_id: Callable[[], str] = call_id,
        call_stream: StreamingCallParser | None = None,
    ) -> None:
        self._format = format
        self._state = state
        self._tools = with_plain_properties(tools)
        self._single_call = single_call
        self._only_calls = only_calls
        self._taken: set[tuple[str, str]] = set()  # names and arguments of the calls
        self._ended = False  # whether a call was ignored
        self._new_id = new_id
        self._call_stream = call_stream
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._begun: BegunCallParser | ArgumentParser | None = None
        """The streaming parser of the current calls. None if a grammar allows only calls, within
        reasoning, and if calls can only be parsed when complete."""
        self._markers = format.markers(calls=bool(tools))
        self._pending = ""  # text that may be the start of a marker
        self._length = 0  # of the whole text
        self._header = ""
        self._header_ended = False  # whether any header has
        self._call: list[str] = []  # text of the current call, including its first marker
        self._called_from = state
        self._inner_ends = 0
        self._work = self._no_work()  # work of parsing the text that may be calls
        # Text that may still turn out to be calls. None: it cannot.
        self._maybe_json: list[str] | None = [] if tools and format.tools is JSON else None
        self._beginning = ""  # the start of that text, without whitespace
        if self._maybe_json is not None and call_stream is None and not only_calls:
            self._begun = BegunCallParser.of(JSON.name, self._names)
        self._text = WhitespaceTrimmer()
        self._reasoning = WhitespaceTrimmer(at_marker=True)
        self._ids: set[str] = set()

    @property
    def in_reasoning(self) -> bool:
        return self._state is ReplyState.REASONING

    @property
    def called(self) -> bool:
        in_call = self._call_stream is not None and self._call_stream.in_reported_call
        in_call |= self._begun is not None and self._begun.in_call
        return len(self._ids) > int(in_call)  # a call is reported when it is complete

    @property
    def _active_call_stream(self) -> StreamingCallParser | None:
        """None within reasoning, which may contain calls too: no grammar constrains it."""
        in_reasoning = self._state is ReplyState.TOOL and self._called_from is ReplyState.REASONING
        return None if in_reasoning else self._call_stream

    @property
    def _has_text(self) -> bool:
        """Whether the answer has anything besides reasoning: text, or the start of calls."""
        return not self._text.blank or bool(self._beginning)

    @property
    def complete(self) -> bool:
        ended = self._ended or (self._call_stream is not None and self._call_stream.repeated)
        return ended or (self._single_call and self.called)

    def parse_work(self, chars: int) -> int:
        return self._work.with_more(chars + len(self._pending)) if self._tools else 0

    def feed(self, text: str) -> list[ReplyDelta]:
        self._pending += text
        self._length += len(text)
        out: list[ReplyDelta] = []
        while not self.complete:
            markers = self._markers[self._state]
            match = _first_match(self._pending, markers)
            if match is None:
                texts = [marker.text for marker in markers]
                certain = len(self._pending) - partial_match_length(self._pending, texts)
                certain_text, self._pending = self._pending[:certain], self._pending[certain:]
                self._emit(certain_text, out)
                break
            start, marker = match
            before, self._pending = self._pending[:start], self._pending[start:]
            self._emit(before, out)
            self._pending = self._pending[len(marker.text) :]
            self._on_marker(marker, out)
        return out

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        out: list[ReplyDelta] = []
        if self.complete:
            return out
        stream = self._call_stream
        if stream is not None and stream.started:
            if stream.in_call:
                self._emit(self._pending, out)
            return out  # outside a call, the pending text is the start of another call
        rest, self._pending = self._pending, ""
        self._emit(rest, out)
        if cut and self._begun is not None and self._begun.started:
            self._add_text(self._begun.other_text, out)
        elif self._state is ReplyState.TOOL and not self._close_call("", out, parse=not cut):
            self._state = self._called_from
        elif self._begun is not None and self._begun.started:  # calls without markers
            self._close_begun(self._begun, "", out)
        if self._state is ReplyState.HEADER and not self._header_ended:
            self._add_text(self._header, out)
        if self._maybe_json:
            text, self._maybe_json = "".join(self._maybe_json), None
            if not self._take_calls(text, out, repair=not cut):
                if cut:
                    calls, text = parse_complete_json_calls(text, self._tools)
                    self._emit_calls(calls, out)
                if not self.complete:
                    self._add_text(text, out)
        if rest := self._text.finish():
            out.append(ReplyDelta(text=rest, spans=self._text.spans))
        return out

    def _no_work(self) -> ParseWork:
        return ParseWork(self._format.tools.name if self._format.tools is not None else "")

    def _emit(self, text: str, out: list[ReplyDelta]) -> None:
        """Add ``text``, which belongs to the current state."""
        if not text:
            return
        match self._state:
            case ReplyState.NORMAL if self._begun is not None and self._begun.started:
                self._add_fragments(self._begun.feed(text), out)
            case ReplyState.NORMAL if self._maybe_json is not None:
                self._maybe_json.append(text)
                self._work.add(text)
                self._beginning = add_to_beginning(self._beginning, text)
                self._read_call(text, out)
                begun = self._begun is not None and self._begun.started
                if not begun and not may_become_json_calls(self._beginning):
                    self._add_text("".join(self._maybe_json), out)
                    begun, self._begun = True, None
                if begun:
                    self._maybe_json = None
                    self._work = self._no_work()
            case ReplyState.NORMAL:
                self._add_text(text, out)
            case ReplyState.REASONING:
                if shown := self._reasoning.feed(text):
                    out.append(ReplyDelta(reasoning=shown))
            case ReplyState.TOOL:
                self._read_call(text, out)
                begun = self._begun is not None and self._begun.started
                if not begun:
                    self._call.append(text)
                if not begun or (self._begun and self._begun.is_parsed_later):
                    self._work.add(text)
            case ReplyState.HEADER:
                self._header += text

    def _add_text(self, text: str, out: list[ReplyDelta], end: str = "") -> None:
        """Add ``text``, which is before the marker ``end`` and the pending text."""
        if shown := self._text.feed(text, self._length - len(self._pending) - len(end)):
            out.append(ReplyDelta(text=shown, spans=self._text.spans))

    def _on_marker(self, marker: Marker, out: list[ReplyDelta]) -> None:
        """Change to the state that ``marker`` begins, if it is valid here."""
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
            self._emit(marker.text, out)  # in the middle of text it is only a mention
            return
        if after is ReplyState.TOOL and not self._tools:
            self._state = ReplyState.NORMAL
            self._emit(marker.text if marker.next_state is not None else "", out)
            return
        if after is ReplyState.TOOL:
            header = self._header if before is ReplyState.HEADER else ""
            self._call = [header + marker.text]
            self._work = self._no_work()
            self._work.add(self._call[0])
            self._inner_ends = 0
            self._called_from = ReplyState.NORMAL if before is ReplyState.HEADER else before
        else:
            self._text.at_marker()
            self._reasoning.at_marker()
        self._header = ""
        self._state = after
        if after is ReplyState.TOOL:
            syntax = self._format.tools
            self._begun = None
            # A required call is compared with earlier ones before it is reported.
            free = self._call_stream is None and not self._only_calls
            if syntax and free and self._called_from is ReplyState.NORMAL:
                by_argument = ArgumentParser.of(syntax.name, syntax.parse, self._tools, self._names)
                self._begun = by_argument or BegunCallParser.of(syntax.name, self._names)
            if syntax is not None and not syntax.start:
                self._read_call(self._call[0], out)
            else:
                self._stream_call(self._call[0], out)

    def _close_call(self, end: str, out: list[ReplyDelta], *, parse: bool = True) -> bool:
        """End the current call at the marker ``end``. Return False if the marker is inside a
        string, or if the text is not a call and becomes text."""
        stream = self._active_call_stream
        if stream is not None and stream.started:
            if stream.in_call:
                self._stream_call(end, out)  # inside a string
                return False
            self._state = ReplyState.NORMAL
            return True
        if self._begun is not None and self._begun.started:
            return self._close_begun(self._begun, end, out)
        opening, *inner = self._call
        text = "".join(inner)
        syntax = self._format.tools
        if syntax is not None and not syntax.start:
            text = opening + text
        if parse and self._take_calls(text, out):
            self._state = ReplyState.NORMAL
            return True
        if end and self._inner_ends < _MAX_INNER_ENDS and is_unfinished_json(text.strip()):
            self._call.append(end)  # inside a string
            self._work.add(end)
            self._inner_ends += 1
            return False
        self._state = self._called_from
        self._emit("".join(self._call) + end, out)
        return False

    def _close_begun(
        self, begun: BegunCallParser | ArgumentParser, end: str, out: list[ReplyDelta]
    ) -> bool:
        """End the calls that have begun at the marker ``end``, unless the marker is inside a
        string."""
        if end and begun.in_string:
            self._add_fragments(begun.feed(end), out)
            return False
        self._add_fragments(begun.finish(), out)
        self._begun = None
        self._state = ReplyState.NORMAL
        if not self.complete:
            self._add_text(begun.other_text, out, end)
        return True

    def _read_call(self, text: str, out: list[ReplyDelta]) -> None:
        """Add the parts of calls in ``text``, which is between the markers of calls."""
        if self._begun is not None:
            self._add_fragments(self._begun.feed(text), out)
            if self._begun.started and not self._begun.is_parsed_later:
                self._work = self._no_work()
        else:
            self._stream_call(text, out)

    def _stream_call(self, text: str, out: list[ReplyDelta]) -> None:
        """Add the parts of calls in ``text``, if it can be nothing but calls."""
        if self._active_call_stream is not None:
            self._add_fragments(self._active_call_stream.feed(text), out)

    def _add_fragments(self, fragments: list[CallFragment], out: list[ReplyDelta]) -> None:
        for name, arguments, id in fragments:
            if name is not None and self._single_call and self._ids:
                self._ended = True
                return
            if name is not None:
                self._text.at_marker()
                out.append(ReplyDelta(calls=(self._call_delta(ParsedCall(name, arguments, id)),)))
            elif arguments:
                out.append(ReplyDelta(calls=(CallDelta(len(self._ids) - 1, arguments),)))

    def _take_calls(self, text: str, out: list[ReplyDelta], *, repair: bool = True) -> bool:
        """Add the calls that ``text`` consists of. Return False if it is something else."""
        assert self._format.tools is not None
        calls = parse_calls(text, self._format.tools, self._tools, repair=repair)
        self._emit_calls(calls, out)
        return bool(calls)

    def _emit_calls(self, calls: list[ParsedCall], out: list[ReplyDelta]) -> None:
        if calls:
            self._text.at_marker()
        for call in calls[:1] if self._single_call else calls:
            if self._only_calls and (call.name, call.arguments) in self._taken:
                self._ended = True
                return
            self._taken.add((call.name, call.arguments))
            out.append(ReplyDelta(calls=(self._call_delta(call),)))

    def _call_delta(self, call: ParsedCall) -> CallDelta:
        id = call.id if call.id is not None and call.id not in self._ids else self._new_id()
        number = len(self._ids)
        self._ids.add(id)
        return CallDelta(number, call.arguments, id, call.name)


def _first_match(text: str, markers: tuple[Marker, ...]) -> tuple[int, Marker] | None:
    """Return the start and the marker of the match that is complete first."""
    matches = [
        (start + len(marker.text), start, order)
        for order, marker in enumerate(markers)
        if (start := text.find(marker.text)) >= 0
    ]
    if not matches:
        return None
    _, start, order = min(matches)
    return start, markers[order]
