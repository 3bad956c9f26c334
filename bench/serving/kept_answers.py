"""Answered questions, and how the answers compare: a file that later calls add to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench.client import Message
from services.measuring.answers import StreamedAnswer


class FirstAnswer(msgspec.Struct, frozen=True, tag="first"):
    """The answer with which all others are compared."""

    number: int  # of the question
    asked: list[Message]
    text: str
    logprobs: list[float]


class Compared(msgspec.Struct, frozen=True, tag="compared"):
    """One answer beside the first. It is kept itself if it differs."""

    model: str  # with the flags of all its servers
    way: str
    number: int
    same_text: bool
    same_bits: bool
    cached_share: float  # of the prompt
    seconds: float  # of its call, divided by the number of questions in it
    error: str = ""
    text: str = ""
    logprobs: list[float] = []


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A question whose blocks a server has written to a directory."""

    model: str
    number: int
    directory: str


Line = FirstAnswer | Compared | Saved


def compared(
    model: str, way: str, first: FirstAnswer, found: StreamedAnswer, seconds: float
) -> Compared:
    """Return the comparison of ``found`` with the ``first`` answer."""
    same_text = not found.error and found.text == first.text
    same_bits = same_text and found.logprobs == first.logprobs
    cached_share = found.cached_tokens / max(1, found.prompt_tokens)
    line = Compared(
        model, way, first.number, same_text, same_bits, cached_share, seconds, found.error or ""
    )
    if same_bits:
        return line
    return msgspec.structs.replace(line, text=found.text, logprobs=found.logprobs)


class KeptAnswers:
    """Lines of a file, and of this call."""

    def __init__(self, path: Path | None) -> None:
        self.first: dict[int, FirstAnswer] = {}
        self.compared: dict[tuple[str, str], dict[int, Compared]] = defaultdict(dict)
        self._saved: dict[str, dict[int, str]] = defaultdict(dict)
        self._path: Path | None = None
        if path is not None and path.exists():
            decoder = msgspec.json.Decoder(Line)
            self.add(*decoder.decode_lines(path.read_bytes()))
        self._path = path

    def add(self, *lines: Line) -> None:
        for line in lines:
            match line:
                case FirstAnswer():
                    self.first[line.number] = line
                case Compared():
                    self.compared[line.model, line.way][line.number] = line
                case Saved():
                    self._saved[line.model][line.number] = line.directory
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.Encoder().encode_lines(lines))

    def missing(self, model: str, way: str, numbers: Iterable[int]) -> list[int]:
        """Return those of ``numbers`` that were not asked in this ``way``."""
        return [number for number in numbers if number not in self.compared[model, way]]

    def saved(self, model: str, numbers: Sequence[int]) -> dict[str, list[int]]:
        """Return directories, each with those of ``numbers`` whose blocks it has."""
        found: dict[str, list[int]] = defaultdict(list)
        for number in numbers:
            if number in self._saved[model]:
                found[self._saved[model][number]].append(number)
        return found
