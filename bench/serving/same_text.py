"""`python -m bench same-text`: how often a question gets the same answer, however it is asked.

Greedy answers of a new server, one after the other, are compared with those that the same
questions get in other ways, each from real processes over HTTP. The text may be the same while
log-probabilities are not, so both are counted. ``python -m bench same-text --help`` lists the
ways and the choice of questions; what follows ``--`` are flags of all servers. ``--answers`` keeps
the first answers in a file, so that many questions can be asked in several calls, also of another
model with the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.client import Message, chat
from bench.servers import kill_engine, running
from bench.serving.questions import KINDS, ChatQuestion, questions
from services.measuring.answers import StreamedAnswer

TOKENS, QUESTIONS_OF_A_RUN = 96, 6
KILLED_AFTER = 0.3
"""The fraction of a crowd's longest possible answers after which its engine is killed."""
MAX_AT_ONCE = 48
"""Max number of questions at once: fewer than a server accepts by default."""
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
    """Ask `MAX_AT_ONCE` at a time. Fill ``answers`` as they come."""
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(messages: Asked, answer: StreamedAnswer) -> StreamedAnswer:
        async with room:
            return await chat(server.port, messages, tokens, answer)

    return [asyncio.create_task(one(*each)) for each in zip(asked, answers, strict=True)]


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
    """A way to ask. With ``on`` it is asked at the server of that name, after what comes before it
    in `WAYS`; otherwise at a new one with ``flags``."""

    ask: Ask
    on: str = ""
    flags: tuple[str, ...] = ()


FIRST, SSD = "first", "SSD"
NEW = "new, all at once"
WAYS = {
    "again, one by one": WayToAsk(one_by_one, on=FIRST),
    "again, all at once": WayToAsk(all_at_once, on=FIRST),
    "from SSD, after a restart": WayToAsk(all_at_once, on=SSD),
    "new, one by one": WayToAsk(one_by_one),
    NEW: WayToAsk(all_at_once),
    "--max-batch-size 1": WayToAsk(all_at_once, flags=("--max-batch-size", "1")),
    "--max-batch-size 16": WayToAsk(all_at_once, flags=("--max-batch-size", "16")),
    "--prefill-chunk-tokens 64": WayToAsk(all_at_once, flags=("--prefill-chunk-tokens", "64")),
    "--prefill-chunk-tokens 1024": WayToAsk(all_at_once, flags=("--prefill-chunk-tokens", "1024")),
    "--spec-decode auto": WayToAsk(all_at_once, flags=("--spec-decode", "auto")),
    "little memory": WayToAsk(all_at_once, flags=("--num-blocks", str(LITTLE_BLOCKS))),
    "engine killed": WayToAsk(killed),
}


@dataclass
class ComparedWay:
    """The comparison of one way with the first answers."""

    kinds: list[str]
    seconds: float = 0.0
    texts: list[bool] = field(default_factory=list)
    bits: list[bool] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, found: StreamedAnswer, expected: StreamedAnswer) -> None:
        if found.error:
            self.errors.append(found.error)
        self.texts.append(not found.error and found.text == expected.text)
        self.bits.append(self.texts[-1] and found.logprobs == expected.logprobs)

    def __str__(self) -> str:
        count = len(self.texts)
        other = sorted({kind for kind, same in zip(self.kinds, self.bits, strict=True) if not same})
        shares = f"{sum(self.texts):4d}/{count}  {sum(self.bits):9d}/{count}  {self.seconds:6.1f} s"
        return f"{shares}  {', '.join([*other, *self.errors])}"


def compare(
    model: str,
    count: int,
    kinds: Sequence[str] = tuple(KINDS),
    ways: Sequence[str] = tuple(WAYS),
    tokens: int = TOKENS,
    flags: Sequence[str] = (),
    first: int = 0,
    answers: Path | None = None,
) -> bool:
    """Print a row for each of the ``ways``. Return whether everything was the same.

    First answers are read from ``answers`` if there is such a file, and written to it otherwise."""
    asked_kinds, chosen = zip(*questions(kinds, first, count), strict=True)
    outcomes: dict[str, ComparedWay] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        cache = Path(name)
        keeping = (*flags, "--ssd-policy", "write_through")
        print(f"{'':28}{'texts':>8}{'bits':>13}{'time':>10}  kinds with other bits", flush=True)

        def take(way: str, server: AskedServer) -> None:
            begun = time.perf_counter()
            answers = WAYS[way].ask(server, asked, tokens)
            outcome = ComparedWay(list(asked_kinds), time.perf_counter() - begun)
            for found, best in zip(answers, expected, strict=True):
                outcome.add(found, best)
            outcomes[way] = outcome
            print(f"{way:28}{outcome}", flush=True)

        kept = _kept(answers)
        if kept is not None:
            asked, expected = kept
        if kept is None or any(WAYS[way].on for way in ways):
            with _server(model, cache, keeping) as server:
                begun = time.perf_counter()
                if kept is None:
                    asked, expected = _first(server, chosen, tokens)
                    _keep(answers, asked, expected)
                    print(f"{'first':28}{'':21}{time.perf_counter() - begun:8.1f} s", flush=True)
                else:
                    take(NEW, server)
                for way in ways:
                    if WAYS[way].on == FIRST:
                        take(way, server)
                time.sleep(SAVED_S)
        on_ssd = [way for way in ways if WAYS[way].on == SSD]
        if on_ssd:
            with _server(model, cache, keeping) as server:
                for way in on_ssd:
                    take(way, server)
    for way in ways:
        if not WAYS[way].on and way not in outcomes:
            with (
                tempfile.TemporaryDirectory(prefix="bench-") as name,
                _server(model, Path(name), (*flags, *WAYS[way].flags)) as server,
            ):
                take(way, server)
    return all(all(outcome.bits) for outcome in outcomes.values())


@contextmanager
def _server(model: str, cache: Path, flags: Sequence[str]) -> Iterator[AskedServer]:
    command = [sys.executable, "-m", "mlx_lm_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--ssd-cache-dir", str(cache), *flags]
    with running(command, "/readyz") as found:
        yield AskedServer(*found)


def _first(
    server: AskedServer, chosen: Sequence[ChatQuestion], tokens: int
) -> tuple[list[Asked], list[StreamedAnswer]]:
    """Return the messages, with first answers where there is a second question, and the answers."""
    asked: list[Asked] = []
    for question in chosen:
        messages = [_user(question.text)]
        if question.then:
            (answer,) = _checked(one_by_one(server, [messages], tokens))
            messages += [{"role": "assistant", "content": answer.text}, _user(question.then)]
        asked.append(messages)
    return asked, _checked(one_by_one(server, asked, tokens))


def _kept(path: Path | None) -> tuple[list[Asked], Answers] | None:
    """Return the messages and first answers in ``path``, None if there is no such file."""
    if path is None or not path.exists():
        return None
    found = json.loads(path.read_text())
    answers = [StreamedAnswer(text=text, logprobs=scores) for _, text, scores in found]
    return [asked for asked, _, _ in found], answers


def _keep(path: Path | None, asked: list[Asked], answers: Answers) -> None:
    if path is not None:
        found = zip(asked, answers, strict=True)
        path.write_text(json.dumps([(each, got.text, got.logprobs) for each, got in found]))


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
    parser.add_argument("--answers", type=Path, help="file of first answers, for other calls too")
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
    )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
