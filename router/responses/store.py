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


class _StoredOutput(Struct):
    output: list[Raw]


class _ItemId(Struct):
    id: str | None = None


@dataclass(eq=False)
class StoredResponse:
    """What was asked and answered, as JSON, after the response ``previous``."""

    key: str
    previous: StoredResponse | None
    input_items: bytes
    """The list of the items that were new."""
    response: bytes
    ref_count: int = field(default=0, repr=False)
    """How many keep it in memory: its own entry, and later turns."""

    @property
    def size_bytes(self) -> int:
        return len(self.input_items) + len(self.response) + _OVERHEAD_BYTES

    @property
    def new_input(self) -> list[Raw]:
        return msgspec.json.decode(self.input_items, type=list[Raw])

    @property
    def output(self) -> list[Raw]:
        return msgspec.json.decode(self.response, type=_StoredOutput).output

    def full_input(self) -> list[Raw]:
        """All that was there when it was answered."""
        *earlier, last = reversed(list(self._chain()))
        found = itertools.chain.from_iterable(
            stored.new_input + stored.output for stored in earlier
        )
        return [*found, *last.new_input]

    def conversation(self) -> list[InputItem]:
        """All of it, with its answer."""
        items = self.full_input() + self.output
        return [msgspec.json.decode(item, type=InputItem) for item in items]

    def item_ids(self) -> list[str]:
        found = (msgspec.json.decode(item, type=_ItemId).id for item in self._own_items)
        return [each for each in found if each is not None]

    def item(self, item_id: str) -> InputItem:
        for raw in self._own_items:
            item = msgspec.json.decode(raw, type=InputItem)
            if item.id == item_id:
                return item
        raise KeyError(item_id)

    @property
    def _own_items(self) -> list[Raw]:
        return self.new_input + self.output

    def _chain(self) -> Iterator[StoredResponse]:
        stored: StoredResponse | None = self
        while stored is not None:
            yield stored
            stored = stored.previous


class ResponseStore:
    """Responses by key and id. When there are too many, or too large ones, those used longest
    ago go. A response that later ones build on stays until they are gone, and counts."""

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], StoredResponse] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self._entries[stored.key, response_id] = stored
        self._retain(stored)
        while self.size_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            _, oldest = self._entries.popitem(last=False)
            self._release(oldest)

    def find(self, key: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises `NotFound`, which blames ``param``."""
        stored = self._entries.get((key, response_id))
        if stored is None:
            raise NotFound(
                f"There is no response '{response_id}'. It was not stored or was deleted, belongs"
                " to another key, or made room for newer ones: responses are kept in memory, and"
                " not for ever.",
                param=param,
                code="response_not_found",
            )
        self._entries.move_to_end((key, response_id))
        return stored

    def item(self, key: str, item_id: str) -> InputItem | None:
        stored = self._items.get((key, item_id))
        return None if stored is None else stored.item(item_id)

    def delete(self, key: str, response_id: str) -> None:
        """Raises `NotFound`."""
        self._release(self.find(key, response_id))
        del self._entries[key, response_id]

    def _retain(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.ref_count += 1
            if stored.ref_count > 1:
                return
            self.size_bytes += stored.size_bytes
            self._items.update(((stored.key, item_id), stored) for item_id in stored.item_ids())
            stored = stored.previous

    def _release(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.ref_count -= 1
            if stored.ref_count:
                return
            self.size_bytes -= stored.size_bytes
            for item_id in stored.item_ids():
                if self._items.get((stored.key, item_id)) is stored:
                    del self._items[stored.key, item_id]
            stored = stored.previous
