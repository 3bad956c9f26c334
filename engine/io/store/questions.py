"""Questions to the kvstore whose answer is one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from shared import wire

Question = wire.Has | wire.FindLast


class Questions:
    """Open questions by ticket. Used on the IO thread only.

    ``send`` sends a question or returns False. Questions asked before the kvstore is ready wait for
    `send_waiting`. Each is answered once, with None if the kvstore is unavailable.
    """

    def __init__(self, send: Callable[[wire.Message], bool]) -> None:
        self._send = send
        self._tickets = count(1)
        self._open: dict[int, _Open] = {}

    def ask(
        self,
        make: Callable[[int], Question],
        on_done: Callable[[int | None], None],
        *,
        deadline: float,
        now: bool,
    ) -> None:
        """Ask the question that ``make`` returns for a ticket, immediately or with the next
        `send_waiting`."""
        ticket = next(self._tickets)
        self._open[ticket] = _Open(make(ticket), on_done, deadline)
        if now:
            self._send_one(ticket)

    def send_waiting(self) -> None:
        for ticket, question in list(self._open.items()):
            if not question.is_sent:
                self._send_one(ticket)

    def answer(self, ticket: int, found: int | None) -> None:
        question = self._open.pop(ticket, None)
        if question is not None:
            question.on_done(found)

    def expire(self, now: float) -> bool:
        """Answer the questions that have timed out. Return whether one of them was sent to the
        kvstore."""
        unanswered = False
        for ticket, question in list(self._open.items()):
            if now >= question.deadline:
                unanswered = unanswered or question.is_sent
                self.answer(ticket, None)
        return unanswered

    def drop_all(self) -> None:
        for ticket in list(self._open):
            self.answer(ticket, None)

    def _send_one(self, ticket: int) -> None:
        self._open[ticket].is_sent = True
        if not self._send(self._open[ticket].message):
            self.answer(ticket, None)


@dataclass(eq=False)
class _Open:
    message: Question
    on_done: Callable[[int | None], None]
    deadline: float
    is_sent: bool = False
