"""The passes in which a plan's decodes are computed, and the verification of drafts.

A decode with k drafts has k + 1 rows of logits. For sampling each row is a separate decode, so
penalties, grammars and log-probabilities need not handle drafts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec

from engine.batch.ragged import RaggedBatch, Row
from engine.cache.slots import Slots
from engine.cache.states import KeptStates
from engine.plan import Decode


class DecodeRows(NamedTuple):
    """The rows of logits of a plan's decodes, ordered by slot."""

    decodes: list[Decode]
    """One decode per row, as if each came in its own step, after the drafts before it were
    accepted."""
    order: list[int]  # for each row, the index of the plan's decode

    @classmethod
    def of(cls, decodes: Sequence[Decode]) -> DecodeRows:
        order = sorted(range(len(decodes)), key=lambda i: decodes[i].slot)
        if not any(decode.drafts for decode in decodes):
            return cls([decodes[i] for i in order], order)
        rows = [(row, i) for i in order for row in _rows_of(decodes[i])]
        return cls([row for row, _ in rows], [i for _, i in rows])

    def by_decode(self) -> list[range]:
        """Return the rows of each decode."""
        found, start = [], 0
        for _, members in groupby(self.order):
            end = start + len(list(members))
            found.append(range(start, end))
            start = end
        return found

    def runs(self, tokens: Sequence[int], unverified: Collection[int]) -> list[range]:
        """Return the rows that form the run of each decode: rows whose preceding drafts were all
        sampled, as among ``tokens`` (rows,). ``unverified`` rows are in no run."""
        return [range(rows.start, self._end(rows, tokens, unverified)) for rows in self.by_decode()]

    def _end(self, rows: range, tokens: Sequence[int], unverified: Collection[int]) -> int:
        for row in rows[1:]:
            if tokens[row - 1] != self.decodes[row].token_id or row in unverified:
                return row
        return rows.stop


def _rows_of(decode: Decode) -> list[Decode]:
    if not decode.drafts:
        return [decode]
    first = msgspec.structs.replace(decode, drafts=())
    rows = [first]
    for number, token in enumerate(decode.drafts, 1):
        rows.append(
            msgspec.structs.replace(
                first,
                position=decode.position + number,
                token_id=token,
                output_index=decode.output_index + number,
                history=None,
                grammar=None,
                before=(),
            )
        )
    return rows


@dataclass(frozen=True, eq=False)
class DecodePasses:
    """Computes decodes, in as few passes as the model allows."""

    model: Any
    slots: Slots
    batch: Callable[[Sequence[Row]], RaggedBatch]
    one_row: bool  # whether each row needs its own pass
    pads: bool  # whether rows of uneven width may share a pass
    has_states: bool  # whether the model has recurrent layers
    send: Callable[[list[Any]], None]
    """Dispatches the arrays of one of several passes."""

    def logits(self, rows: DecodeRows, inputs: mx.array) -> tuple[mx.array, list[mx.array]]:
        """Return the logits (rows, vocab) for ``inputs`` (rows,), and the new states. If there
        are several passes, they are dispatched here, one after the other."""
        passes = self._passes(rows)
        logits: list[mx.array] = []
        for members in passes:
            batch, given = self._batch_of(rows, members, inputs)
            logits.append(batch.packed_logits(self.model, given))
            states = batch.commit_states()
            if len(passes) == 1:
                return logits[0], states
            self.send([logits[-1], states, self.slots.contents])
        places = [row for members in passes for member in members for row in member]
        back = mx.array(sorted(range(len(places)), key=places.__getitem__))
        return mx.concatenate(logits)[back], []

    def rewind(
        self, rows: DecodeRows, inputs: mx.array, runs: Sequence[range], kept: KeptStates
    ) -> None:
        """Restore the states of slots with rejected drafts to those after their ``runs``: start
        from the states ``kept`` before the pass, and compute the inputs of the run again."""
        wrong = [
            run for run, all_rows in zip(runs, rows.by_decode(), strict=True) if run != all_rows
        ]
        slots = [rows.decodes[run.start].slot for run in wrong]
        self.send(self.slots.states.put_back(kept, slots))
        for run in wrong:
            batch, given = self._batch_of(rows, [run], inputs)
            batch.logits(self.model, given, kv_only=True)
            self.send([batch.commit_states(), self.slots.contents])

    def _batch_of(
        self, rows: DecodeRows, members: Sequence[range], inputs: mx.array
    ) -> tuple[RaggedBatch, mx.array]:
        """Return the batch of ``members``, each consecutive rows of one slot, and its part of
        ``inputs``: (batch, width), padded, after the known tokens before them."""
        firsts = [rows.decodes[member.start] for member in members]
        batch = self.batch(
            [
                Row(
                    first.slot,
                    first.position - len(first.before),
                    first.position + len(member),
                    first.shift,
                    first.adapter,
                )
                for first, member in zip(firsts, members, strict=True)
            ]
        )
        if batch.width == 1 and len(members) == len(inputs):
            return batch, inputs[:, None]
        known = [token for first in firsts for token in first.before]
        if known:
            inputs = mx.concatenate([inputs, mx.array(known, inputs.dtype)])
        places, sampled = [], list[int]()
        count, start = 0, len(inputs) - len(known)
        for first, member in zip(firsts, members, strict=True):
            begin, start = start, start + len(first.before)
            its = [*range(begin, start), *member]
            sampled += range(count + len(first.before), count + len(its))
            count += len(its)
            places.append(its + its[-1:] * (batch.width - len(its)))
        if known:
            batch.sampled = sampled
        return batch, inputs[mx.array(places)]

    def _passes(self, rows: DecodeRows) -> list[list[range]]:
        """Return the rows of each decode, by pass.

        Drafts are computed like chunks: alone if padding would change the state, or if masks
        have one row. With recurrent layers a row at position 0 is alone too, because some do not
        start with zeros."""
        everything = rows.by_decode()

        def is_alone(member: range) -> bool:
            begins = self.has_states and rows.decodes[member.start].position == 0
            return self.one_row or begins or (len(member) > 1 and not self.pads)

        alone = [[member] for member in everything if is_alone(member)]
        others = [member for member in everything if not is_alone(member)]
        return [*alone, others] if others else alone
