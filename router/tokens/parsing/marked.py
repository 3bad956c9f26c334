"""Splitting of an answer at the markers of its model's format."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from router.tokens.detokenizer import partial_match_length
from router.tokens.parsing.calls import JSON, ToolSchemas, with_plain_properties
from router.tokens.parsing.formats import Marker, ReplyFormat, ReplyState, harmony_state
from router.tokens.parsing.sections import CallFragment, SectionReader
from router.tokens.parsing.trimmer import WhitespaceTrimmer
from router.tokens.reply_parser import CallDelta, ReplyDelta

_MAX_FAILED_CHARS = 1_000_000
"""Max number of characters that are read again, in an answer with many starts of calls that turn
out to be none."""
_PLAIN_STARTS = ("{", "[", "`", "<|python_")
"""How an answer begins that may be calls without a marker."""


def call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def short_call_id() -> str:
    """Return an id in the format that Mistral's templates require."""
    return uuid.uuid4().hex[:9]


class MarkedReplyParser:
    """A `router.tokens.reply_parser.ReplyParser` for answers in ``format``, starting in ``state``.

    Only calls of ``tools`` are reported. The parts of a call are reported as they arrive, once it
    can be nothing else; within reasoning, where calls are also mentioned, when it is complete. What
    turns out to be no call is text from there on, and is read like other text. With
    ``single_call``, everything after the first call is ignored; with ``only_calls``, everything
    from the first call on that exactly repeats an earlier one.
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
    ) -> None:
        self._format = format
        self._state = state
        plain = with_plain_properties(tools) if format.tools is not None else ()
        self._schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in plain}
        self._single_call = single_call
        self._calls = _Calls(new_id, no_repeats=only_calls)
        self._only_calls = only_calls
        self._markers = format.markers(calls=bool(tools))
        self._pending = ""  # text that may be the start of a marker
        self._length = 0  # of the whole text
        self._line = ""  # the end of the text that was read
        self._header = ""
        self._header_ended = False  # whether any header has
        self._section: _Section | None = None
        self._failed_chars = 0
        self._may_be_plain = bool(tools) and format.tools is JSON
        self._reasoning_ended = False  # by a call; its marker may follow
        self._after_call = False
        self._section_is_open = False  # whether the marker after calls may follow
        self._text = WhitespaceTrimmer()
        self._reasoning = WhitespaceTrimmer(at_marker=True, indented=False)

    @property
    def in_reasoning(self) -> bool:
        return self._state is ReplyState.REASONING

    @property
    def called(self) -> bool:
        return self._calls.num_complete > 0

    @property
    def complete(self) -> bool:
        return self._calls.repeated or (self._single_call and self._calls.num_complete > 0)

    def parse_work(self, chars: int) -> int:
        section = self._section
        if section is None:
            return chars + len(self._pending)
        return chars + max(section.reader.num_held, section.num_chars)

    def feed(self, text: str) -> list[ReplyDelta]:
        self._pending += text
        self._length += len(text)
        out: list[ReplyDelta] = []
        while self._pending and not self.complete:
            if not (self._read_section(out) if self._section is not None else self._read(out)):
                break
        return out

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        out: list[ReplyDelta] = []
        while not self.complete:
            if self._section is not None and self._pending:
                self._read_section(out)
            elif self._section is not None:
                if not self._finish_section(self._section, out, cut):
                    return out
            elif not self._pending:
                break
            elif not self._read(out):
                rest, self._pending = self._pending, ""
                self._emit(rest[: self._begun(rest)] if cut else rest, out)
        if self.complete:
            return out
        if self._state is ReplyState.HEADER and not self._header_ended:
            self._add_text(self._header, out)
        if rest := self._text.finish():
            out.append(ReplyDelta(text=rest, spans=self._text.spans))
        return out

    def _begun(self, text: str) -> int:
        """Return where the marker of a call begins that a limit cut off: more than half of it, or
        anything after another call."""
        tools = self._format.tools
        for opener in tools.openers if tools is not None else ():
            length = partial_match_length(text, [opener])
            if length * 2 > len(opener) or (self._after_call and length == len(text.lstrip())):
                return len(text) - length
        return len(text)

    # -- text ----------------------------------------------------------------------

    def _read(self, out: list[ReplyDelta]) -> bool:
        """Read text up to a marker. Return False if more is needed."""
        if self._may_be_plain and self._state is ReplyState.NORMAL and self._text.blank:
            start = self._pending.lstrip()
            space = self._pending[: len(self._pending) - len(start)]
            self._pending = start
            self._emit(space, out)
            if start.startswith(_PLAIN_STARTS):
                self._begin_section("", out)
                return True
            if _PLAIN_STARTS[-1].startswith(start):
                return False
        markers = self._markers[self._state]
        match = self._first_match(markers)
        if match is None:
            texts = [marker.text for marker in markers]
            certain = len(self._pending) - partial_match_length(self._pending, texts)
            text, self._pending = self._pending[:certain], self._pending[certain:]
            self._emit(text, out)
            return False
        place, marker = match
        before, self._pending = self._pending[:place], self._pending[place:]
        self._emit(before, out)
        self._pending = self._pending[len(marker.text) :]
        self._on_marker(marker, out)
        return True

    def _first_match(self, markers: tuple[Marker, ...]) -> tuple[int, Marker] | None:
        """Return the start and the marker of the match that is complete first."""
        matches = [
            (start + len(marker.text), start, order)
            for order, marker in enumerate(markers)
            if (start := self._find(marker)) >= 0
        ]
        if not matches:
            return None
        _, start, order = min(matches)
        return start, markers[order]

    def _find(self, marker: Marker) -> int:
        start = self._pending.find(marker.text)
        if not marker.at_line_start:
            return start
        while start >= 0:
            line = (self._line + self._pending[max(0, start - 64) : start]).rpartition("\n")[2]
            if not line.strip():
                return start
            start = self._pending.find(marker.text, start + 1)
        return start

    def _emit(self, text: str, out: list[ReplyDelta]) -> None:
        """Add ``text``, which belongs to the current state."""
        if not text:
            return
        self._line = (self._line + text)[-64:].rpartition("\n")[2]
        if not text.isspace():
            self._reasoning_ended = self._after_call = False
        match self._state:
            case ReplyState.REASONING:
                if shown := self._reasoning.feed(text):
                    out.append(ReplyDelta(reasoning=shown))
            case ReplyState.HEADER:
                self._header += text
            case _:
                self._add_text(text, out)

    def _add_text(self, text: str, out: list[ReplyDelta]) -> None:
        """Add ``text``, which is before the pending text."""
        if self._only_calls and self._calls.num_complete:
            return  # the start of a call that a limit ended
        if shown := self._text.feed(text, self._length - len(self._pending)):
            out.append(ReplyDelta(text=shown, spans=self._text.spans))

    def _on_marker(self, marker: Marker, out: list[ReplyDelta]) -> None:
        """Change to the state that ``marker`` begins, if it is valid here."""
        before, after = self._state, marker.next_state
        if before is ReplyState.HEADER:
            self._header_ended = True
        if after is None:
            after = harmony_state(self._header)
        if before is ReplyState.NORMAL and not self._applies(marker, after):
            self._emit(marker.text, out)
            return
        header = ""
        if before is ReplyState.HEADER and after is ReplyState.TOOL:
            header = self._header if marker.next_state is None else ""
        self._header = ""
        if after is not ReplyState.TOOL:
            self._at_marker()
            self._state = after
        elif not self._schemas:
            self._state = ReplyState.NORMAL
            self._emit(marker.text if marker.next_state is not None else "", out)
        else:
            if before is ReplyState.HEADER:
                self._state = ReplyState.NORMAL
            self._begin_section(header + marker.text, out)

    def _applies(self, marker: Marker, after: ReplyState) -> bool:
        """Return whether ``marker`` in text is not only a mention."""
        tools, think = self._format.tools, self._format.think
        if think is not None and marker.text == think.end:
            given = (self._format.transitions or {}).get(ReplyState.NORMAL, ())
            # An answer without reasoning may begin with its end.
            first = self._text.blank and any(each.text == marker.text for each in given)
            return first or self._reasoning_ended
        if tools is not None and marker.text == tools.end and after is ReplyState.NORMAL:
            return self._section_is_open
        # The start of reasoning in the middle of text.
        return after is not ReplyState.REASONING or self._text.blank

    def _at_marker(self) -> None:
        self._text.at_marker()
        self._reasoning.at_marker()
        self._line = ""
        self._reasoning_ended = False

    # -- calls ---------------------------------------------------------------------

    def _begin_section(self, opening: str, out: list[ReplyDelta]) -> None:
        tools = self._format.tools
        assert tools is not None
        ends = [each.text for each in self._markers[ReplyState.TOOL]]
        self._section = _Section(SectionReader(tools, self._schemas, ends), opening, self._state)
        if opening and opening != tools.start:
            recipient = max(0, opening.find("to=")) if not tools.start else 0  # in a header
            self._take(self._section, self._section.reader.feed(opening[recipient:]), out)

    def _read_section(self, out: list[ReplyDelta]) -> bool:
        section = self._section
        assert section is not None
        text, self._pending = self._pending, ""
        if not section.committed:
            section.text.append(text)
            section.num_chars += len(text)
        self._take(section, section.reader.feed(text), out)
        if section.reader.ended and not self.complete:
            self._end_section(section, out)
        return True

    def _finish_section(self, section: _Section, out: list[ReplyDelta], cut: bool) -> bool:
        """End the section at the end of the answer. Return False if nothing follows."""
        in_reasoning = section.state is ReplyState.REASONING
        marked = bool(section.opening) or section.reader.is_known or self._only_calls
        self._take(section, section.reader.finish(cut=cut), out)
        if self.complete:
            return False
        if cut and not section.committed and marked and not in_reasoning:
            return False  # the start of a call is not shown
        self._end_section(section, out)
        return True

    def _take(
        self, section: _Section, fragments: list[CallFragment], out: list[ReplyDelta]
    ) -> None:
        section.fragments += fragments
        if not section.committed:
            done = any(each.is_last for each in section.fragments)
            if not section.fragments or (section.state is ReplyState.REASONING and not done):
                return
            section.committed, section.num_chars = True, 0
            section.text.clear()
            self._may_be_plain = False
            self._state = ReplyState.NORMAL
        for fragment in section.fragments:
            if self.complete:
                break
            for delta in self._calls.add(fragment):
                if delta.name is not None:
                    self._at_marker()
                out.append(ReplyDelta(calls=(delta,)))
        section.fragments.clear()

    def _end_section(self, section: _Section, out: list[ReplyDelta]) -> None:
        self._section = None
        reader = section.reader
        if section.committed:
            self._pending = reader.rest
            ended_by = next(
                (m for m in self._markers[ReplyState.TOOL] if m.text == reader.ended_by), None
            )
            if ended_by is not None and ended_by.next_state is not None:
                self._state = ended_by.next_state
            self._at_marker()
            self._section_is_open, self._after_call = ended_by is None, True
            self._reasoning_ended = section.state is ReplyState.REASONING
            return
        whole = section.opening + "".join(section.text)
        self._failed_chars += len(whole)
        self._state = section.state
        end = len(section.opening)
        if not section.opening:
            self._may_be_plain = False
        if self._failed_chars > _MAX_FAILED_CHARS:
            end = len(whole)
        self._pending = whole[end:]
        self._emit(whole[:end], out)


@dataclass
class _Section:
    """A part of an answer that may be calls."""

    reader: SectionReader
    opening: str
    state: ReplyState  # before the section
    committed: bool = False  # whether it is certain
    text: list[str] = field(default_factory=list)  # of the section, until it is certain
    num_chars: int = 0  # of that text, which may be read again
    fragments: list[CallFragment] = field(default_factory=list)  # not reported yet


class _Calls:
    """The calls of an answer. With ``no_repeats``, a call that begins like an earlier one is
    reported once it differs: a small model may repeat the same call for as long as a grammar
    allows it."""

    def __init__(self, new_id: Callable[[], str], *, no_repeats: bool) -> None:
        self._new_id = new_id
        self._no_repeats = no_repeats
        self._ids: set[str] = set()
        self._earlier: set[tuple[str, str]] = set()
        self._name = ""
        self._id: str | None = None
        self._arguments: list[str] = []
        self._length = 0  # of the arguments
        self._alike: list[str] = []  # arguments of earlier calls that begin as the open call does
        self._shown = False  # whether the open call is reported
        self.num_complete = 0
        self.repeated = False

    def add(self, fragment: CallFragment) -> list[CallDelta]:
        if fragment.name is not None:
            self._name, self._arguments, self._id = fragment.name, [], fragment.id
            self._length, self._shown = 0, False
            self._alike = [text for name, text in self._earlier if name == fragment.name]
            return [self._first()] if not self._alike else []
        if self._no_repeats:
            self._arguments.append(fragment.arguments)
        if not self._shown:
            start = fragment.arguments
            self._alike = [each for each in self._alike if each.startswith(start, self._length)]
            self._length += len(start)
        deltas = []
        if fragment.is_last:
            call = (self._name, "".join(self._arguments))
            if not self._shown:
                if call in self._earlier:
                    self.repeated = True
                    return []
                deltas.append(self._first())
            if self._no_repeats:
                self._earlier.add(call)
            self.num_complete += 1
        elif self._shown:
            if fragment.arguments:
                deltas.append(CallDelta(len(self._ids) - 1, fragment.arguments))
        elif not self._alike:
            deltas.append(self._first())
        return deltas

    def _first(self) -> CallDelta:
        own = self._id
        id = own if own is not None and own not in self._ids else self._new_id()
        number = len(self._ids)
        self._ids.add(id)
        self._shown = True
        return CallDelta(number, "".join(self._arguments), id, self._name)
