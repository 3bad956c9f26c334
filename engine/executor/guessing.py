"""Drafts from a model's own head for multi-token prediction.

The head's keys and values are one more layer of the pages. Each pass of the model writes them
for the positions that it computes, from the token at a position and the hidden state of the
previous position. They therefore depend on no later token, and behave like the keys and values
of other layers: sequences share them in pages, and rejected drafts are overwritten. (The report
and vLLM index the same pairs by the hidden state's position. An entry then depends on the next
token, and a page would end with one that the next page's first token decides. Rotation depends
only on differences of positions.)"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import msgspec

from engine.batch.ragged import RaggedBatch, Row
from engine.cache.layout import Layout
from engine.cache.slots import Slots
from engine.executor.decoding import DecodeRows
from engine.executor.hidden import HiddenStates
from engine.mtp.head import MTPHead, embed, last_layer
from engine.plan import Decode, Slot
from engine.sampling.sampler import Sampler

Send: TypeAlias = Callable[[list[Any]], None]


class Wanted(NamedTuple):
    """A request for guesses after the last token of a run."""

    row: int  # of the logits from which that token was sampled
    decode: Decode  # the decode that would have it as its input
    guesses: int


class ModelWithHead:
    """mlx-lm's model with its head. It is called like the model, with one more cache for the
    head."""

    def __init__(self, model: Any, head: MTPHead, states: HiddenStates) -> None:
        self._model, self._head, self._states = model, head, states

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        *own, view = cache
        hidden: mx.array = self._model.model(inputs, own)
        batch: RaggedBatch = view.batch
        states = mx.concatenate([self._states.before(batch.rows), hidden], axis=1)
        self._head(embed(self._model, inputs), states[:, :-1], view)
        batch.also_written += self._states.put(batch.rows, states)
        return last_layer(self._model, hidden)


class _HeadStep:
    """The head alone, called like a model."""

    def __init__(self, model: Any, head: MTPHead, hidden: mx.array) -> None:
        self._model, self._head = model, head
        self.hidden = hidden
        """(batch, 1, dim): before the call, hidden states of the previous positions; after it,
        the head's own."""

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        self.hidden = self._head(embed(self._model, inputs), self.hidden, cache[-1])
        return last_layer(self._model, self.hidden)


class Guesses:
    """Guesses on the device."""

    def __init__(self, order: Sequence[int]) -> None:
        """``order``: for each requested guess, the index of the plan's decode."""
        self._order = order
        self._parts: list[tuple[list[int], mx.array]] = []

    def add(self, members: list[int], tokens: mx.array) -> None:
        """Add the next guess for each of ``members``: ``tokens`` (members,)."""
        self._parts.append((members, tokens))

    def read(self, num_decodes: int) -> tuple[tuple[int, ...], ...]:
        """Wait for the guesses, and return them for each decode of the plan."""
        found: list[tuple[int, ...]] = [()] * num_decodes
        for members, tokens in self._parts:
            for member, token in zip(members, tokens.tolist(), strict=True):
                found[self._order[member]] += (token,)
        return tuple(found)


class Guesser:
    """Guesses the tokens after a step's last ones, by applying the head repeatedly."""

    NAME = "mtp"

    def __init__(
        self, model: Any, head: MTPHead, layout: Layout, batch_class: type[RaggedBatch]
    ) -> None:
        """``layout`` is the layout of the pages, including the head's layer."""
        self._plain, self._head = model, head
        self._layout, self._batch_class = layout, batch_class
        dtype = embed(model, mx.zeros((1, 1), mx.int32)).dtype
        self._states = HiddenStates(model.args.hidden_size, dtype)
        self.model = ModelWithHead(model, head, self._states)
        """Replaces the model."""

    def reset(self, slots: Slots) -> None:
        """Start again, with sequences in ``slots``."""
        self._slots = slots
        self._states.clear()

    def free_slots(self, slots: Iterable[Slot]) -> None:
        """Drop the hidden states of ``slots``."""
        self._states.free_slots(slots)

    def guess(
        self,
        rows: DecodeRows,
        runs: Sequence[range],
        sampled: mx.array,
        sampler: Sampler,
        send: Send,
    ) -> Guesses | None:
        """Guess what follows the ``runs`` of the decodes that request it, given the ``sampled``
        tokens (rows,). None if no decode does.

        Each pass is dispatched with ``send``. ``sampler`` applies to guesses the same noise,
        filters, penalties and grammar as to the samples in their place."""
        wanted = [one for run in runs if (one := self._wanted(rows, run)).guesses > 0]
        if not wanted:
            return None
        found = Guesses([rows.order[one.row] for one in wanted])
        everyone = list(range(len(wanted)))
        alone = self._batch_class.one_row_per_pass
        for members in [[i] for i in everyone] if alone else [everyone]:
            tokens = sampled[mx.array([wanted[i].row for i in members])]
            hidden = self._states.before([_row(wanted[i].decode) for i in members])
            for number in range(max(wanted[i].guesses for i in members)):
                left = [i for i in members if wanted[i].guesses > number]
                if len(left) < len(members):
                    kept = mx.array([members.index(i) for i in left])
                    tokens, hidden, members = tokens[kept], hidden[kept], left
                decodes = [_later(wanted[i].decode, number) for i in members]
                tokens, hidden = self._step(decodes, tokens, hidden, sampler, send)
                found.add(members, tokens)
        return found

    def _wanted(self, rows: DecodeRows, run: range) -> Wanted:
        decode = _later(rows.decodes[run[-1]], 1)
        pages = self._slots.pages
        room = len(self._slots.tables[decode.slot]) * pages.page_tokens - decode.position
        return Wanted(run[-1], decode, min(decode.guesses, room))

    def _step(
        self,
        decodes: list[Decode],
        tokens: mx.array,
        hidden: mx.array,
        sampler: Sampler,
        send: Send,
    ) -> tuple[mx.array, mx.array]:
        """Apply the head once to ``tokens`` (rows,) and the ``hidden`` states (rows, 1, dim) before
        them. Return guesses and the head's hidden states."""
        rows = [_row(decode) for decode in decodes]
        batch = self._batch_class(self._layout, self._slots, rows)
        step = _HeadStep(self._plain, self._head, hidden)
        found = sampler.guess(batch.logits(step, tokens[:, None])[:, -1], decodes, tokens)
        send([found, step.hidden, self._slots.contents])
        return found, step.hidden


def _row(decode: Decode) -> Row:
    return Row(decode.slot, decode.position, decode.position + 1, adapter=decode.adapter)


def _later(decode: Decode, number: int) -> Decode:
    """Return ``decode`` as it would be ``number`` tokens later."""
    if not number:
        return decode
    return msgspec.structs.replace(
        decode,
        position=decode.position + number,
        output_index=decode.output_index + number,
        history=None,
        grammar=None,
    )
