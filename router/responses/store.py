"""The response store: bounded memory, separate for each API key."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.errors import ContextLengthExceeded, InvalidRequest, NotFound
from router.responses.archive import ArchivedTurn, ResponseArchive
from router.responses.schemas import InputItem

MAX_RESPONSES = 4096
_OVERHEAD_BYTES = 1024
"""Size of Python objects per response."""
_ID_BYTES = 100
_SMALL_ITEM_BYTES = 4096
"""An item that is not searched for images: it counts as text."""


class _Output(Struct):
    output: list[Raw]


class _ItemId(Struct):
    id: str | None = None


class StoredResponse:
    """One turn of a conversation."""

    def __init__(
        self, key: str, previous: StoredResponse | None, input_items: bytes, response: bytes
    ) -> None:
        self.key = key
        """The API key of its request."""
        self.previous = previous
        """The previous turn, which is kept as long as this one."""
        self._input_items = input_items
        """The items of its request, as a JSON list, without those of ``previous``."""
        self.response = response
        """A `ResponseObject` in JSON."""
        self.number = 0
        """Increases with each turn; its key in an archive."""
        self.ref_count = 0
        """Reference count: its entry in the store, and later turns."""
        self.input_ids = _ids(self.new_input)
        self.output_ids = _ids(self.output)
        """The ids of its items, to find one without decoding them all."""
        ids_bytes = _ID_BYTES * (len(self.input_ids) + len(self.output_ids))
        self.size_bytes = len(input_items) + len(response) + ids_bytes + _OVERHEAD_BYTES
        self.image_chars = sum(map(_image_chars, self.new_input))
        """The part of its input's size that is images."""
        self.chain_bytes: int = self.size_bytes + (previous.chain_bytes if previous else 0)
        """Including all earlier turns."""
        self.chain_image_chars: int = self.image_chars + (
            previous.chain_image_chars if previous else 0
        )

    def archived(self, response_id: str | None) -> ArchivedTurn:
        before = None if self.previous is None else self.previous.number
        return ArchivedTurn(
            self.number, self.key, response_id, before, self._input_items, self.response
        )

    @property
    def new_input(self) -> list[Raw]:
        return msgspec.json.decode(self._input_items, type=list[Raw])

    @property
    def output(self) -> list[Raw]:
        return msgspec.json.decode(self.response, type=_Output).output

    @property
    def turns(self) -> Iterator[StoredResponse]:
        """This turn and the earlier ones, latest first."""
        turn: StoredResponse | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    def conversation(
        self, limit_bytes: int, image_chars: int = 0, *, whole: bool
    ) -> list[InputItem]:
        """Return the conversation with its answer. If it has more than ``limit_bytes``, or images
        of more than ``image_chars`` in addition, raise `ContextLengthExceeded` if ``whole``,
        otherwise omit the oldest turns."""
        text_bytes = self.chain_bytes - self.chain_image_chars
        if whole and (text_bytes > limit_bytes or self.chain_image_chars > image_chars):
            raise ContextLengthExceeded(
                f"The conversation has {text_bytes} bytes of text and {self.chain_image_chars} "
                f"of images; the limits are {limit_bytes} and {image_chars}.",
                param="previous_response_id",
            )
        kept: list[list[Raw]] = []
        room, image_room = limit_bytes, image_chars
        for turn in self.turns:
            room -= turn.size_bytes - turn.image_chars
            image_room -= turn.image_chars
            if min(room, image_room) < 0 and kept:
                break
            kept.append(turn.new_input + turn.output)
        return [_decode(item) for items in reversed(kept) for item in items]

    def input_page(
        self, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return at most ``limit`` items of the conversation up to its answer, starting after the
        id ``after``, and whether there are more. Decodes no other turns.

        Raises `InvalidRequest` if there is no item ``after``.
        """
        turns = list(self.turns) if newest_first else list(self.turns)[::-1]
        places = [
            (turn, index)
            for turn in turns
            for index in _in_order(turn.num_input_of(self), newest_first)
        ]
        start = 0
        if after is not None:
            ids = (turn.item_id(index) for turn, index in places)
            start = next((number for number, each in enumerate(ids, 1) if each == after), 0)
            if not start:
                raise InvalidRequest(f"There is no item '{after}'.", param="after")
        found: dict[StoredResponse, list[Raw]] = {}
        page: list[dict[str, Any]] = []
        for turn, index in places[start : start + limit]:
            if turn not in found:
                found[turn] = turn.new_items()
            page.append(msgspec.json.decode(found[turn][index]))
        return page, len(places) > start + limit

    def num_input_of(self, last: StoredResponse) -> int:
        """Return how many of the items are input of ``last``, which is this or a later turn."""
        return len(self.input_ids) + (0 if self is last else len(self.output_ids))

    @property
    def item_ids(self) -> list[str | None]:
        return self.input_ids + self.output_ids

    def item_id(self, index: int) -> str | None:
        """Return one of `item_ids`."""
        num_input = len(self.input_ids)
        return self.input_ids[index] if index < num_input else self.output_ids[index - num_input]

    def new_items(self) -> list[Raw]:
        """Return the items of this turn, parallel to `item_ids`."""
        return self.new_input + self.output


def _in_order(count: int, newest_first: bool) -> range:
    return range(count - 1, -1, -1) if newest_first else range(count)


def _ids(items: Iterable[Raw]) -> list[str | None]:
    return [msgspec.json.decode(item, type=_ItemId).id for item in items]


def _image_chars(item: Raw) -> int:
    return _decode(item).image_chars if len(bytes(item)) > _SMALL_ITEM_BYTES else 0


def _decode(item: Raw) -> InputItem:
    return msgspec.json.decode(item, type=InputItem)


class ResponseStore:
    """Responses by API key and id. When the count or the size is over the limit, the key that has
    most loses its least recently used ones, so that no key can drop those of another that has
    less. A response that later ones build on is kept, and counted, until they are dropped."""

    def __init__(
        self,
        max_bytes: int,
        max_responses: int = MAX_RESPONSES,
        archive: ResponseArchive | None = None,
    ) -> None:
        """Load the turns in ``archive``, and keep it up to date."""
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._entries: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        """By API key and response id, least recently used first."""
        self._items: dict[tuple[str, str], StoredResponse] = {}
        """The turn that contains an item, by API key and item id."""
        self._num_bytes: Counter[str] = Counter()
        """By API key."""
        self._lock = threading.RLock()
        """Guards everything above: responses are written on several threads."""
        self._numbers = itertools.count(1)
        self._archive: ResponseArchive | None = None
        if archive is not None:
            self._load(archive)

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def size_bytes(self) -> int:
        return self._num_bytes.total()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        with self._lock:
            stored.number = next(self._numbers)
            self._entries[stored.key][response_id] = stored
            self._retain(stored)
            if self._archive is not None:
                # A turn that was dropped in the meantime is counted again (`_retain`) and written
                # again.
                for turn in itertools.takewhile(lambda each: each.ref_count == 1, stored.turns):
                    self._archive.add(turn.archived(response_id if turn is stored else None))
            while self.size_bytes > self._max_bytes:
                self._drop_oldest(max(self._num_bytes, key=lambda key: self._num_bytes[key]))
            while len(self) > self._max_responses:
                self._drop_oldest(max(self._entries, key=lambda key: len(self._entries[key])))

    def find(self, key: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response. Raises `NotFound` with ``param``."""
        with self._lock:
            stored = self._entries[key].get(response_id)
            if stored is not None:
                self._entries[key].move_to_end(response_id)
        if stored is None:
            raise NotFound(
                f"There is no response '{response_id}'. It was not stored, was deleted, belongs "
                "to another API key, or was dropped to make room for newer responses.",
                param=param,
                code="response_not_found",
            )
        return stored

    def find_turn(self, key: str, item_id: str) -> StoredResponse | None:
        """Return the turn that contains an item."""
        return self._items.get((key, item_id))

    def delete(self, key: str, response_id: str) -> None:
        """Delete a response. Raises `NotFound`."""
        with self._lock:
            stored = self.find(key, response_id)
            self._forget_id(stored)
            self._release(stored)
            del self._entries[key][response_id]

    def _load(self, archive: ResponseArchive) -> None:
        turns: dict[int, StoredResponse] = {}
        last = 0
        lost: list[int] = []
        for each in archive.load():
            last = each.number
            before = None if each.previous is None else turns.get(each.previous)
            if before is None and each.previous is not None:
                # The archive has dropped the previous turn: without it, this would be another
                # conversation.
                lost.append(each.number)
                continue
            stored = StoredResponse(each.key, before, each.input_items, each.response)
            stored.number = each.number
            turns[each.number] = stored
            if each.response_id is not None:
                self._entries[each.key][each.response_id] = stored
                self._retain(stored)
        self._numbers, self._archive = itertools.count(last + 1), archive
        for number in (*lost, *(number for number, turn in turns.items() if not turn.ref_count)):
            archive.remove(number)

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()

    def _drop_oldest(self, key: str) -> None:
        _, oldest = self._entries[key].popitem(last=False)
        self._forget_id(oldest)
        self._release(oldest)

    def _forget_id(self, stored: StoredResponse) -> None:
        if self._archive is not None and stored.ref_count > 1:
            self._archive.forget_id(stored.number)

    def _retain(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.ref_count += 1
            if stored.ref_count > 1:
                return
            self._num_bytes[stored.key] += stored.size_bytes
            self._items.update(
                ((stored.key, item_id), stored) for item_id in stored.item_ids if item_id
            )
            stored = stored.previous

    def _release(self, stored: StoredResponse | None) -> None:
        while stored is not None:
            stored.ref_count -= 1
            if stored.ref_count:
                return
            self._num_bytes[stored.key] -= stored.size_bytes
            if self._archive is not None:
                self._archive.remove(stored.number)
            for item_id in filter(None, stored.item_ids):
                if self._items.get((stored.key, item_id)) is stored:
                    del self._items[stored.key, item_id]
            stored = stored.previous


class ItemReferences:
    """The stored items that one request refers to, limited to ``limit_bytes`` and images of
    ``image_chars``.

    A reference has some ten bytes, but its item may have a million: without a limit, a request with
    many references to one item could exceed the memory.
    """

    def __init__(
        self, store: ResponseStore, key: str, limit_bytes: int, image_chars: int = 0
    ) -> None:
        self._store = store
        self._key = key
        self._limit_bytes = limit_bytes
        self._room, self._image_room = limit_bytes, image_chars
        self._turns: dict[StoredResponse, dict[str | None, Raw]] = {}

    def find(self, item_id: str) -> InputItem | None:
        """Return an item. Raises `ContextLengthExceeded`."""
        turn = self._store.find_turn(self._key, item_id)
        if turn is None:
            return None
        if turn not in self._turns:
            self._turns[turn] = dict(zip(turn.item_ids, turn.new_items(), strict=True))
        raw = self._turns[turn][item_id]
        item = _decode(raw)
        self._room -= len(bytes(raw)) - item.image_chars
        self._image_room -= item.image_chars
        if min(self._room, self._image_room) < 0:
            raise ContextLengthExceeded(
                f"The items referenced by the input exceed {self._limit_bytes} bytes or the "
                "limit for images.",
                param="input",
            )
        return item
