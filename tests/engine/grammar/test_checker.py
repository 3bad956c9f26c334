"""A process of its own tries grammars out; it may be lost, the engine may not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.grammar.checker import CheckerUnavailable, GrammarChecker
from engine.grammar.compiled import GrammarError, TokenizerSpec
from shared.wire import Grammar
from tests.e2e.server import is_running
from tests.kvstore.blocks import wait_until


def schema(value: object) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value))


def lark(text: str) -> Grammar:
    return Grammar(kind="lark", source=text)


def running(checker: GrammarChecker) -> int:
    """Return the process of ``checker``, after it has checked a grammar."""
    checker.check(lark('start: "a"'))
    assert checker.pid is not None
    return checker.pid


@pytest.fixture(scope="module")
def checker(vocabulary: TokenizerSpec) -> Iterator[GrammarChecker]:
    with closing(GrammarChecker(vocabulary)) as checker:
        yield checker


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "object"}),
        schema({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": [1]}}}),
        Grammar(kind="regex", source=r"(\d+|a/b)"),
        Grammar(kind="regex", source="(a|b)*a(a|b){20}"),
        lark('start: "a" b*\nb: /[0-9]/'),
        schema({"anyOf": [{}, {"type": "string", "minLength": 2, "maxLength": 1}]}),  # one will do
    ],
)
def test_a_grammar_that_compiles_passes(checker: GrammarChecker, grammar: Grammar) -> None:
    checker.check(grammar)


@pytest.mark.parametrize(
    ("grammar", "heavy"),
    [
        (schema({"type": "object"}), False),
        (schema({"const": "lorem ipsum dolor " * 1500}), False),
        (schema({"enum": [f"shelf {i} of the warehouse" for i in range(500)]}), False),
        (Grammar(kind="regex", source="a{200000}"), False),
        (Grammar(kind="regex", source="x[0-9]{1,3}a{200000}"), False),
        (Grammar(kind="regex", source=r"(\w+ ?){1,2000}"), True),
    ],
)
def test_a_grammar_is_heavy_if_random_texts_take_much_time_or_memory(
    checker: GrammarChecker, grammar: Grammar, heavy: bool
) -> None:
    assert checker.check(grammar) is heavy


def test_an_error_in_a_part_names_its_source_and_its_own_lines(checker: GrammarChecker) -> None:
    part = Grammar(kind="lark", source='start: "a"\n  b', param="b")
    whole = Grammar(kind="lark", source='start: "a"', param="a", parts=[lark("start: /a/"), part])
    with pytest.raises(GrammarError, match=r"at 1\(8\): unknown name") as raised:
        checker.check(Grammar(kind="lark", source="start: y", param="a", parts=[lark("start: z")]))
    assert raised.value.source == "start: z"
    with pytest.raises(GrammarError, match=r"^2\(4\): Expected token") as raised:
        checker.check(whole)
    assert raised.value.source == part.source


@pytest.mark.parametrize(
    ("grammar", "where"),
    [
        (schema({"type": "objct"}), "Invalid type: objct"),
        (
            schema({"properties": {"a": {}, "b/c": {"items": {"type": "objct"}}}}),
            "at /properties/b~1c/items: Invalid type: objct",
        ),
        (
            schema(
                {
                    "properties": {"a": {"$ref": "#/$defs/x"}},
                    "$defs": {"x": {"type": "string", "pattern": "(("}},
                }
            ),
            "#/$defs/x",
        ),
        (schema({"type": "object", "propertyNames": {"pattern": "a"}}), "propertyNames"),
        (Grammar(kind="json_schema", source='{"type":'), "line 1 column"),
        (Grammar(kind="json_schema", source='{"items":' * 9000), "recursion limit"),
        (Grammar(kind="json_schema", source="false"), "object schema"),
        (Grammar(kind="regex", source="a("), "unclosed group"),
        (Grammar(kind="regex", source=r"(a)\1"), "backreferences"),
        (lark('start: "a" b\nb: /[0-9]+/ c\n'), "at 2(4): unknown name"),
        (lark("start: " + "(" * 20_000), "too deeply nested"),
        (lark(""), "no start rule"),
        # It compiles, and fails at its first token.
        (
            schema(
                {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}
            ),
            "items",
        ),
    ],
)
def test_the_error_of_a_bad_grammar_says_where_it_is(
    checker: GrammarChecker, grammar: Grammar, where: str
) -> None:
    with pytest.raises(GrammarError) as failure:
        checker.check(grammar)
    assert where in str(failure.value)
    assert "<state>" not in str(failure.value)


def test_a_grammar_that_takes_minutes_is_given_up(vocabulary: TokenizerSpec) -> None:
    with closing(GrammarChecker(vocabulary, time_limit_s=1)) as checker:
        running(checker)
        started = time.monotonic()
        with pytest.raises(GrammarError, match="takes longer") as failure:
            checker.check(schema({"type": "integer", "multipleOf": 9_999_991}))
        assert failure.value.transient
        assert time.monotonic() - started < 60  # it would be four minutes
        running(checker)


def test_a_killed_process_is_replaced(checker: GrammarChecker) -> None:
    pid = running(checker)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: checker.pid is None)
    assert running(checker) != pid


def test_a_process_that_is_killed_while_it_compiles_rejects_no_grammar(
    checker: GrammarChecker,
) -> None:
    pid = running(checker)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert running(checker) != pid


def test_rules_deeper_than_the_stack_end_the_process_and_nothing_else(
    checker: GrammarChecker,
) -> None:
    count = 200_000  # a source far over what a request may have
    deep = "".join(f"a{i}:a{i + 1}\n" for i in range(count))
    with pytest.raises(GrammarError):
        checker.check(lark(f'start: a0\n{deep}a{count}: "x"'))
    running(checker)


def test_a_folder_of_the_same_name_in_the_working_directory_is_not_imported(
    vocabulary: TokenizerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    with closing(GrammarChecker(vocabulary)) as checker:
        assert running(checker)


def test_the_process_ends_when_the_checker_is_closed(vocabulary: TokenizerSpec) -> None:
    checker = GrammarChecker(vocabulary)
    pid = running(checker)
    checker.close()
    assert not is_running(pid)
    with pytest.raises(CheckerUnavailable):
        checker.check(lark('start: "a"'))


def test_a_process_that_fails_in_any_other_way_ends_at_once() -> None:
    """Otherwise each such grammar would be waited for until it counts as too slow."""
    script = """
import queue, sys, threading, time
from contextlib import nullcontext
from types import SimpleNamespace
import msgspec
from engine.grammar import checker
from shared.wire import Grammar
def fail(*args):
    raise MemoryError
checker._fault = fail
grammars = queue.SimpleQueue()
grammars.put(msgspec.msgpack.encode(Grammar(kind="regex", source="a")))
given = (None, grammars, SimpleNamespace(applied=nullcontext), sys.stdout.buffer)
threading.Thread(target=checker._serve, args=given, daemon=True).start()
time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=50, check=False).returncode == 1
