from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from itertools import groupby, repeat
from typing import Any, get_args

import pytest
from mlx_lm.chat_templates import muse_spark

from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import EVERYBODY
from router.generation.choice import OutputDelta
from router.tokens.detokenizer import IncrementalDetokenizer
from router.tokens.parsing.calls import JSON
from router.tokens.parsing.formats import (
    CALL_FORMATS,
    HARMONY,
    REASONING,
    Marker,
    ReplyFormat,
    ReplyState,
)
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.parsing.syntaxes import syntax_named
from router.tokens.parsing.trimmer import WhitespaceTrimmer
from router.tokens.reply_parser import CallDelta, ReplyDelta
from router.tokens.vocabulary import Vocabulary
from shared.settings import ReasoningParserName, ToolParserName
from tests.router.generation.test_choice import advanced, choice_of
from tests.router.scripted_engine import make_submit
from tests.router.tokens.parsing.replies import BERLIN, BROKEN, REPLIES, TOOLS, Reply

CHAT_MODEL = True
THINK = REASONING["think"]


def format_of(parser: str) -> ReplyFormat:
    if parser == "harmony":
        return HARMONY
    return ReplyFormat(THINK, JSON if parser == "json" else syntax_named(parser))


def pieces_of(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def calls_in(parts: Iterable[ReplyDelta]) -> list[CallDelta]:
    return [call for part in parts for call in part.calls]


def read_with(reply: MarkedReplyParser, pieces: list[str], *, cut: bool = False) -> ReplyDelta:
    """Parse a reply that comes in ``pieces``."""
    parts = [part for piece in pieces for part in reply.feed(piece)]
    parts += reply.finish(cut=cut)
    calls: list[CallDelta] = []
    for call in calls_in(parts):
        if call.number == len(calls):
            calls.append(call)
        else:
            assert call.number == len(calls) - 1 and call.name is call.id is None
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + call.arguments)
    ids = {call.id for call in calls}
    assert len(ids) == len(calls) and None not in ids
    reasoning, text = "".join(p.reasoning for p in parts), "".join(p.text for p in parts)
    return ReplyDelta(reasoning, text, tuple(calls))


def read(
    written: str,
    format: ReplyFormat,
    *,
    size: int = 1,
    state: ReplyState | None = None,
    tools: Any = TOOLS,
    cut: bool = False,
    single_call: bool = False,
) -> ReplyDelta:
    """Parse ``written`` in pieces of ``size`` characters."""
    reply = MarkedReplyParser(format, state or format.initial_state, tools, single_call=single_call)
    return read_with(reply, pieces_of(written, size), cut=cut)


def named(calls: Iterable[CallDelta]) -> list[tuple[str | None, Any]]:
    """Return names and arguments; as text if they are not complete."""

    def arguments(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return [(call.name, arguments(call.arguments)) for call in calls]


def sizes(written: str) -> list[int]:
    return [1, 2, 3, 5, 7, 16, len(written)]


EACH_REPLY = pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.parser)


@EACH_REPLY
def test_calls_do_not_depend_on_the_pieces_of_a_reply(reply: Reply) -> None:
    written, format = reply.written, format_of(reply.parser)
    halves = [[written[:end], written[end:]] for end in range(len(written))]
    for pieces in (*(pieces_of(written, size) for size in sizes(written)), *halves):
        part = read_with(MarkedReplyParser(format, format.initial_state, TOOLS), pieces)
        assert named(part.calls) == reply.calls
        assert part.text == reply.text


@EACH_REPLY
def test_reasoning_before_calls_is_separate(reply: Reply) -> None:
    written, reasoning, text = reply.written, "Weather, so I ask.", reply.text
    if reply.parser != "harmony":
        written = f"<think>\nLet me <see>.\n\nOk\n</think>\n\n{written}"
        reasoning, text = "Let me <see>.\n\nOk", text.lstrip("\n")
    for size in sizes(written):
        part = read(written, format_of(reply.parser), size=size)
        assert (part.reasoning, part.text) == (reasoning, text)
        assert named(part.calls) == reply.calls


def test_every_parser_has_an_example_and_a_flag() -> None:
    assert CALL_FORMATS.keys() <= {reply.parser for reply in REPLIES}
    assert {*CALL_FORMATS, "auto", "none"} == set(get_args(ToolParserName))
    assert {*REASONING, "auto", "none", "harmony"} == set(get_args(ReasoningParserName))


@pytest.mark.parametrize(("parser", "written"), BROKEN)
def test_text_that_is_not_a_call_stays_text(parser: str, written: str) -> None:
    for size in (1, 7, len(written)):
        assert read(written, format_of(parser), size=size) == ReplyDelta("", written)


@EACH_REPLY
def test_without_tools_there_are_no_calls(reply: Reply) -> None:
    if reply.parser in ("harmony", "kimi_k3"):
        return
    for size in (1, len(reply.written)):
        part = read(reply.written, format_of(reply.parser), size=size, tools=[])
        assert part.text == reply.written


@EACH_REPLY
def test_a_reply_cut_short_has_calls_that_were_complete_or_had_begun(reply: Reply) -> None:
    for end in range(0, len(reply.written), 3):
        part = read(reply.written[:end], format_of(reply.parser), size=9, cut=True)
        calls = named(part.calls)
        if calls and isinstance(calls[-1][1], str):
            name, arguments = calls.pop()
            assert name == reply.calls[len(calls)][0]
            whole = json.dumps(reply.calls[len(calls)][1], ensure_ascii=False)
            assert whole.startswith(arguments) or arguments in reply.written
        assert calls == reply.calls[: len(calls)]


@pytest.mark.parametrize("cut", [False, True])
def test_after_complete_json_calls_one_that_has_not_begun_is_text(cut: bool) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    for begun in ("{", '{"name": "get_weath', '{"name": "get_weather", "arguments": "{'):
        for before in (call, f"{call}\n{call}", f"[{call}, {call}]"):
            part = read(f"{before}\n{begun}", format_of("json"), size=5, cut=cut)
            assert named(part.calls) == [("get_weather", {"city": "Paris"})] * before.count(call)
            assert part.text == ("" if cut else begun)
        one = read(f"{call}\n{begun}", format_of("json"), size=5, cut=True, single_call=True)
        assert (len(one.calls), one.text) == (1, "")


@pytest.mark.parametrize("reply", [r for r in REPLIES if len(r.calls) > 1], ids=lambda r: r.parser)
def test_with_single_call_only_the_first_counts(reply: Reply) -> None:
    for size in range(1, len(reply.written) + 1):
        part = read(reply.written, format_of(reply.parser), size=size, single_call=True)
        assert named(part.calls) == reply.calls[:1]


def test_a_call_without_an_end_marker_counts_unless_the_reply_was_cut() -> None:
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin", "days": 3}}\n'
    assert named(read(written, format_of("json_tools")).calls) == [("get_weather", BERLIN)]
    cut = written.replace("}}", "}").replace("3", '"')
    assert named(read(cut, format_of("json_tools"), cut=True).calls) == [
        ("get_weather", '{"city": "Berlin", "days": "}\\n')
    ]


def test_half_a_surrogate_pair_in_arguments_is_escaped() -> None:
    written = '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d"}}</tool_call>'
    (call,) = read(written, format_of("json_tools")).calls
    assert call.arguments.encode() == b'{"city": "\\ud83d"}'


@pytest.mark.parametrize(
    ("written", "state", "expected"),
    [
        ("<think>a</think>b", ReplyState.NORMAL, ReplyDelta("a", "b")),
        ("\n<think>\n a \n</think>\n\n b ", ReplyState.NORMAL, ReplyDelta("a", " b ")),
        ("a \n</think>\nb", ReplyState.REASONING, ReplyDelta("a", "b")),
        ("a", ReplyState.REASONING, ReplyDelta("a", "")),
        ("hm <tool_call>x</tool_call></think>b", ReplyState.REASONING,
         ReplyDelta("hm <tool_call>x</tool_call>", "b")),
        ("<think>never ends ", ReplyState.NORMAL, ReplyDelta("never ends", "")),
        ("<think></think>b", ReplyState.NORMAL, ReplyDelta("", "b")),
        ("<think></think>", ReplyState.NORMAL, ReplyDelta("", "")),
        ("", ReplyState.REASONING, ReplyDelta("", "")),
        *(
            (text, ReplyState.NORMAL, ReplyDelta("", text))
            for text in ("", " \n", "ends with space \n", "Write <think> first.</think>",
                         "a</think>b", "<thin")
        ),
        ("<think>a</think>b<thi", ReplyState.NORMAL, ReplyDelta("a", "b<thi")),
        ("<think>a</th</think>b", ReplyState.NORMAL, ReplyDelta("a</th", "b")),
        ("<think>a</think><think>b</think>c", ReplyState.NORMAL, ReplyDelta("ab", "c")),
    ],
)  # fmt: skip
def test_markers_enclose_reasoning(written: str, state: ReplyState, expected: ReplyDelta) -> None:
    for size in sizes(written + "."):
        assert read(written, format_of("json_tools"), size=size, state=state) == expected


def test_a_call_ends_reasoning() -> None:
    written = 'hm <tool_call>{"name": "get_weather", "arguments": {}}</tool_call>Then text'
    part = read(written, format_of("json_tools"), state=ReplyState.REASONING)
    assert (part.reasoning, part.text) == ("hm", "Then text")
    assert named(part.calls) == [("get_weather", {})]


def test_text_is_shown_as_soon_as_it_cannot_begin_a_marker() -> None:
    reply = MarkedReplyParser(format_of("json_tools"), ReplyState.NORMAL, TOOLS)
    shown = [[part.text for part in reply.feed(piece)] for piece in ("Hello", " <t", "able>")]
    assert shown == [["Hello"], [], [" <table>"]]


@pytest.mark.parametrize("size", [1, 1000])
def test_parts_are_in_the_order_of_the_text(size: int) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    reply = MarkedReplyParser(format_of("json_tools"), ReplyState.NORMAL, TOOLS)
    pieces = pieces_of(f"<think>a</think>b{call}c{call}", size)
    parts = [part for piece in pieces for part in reply.feed(piece)]
    kinds = ["call" if part.calls else part.reasoning or part.text for part in parts]
    assert [kind for kind, _ in groupby(kinds)] == ["a", "b", "call", "c", "call"]


def test_messages_with_headers_are_separated() -> None:
    written = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Hello <b>."
    )
    for size in sizes(written):
        assert read(written, format_of("harmony"), size=size) == ReplyDelta("Think.", "Hello <b>.")
    assert read("no header at all", format_of("harmony")) == ReplyDelta("", "no header at all")


def test_mlx_lms_own_response_formats_are_followed() -> None:
    transitions = {
        ReplyState(state): tuple(Marker(text, ReplyState(to)) for text, to in edges)
        for state, edges in muse_spark.RESPONSE_FORMAT["transitions"].items()
    }
    format = ReplyFormat(None, syntax_named("muse_spark"), transitions, ReplyState.HEADER)
    (call,) = (reply for reply in REPLIES if reply.parser == "muse_spark")
    written = (
        "to=self<|message|>Let me see.<|eom|><|start|>assistant to=user<|message|>One moment."
        f"<|eom|><|start|>assistant to=get_weather<|message|>{call.written}"
    )
    for size in sizes(written):
        part = read(written, format, size=size)
        assert (part.reasoning, part.text) == ("Let me see.", "One moment.")
        assert named(part.calls) == call.calls


@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("gemma4", "<|tool_call>" + "call:a{" * 9000 + "<tool_call|>"),
        ("pythonic", "<|tool_call_start|>" + "[a(" * 20000 + "<|tool_call_end|>"),
        ("kimi_k3", "<|open|>tools<|sep|>" + "<|open|>call" * 5000 + "<|close|>tools<|sep|>"),
        ("json_tools", '<tool_call>{"a": "' + "</tool_call>" * 5000),
        ("json_tools", "<tool_call>" + '{"a":' * 200_000),
        ("mistral", "[TOOL_CALLS]" + " " * 100_000 + "x"),
        ("mistral", "[TOOL_CALLS]" + "a" * 100_000 + "![ARGS]{"),
    ],
)
def test_text_that_mlx_lms_parsers_are_slow_with_is_not_a_call(parser: str, written: str) -> None:
    started = time.process_time()
    assert read(written, format_of(parser), size=1000).text == written
    assert time.process_time() - started < 10  # mlx-lm's parsers take minutes


def test_a_run_of_whitespace_takes_linear_time() -> None:
    trimmer, started = WhitespaceTrimmer(), time.process_time()
    shown = "".join(trimmer.feed(piece) for piece in ["a", *[" "] * 400_000, "b"])
    assert shown == "a" + " " * 400_000 + "b"
    assert time.process_time() - started < 5


PIECES = (
    *("a", "é", "e\u0301", "日本", "🌍", "👩🏽‍🚀", "\n", " ", "<"),
    *("th", "ink>", "ｱ", "ॐ", "\ufffd", "</"),
)


def answers(
    tokenizer: Any, written: str, stops: list[str], step: int, format: ReplyFormat
) -> tuple[str, str, Any, str]:
    """Return text, reasoning and calls of the answer to ``written``, generated in steps of ``step``
    tokens, and how it ended."""
    ids = tokenizer.encode(written, add_special_tokens=False)
    sequence = RemoteSequence(make_submit("r", max_tokens=len(ids)), EVERYBODY, lambda: None)
    reply = MarkedReplyParser(format, format.initial_state, TOOLS)
    text = IncrementalDetokenizer(Vocabulary(tokenizer).decoder(), stops)
    choice = choice_of(sequence, text, reply)
    whole = OutputDelta.join(advanced(choice, ids, repeat(step)))
    return whole.text, whole.reasoning, named(whole.calls), str(choice.finish_reason)


def test_streams_and_full_answers_are_equal_for_random_text(loaded: Any) -> None:
    draw, format = random.Random(5), format_of("json_tools")
    for _ in range(80):
        written = "".join(draw.choices(PIECES, k=draw.randrange(1, 25)))
        start = draw.randrange(len(written))
        stop = written[start : start + draw.randrange(1, 5)]
        for stops in ([], [stop], [stop, "🌍\n"]):
            whole = answers(loaded, written, stops, 1000, format)
            for step in (1, 3):
                assert answers(loaded, written, stops, step, format) == whole
            if "<think>" not in written:
                ends = [(written.find(s) + len(s), len(s)) for s in stops if s in written]
                end, stopped = min(ends, default=(len(written), 0))
                assert whole[0] == written[: end - stopped]


@EACH_REPLY
def test_streams_equal_full_answers_with_a_stop_string_anywhere(loaded: Any, reply: Reply) -> None:
    for start in range(0, len(reply.written) - 3, 5):
        given = (loaded, reply.written, [reply.written[start : start + 3]])
        whole = answers(*given, 10_000, format_of(reply.parser))
        assert answers(*given, 1, format_of(reply.parser)) == whole
        assert whole[-1] in ("stop", "tool_calls")
