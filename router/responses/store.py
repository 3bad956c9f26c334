"""Earlier responses, kept in bounded memory for those who made them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

from router.errors import NotFound
from router.responses.schemas import InputItem

MAX_RESPONSES = 4096
_OVERHEAD_BYTES = 1024


class _Output(Struct):
    output: list[Raw]


class _Identified(Struct):
    id: str | None = None


@dataclass(eq=False)
class Turn:
    """What was asked and answered, as JSON, after the turn ``before``."""

    key: str
    before: Turn | None
    items: bytes
    """The list of the items that were new."""
    answer: bytes
    holders: int = field(default=0, repr=False)
    """How many keep it in memory: its own entry, and later turns."""

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.answer) + _OVERHEAD_BYTES

    @property
    def asked(self) -> list[Raw]:
        return msgspec.json.decode(self.items, type=list[Raw])

    @property
    def answered(self) -> list[Raw]:
        return msgspec.json.decode(self.answer, type=_Output).output

    def input(self) -> list[Raw]:
        """All that was there when it was answered."""
        *earlier, last = reversed(list(self._chain()))
        found = itertools.chain.from_iterable(turn.asked + turn.answered for turn in earlier)
        return [*found, *last.asked]

    def conversation(self) -> list[InputItem]:
        """All of it, with its answer."""
        items = self.input() + self.answered
        return [msgspec.json.decode(item, type=InputItem) for item in items]

    def ids(self) -> list[str]:
        found = (msgspec.json.decode(item, type=_Identified).id for item in self._own)
        return [each for each in found if each is not None]

    def item(self, item_id: str) -> InputItem:
        for raw in self._own:
            item = msgspec.json.decode(raw, type=InputItem)
            if item.id == item_id:
                return item
        raise KeyError(item_id)

    @property
    def _own(self) -> list[Raw]:
        return self.asked + self.answered

    def _chain(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


class ResponseStore:
    """Responses by key and id. When there are too many, or too large ones, those used longest
    ago go. A turn that later ones build on stays until they are gone, and counts."""

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._entries: OrderedDict[tuple[str, str], Turn] = OrderedDict()
        self._items: dict[tuple[str, str], Turn] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, response_id: str, turn: Turn) -> None:
        self._entries[turn.key, response_id] = turn
        self._hold(turn)
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            _, oldest = self._entries.popitem(last=False)
            self._release(oldest)

    def find(self, key: str, response_id: str, param: str | None = None) -> Turn:
        """Raises `NotFound`, which blames ``param``."""
        turn = self._entries.get((key, response_id))
        if turn is None:
            raise NotFound(
                f"There is no response '{response_id}'. It was not stored or was deleted, belongs"
                " to another key, or made room for newer ones: responses are kept in memory, and"
                " not for ever.",
                param=param,
                code="response_not_found",
            )
        self._entries.move_to_end((key, response_id))
        return turn

    def item(self, key: str, item_id: str) -> InputItem | None:
        turn = self._items.get((key, item_id))
        return None if turn is None else turn.item(item_id)

    def delete(self, key: str, response_id: str) -> None:
        """Raises `NotFound`."""
        self._release(self.find(key, response_id))
        del self._entries[key, response_id]

    def _hold(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                return
            self.size_bytes += turn.size_bytes
            self._items.update(((turn.key, item_id), turn) for item_id in turn.ids())
            turn = turn.before

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.size_bytes -= turn.size_bytes
            for item_id in turn.ids():
                if self._items.get((turn.key, item_id)) is turn:
                    del self._items[turn.key, item_id]
            turn = turn.before
