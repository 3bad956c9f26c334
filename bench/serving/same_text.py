"""`python -m bench same-text`: how often a question gets the same answer, however it is asked.

Greedy answers of a new server to a crowd are compared with those that the same questions get in
other ways, also one by one, each from real processes over HTTP. The text may be the same while
log-probabilities are not, so both are counted. ``python -m bench same-text --help`` lists the
ways and the choice of questions; what follows ``--`` are flags of all servers. ``--answers`` keeps
what was answered in a file, and blocks in a directory beside it: a later call asks what is missing,
also of another model with the same weights, whose answers are compared with the same first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.client import Message, chat
from bench.servers import kill_engine, running
from bench.serving.kept_answers import Compared, FirstAnswer, KeptAnswers, Saved, compared
from bench.serving.questions import KINDS, ChatQuestion, questions
from services.measuring.answers import StreamedAnswer

TOKENS, QUESTIONS_OF_A_RUN = 96, 6
KILLED_AFTER = 0.3
"""The fraction of a crowd's longest possible answers after which its engine is killed."""
AT_ONCE = 16
"""Questions of a crowd: fewer than a server accepts by default."""
MARGIN = 1.1
"""Time that must be left, beside what the same took before."""
SAVED_S = 2.0
"""Seconds for the last blocks to reach the SSD."""
LITTLE_BLOCKS = 96
"""Blocks of a KV cache too small for a crowd of `--max-batch-size` sequences."""

Asked = list[Message]
Answers = list[StreamedAnswer]


class AskedServer(NamedTuple):
    """A running server."""

    port: int
    pid: int


Ask = Callable[[AskedServer, list[Asked], int], Answers]


def one_by_one(server: AskedServer, asked: list[Asked], tokens: int) -> Answers:
    return [asyncio.run(chat(server.port, each, tokens)) for each in asked]


def all_at_once(server: AskedServer, asked: list[Asked], tokens: int) -> Answers:
    async def crowd() -> Answers:
        return await asyncio.gather(*_asking(server, asked, tokens, _empty(asked)))

    return asyncio.run(crowd())


def _empty(asked: list[Asked]) -> Answers:
    return [StreamedAnswer() for _ in asked]


def _asking(
    server: AskedServer, asked: list[Asked], tokens: int, answers: Answers
) -> list[asyncio.Task[StreamedAnswer]]:
    """Ask everything. Fill ``answers`` as they come."""
    pairs = zip(asked, answers, strict=True)
    return [asyncio.create_task(chat(server.port, one, tokens, into)) for one, into in pairs]


def killed(server: AskedServer, asked: list[Asked], tokens: int) -> Answers:
    """Ask everything at once, and kill the engine meanwhile."""
    answers = _empty(asked)

    async def crowd() -> None:
        running = _asking(server, asked, tokens, answers)
        while sum(len(answer.times) for answer in answers) < KILLED_AFTER * tokens * len(asked):
            if all(each.done() for each in running):
                sys.exit("the answers were too short for an engine to be killed meanwhile")
            await asyncio.sleep(0.01)
        kill_engine(server.pid)
        await asyncio.gather(*running)

    asyncio.run(crowd())
    return answers


@dataclass(frozen=True)
class WayToAsk:
    """A way to ask. It is asked at a new server with ``flags``, or ``on`` another."""

    ask: Ask
    on: str = ""
    flags: tuple[str, ...] = ()

    @property
    def at_once(self) -> int:
        return 1 if self.ask is one_by_one else AT_ONCE


ANSWERED, SSD = "has just answered", "has blocks on SSD"
"""Servers to ask that are not new: one has just answered the question, or another one has."""
NEW, FROM_SSD = "new, all at once", "from SSD, after a restart"
WAYS = {
    "again, one by one": WayToAsk(one_by_one, on=ANSWERED),
    "again, all at once": WayToAsk(all_at_once, on=ANSWERED),
    FROM_SSD: WayToAsk(all_at_once, on=SSD),
    "new, one by one": WayToAsk(one_by_one),
    NEW: WayToAsk(all_at_once),
    "--max-batch-size 1": WayToAsk(all_at_once, flags=("--max-batch-size", "1")),
    "--max-batch-size 16": WayToAsk(all_at_once, flags=("--max-batch-size", "16")),
    "--prefill-chunk-tokens 64": WayToAsk(all_at_once, flags=("--prefill-chunk-tokens", "64")),
    "--prefill-chunk-tokens 1024": WayToAsk(all_at_once, flags=("--prefill-chunk-tokens", "1024")),
    "--spec-decode none": WayToAsk(all_at_once, flags=("--spec-decode", "none")),
    "little memory": WayToAsk(all_at_once, flags=("--num-blocks", str(LITTLE_BLOCKS))),
    "engine killed": WayToAsk(killed),
}


class OutOfTime(Exception):
    """The next question would take longer than there is time."""


@dataclass
class Clock:
    """How long this call may still ask, by how long it took so far."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)
    _slowest: dict[tuple[Ask, int], float] = field(default_factory=dict)

    def before(self, ask: Ask, count: int) -> None:
        """Raise `OutOfTime` unless there is time to ``ask`` so many questions at once."""
        left = self.begun + self.seconds - time.monotonic()
        others = [taken for (_, many), taken in self._slowest.items() if many == count]
        if left < MARGIN * self._slowest.get((ask, count), max(others, default=0.0)):
            raise OutOfTime

    def took(self, ask: Ask, count: int, seconds: float) -> None:
        self._slowest[ask, count] = max(seconds, self._slowest.get((ask, count), 0.0))


def compare(
    model: str,
    count: int,
    kinds: Sequence[str] = tuple(KINDS),
    ways: Sequence[str] = tuple(WAYS),
    tokens: int = TOKENS,
    flags: Sequence[str] = (),
    first: int = 0,
    path: Path | None = None,
    seconds: float = float("inf"),
) -> bool:
    """Print a row for each of the ``ways``. Return whether everything was asked and the same.

    What was answered is kept at ``path``, and not asked again."""
    chosen = dict(zip(range(first, first + count), questions(kinds, first, count), strict=True))
    kept = KeptAnswers(path)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        blocks = Path(scratch) if path is None else path.with_suffix(".blocks")
        asking = AnswersRun(model, tuple(flags), tokens, kept, blocks, Clock(seconds))
        try:
            asking.ask(chosen, ways)
        except OutOfTime:
            print("out of time", flush=True)
    print(f"{'':28}{'texts':>8}{'bits':>13}{'cached':>9}{'time':>10}  kinds with other bits")
    rows = [
        WayOutcome(
            way, {n: kind for n, (kind, _) in chosen.items()}, kept.compared[asking.name, way]
        )
        for way in ways
    ]
    print(*rows, sep="\n", flush=True)
    return all(row.is_same for row in rows)


@dataclass
class WayOutcome:
    """The result of one way to ask."""

    way: str
    kinds: Mapping[int, str]  # of all questions
    found: Mapping[int, Compared]

    @property
    def is_same(self) -> bool:
        """Whether all questions were asked and have the same bits."""
        return all(n in self.found and self.found[n].same_bits for n in self.kinds)

    def __str__(self) -> str:
        lines = [self.found[number] for number in self.kinds if number in self.found]
        count = len(lines)
        texts, bits = sum(one.same_text for one in lines), sum(one.same_bits for one in lines)
        cached = sum(one.cached_share for one in lines) / max(1, count)
        spent = sum(one.seconds for one in lines)
        other = sorted({self.kinds[one.number] for one in lines if not one.same_bits})
        errors = sorted({one.error for one in lines if one.error})
        shares = f"{texts:4d}/{count}  {bits:9d}/{count}  {cached:7.0%}  {spent:6.1f} s"
        return f"{self.way:28}{shares}  {', '.join([*other, *errors])}"


@dataclass
class AnswersRun:
    """Asks what is not in ``kept``."""

    model: str
    flags: tuple[str, ...]
    tokens: int
    kept: KeptAnswers
    blocks: Path  # directories of servers whose blocks others read
    clock: Clock

    @property
    def name(self) -> str:
        return " ".join([self.model, *self.flags])

    def ask(self, chosen: Mapping[int, tuple[str, ChatQuestion]], ways: Sequence[str]) -> None:
        numbers = list(chosen)
        new = [number for number in numbers if number not in self.kept.first]
        again = [way for way in ways if WAYS[way].on == ANSWERED]
        on_ssd = [way for way in ways if WAYS[way].on == SSD]
        saved = {n for found in self.kept.saved(self.name, numbers).values() for n in found}
        here = [
            number
            for number in numbers
            if number not in saved and self._missing([*again, *on_ssd], [number])
        ]
        if new or here:
            self.blocks.mkdir(exist_ok=True)
            directory = tempfile.mkdtemp(dir=self.blocks)
            with self._server(Path(directory), "--ssd-policy", "write_through") as server:
                for piece in _pieces(sorted({*new, *here}), AT_ONCE):
                    if first := {number: chosen[number][1] for number in piece if number in new}:
                        self._first(server, first)
                    if others := [number for number in piece if number not in new]:
                        self._take(NEW, server, others)
                    time.sleep(SAVED_S)
                    self.kept.add(*(Saved(self.name, number, directory) for number in piece))
                    self._again(server, piece, again)
        for directory, found in self.kept.saved(self.name, numbers).items():
            if missing := self._missing([*again, *on_ssd], found):
                with self._server(Path(directory)) as server:
                    for piece in _pieces(missing, AT_ONCE):
                        self._take(FROM_SSD, server, piece)
                        self._again(server, piece, again)
        for way in ways:
            missing = self.kept.missing(self.name, way, numbers)
            if not WAYS[way].on and missing:
                with (
                    tempfile.TemporaryDirectory(prefix="bench-") as scratch,
                    self._server(Path(scratch), *WAYS[way].flags) as server,
                ):
                    self._pieces(way, server, missing)

    @contextmanager
    def _server(self, cache: Path, *flags: str) -> Iterator[AskedServer]:
        command = [sys.executable, "-m", "mlx_lm_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--ssd-cache-dir", str(cache), *self.flags, *flags]
        self.clock.before(all_at_once, AT_ONCE)  # or it would start for nothing
        with running(command, "/readyz") as found:
            yield AskedServer(*found)

    def _first(self, server: AskedServer, chosen: Mapping[int, ChatQuestion]) -> None:
        """Keep the first answers to these questions, or to those that follow an answer."""
        self.clock.before(all_at_once, len(chosen))
        begun = time.monotonic()
        asked = {number: [_user(question.text)] for number, question in chosen.items()}
        talks = {number: one.then for number, one in chosen.items() if one.then}
        answers = all_at_once(server, [asked[number] for number in talks], self.tokens)
        for number, answer in zip(talks, _checked(answers), strict=True):
            asked[number] += [
                {"role": "assistant", "content": answer.text},
                _user(talks[number]),
            ]
        answers = _checked(all_at_once(server, list(asked.values()), self.tokens))
        self.clock.took(all_at_once, len(chosen), time.monotonic() - begun)
        for (number, messages), answer in zip(asked.items(), answers, strict=True):
            self.kept.add(FirstAnswer(number, messages, answer.text, answer.logprobs))

    def _missing(self, ways: Sequence[str], numbers: Sequence[int]) -> list[int]:
        """Return those of ``numbers`` that were not asked in all ``ways``."""
        return [n for n in numbers if any(self.kept.missing(self.name, way, [n]) for way in ways)]

    def _again(self, server: AskedServer, piece: list[int], ways: Sequence[str]) -> None:
        """Ask questions that the server has just answered."""
        for way in ways:
            self._pieces(way, server, self.kept.missing(self.name, way, piece))

    def _pieces(self, way: str, server: AskedServer, numbers: list[int]) -> None:
        for piece in _pieces(numbers, WAYS[way].at_once):
            self._take(way, server, piece)

    def _take(self, way: str, server: AskedServer, numbers: list[int]) -> None:
        """Ask these questions and keep what is found, except errors: they are asked again."""
        ask, count = WAYS[way].ask, len(numbers)
        self.clock.before(ask, count)
        begun = time.monotonic()
        expected = [self.kept.first[number] for number in numbers]
        answers = ask(server, [each.asked for each in expected], self.tokens)
        spent = time.monotonic() - begun
        self.clock.took(ask, count, spent)
        each = spent / count
        found = [
            compared(self.name, way, *pair, each) for pair in zip(expected, answers, strict=True)
        ]
        missing = self.kept.missing(self.name, way, numbers)
        self.kept.add(*(one for one in found if one.number in missing and not one.error))
        same = sum(one.same_bits for one in found)
        if count > 1 or not same:
            errors = ", ".join(sorted({one.error for one in found if one.error}))
            print(f"{way}: {numbers[0]} to {numbers[-1]}: {same} of {count} {errors}", flush=True)


def _pieces(numbers: list[int], count: int) -> list[list[int]]:
    return [numbers[first : first + count] for first in range(0, len(numbers), count)]


def _checked(answers: Answers) -> Answers:
    for answer in answers:
        if answer.error:
            sys.exit(f"a request failed: {answer.error} {answer.detail}")
    return answers


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench same-text", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--questions", type=int, default=4 * QUESTIONS_OF_A_RUN)
    parser.add_argument("--first", type=int, default=0, help="number of the first question")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer, at most")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--answers", type=Path, help="file of what was answered; calls add to it")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which nothing more is asked"
    )
    parser.add_argument("flags", nargs="*", help="of the servers, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped too
    same = compare(
        options.model,
        options.questions,
        options.kinds,
        options.ways,
        options.tokens,
        options.flags,
        options.first,
        options.answers,
        options.seconds,
    )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
