"""Takes requests in: each waits for its grammar, then for its adapter, then for a slot."""

from __future__ import annotations

from engine.adapters.queue import AdapterQueue, AdapterRead
from engine.grammar.compiled import CompiledGrammar
from engine.grammar.compiler import CompileOutcome
from engine.grammar.queue import GrammarQueue
from engine.scheduler import Scheduler
from engine.scheduler.sequences.sequence import Sequence, Status
from shared import wire


class Intake:
    """Gives sequences what they need before they may have a slot.

    The scheduler knows a sequence, with its status, from the arrival of the request on: there it
    is aborted, dropped and listed. Used by the main thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarQueue,
        adapters: AdapterQueue[Sequence],
    ) -> None:
        self.scheduler, self.grammars, self.adapters = scheduler, grammars, adapters

    def submit(self, request: wire.Submit) -> None:
        """Accept or refuse a request, at once or later. `Scheduler.take_outputs` then returns
        `Accepted` and deltas, or `Refused`."""
        if (seq := self.scheduler.receive(request)) is None:
            return
        if request.grammar is None:
            self._find_adapter(seq)
        else:
            self._on_grammar(seq, self.grammars.find(seq))

    def on_compiled(self, grammar: wire.Grammar, outcome: CompileOutcome) -> None:
        """Go on with the sequences that wait for ``grammar``."""
        for seq, found in self.grammars.on_compiled(grammar, outcome):
            self._on_grammar(seq, found)

    def on_read(self, done: AdapterRead) -> wire.AdapterChecked | None:
        """Accept an adapter that was read. Return the answer to a router that asked about it."""
        if done.check is not None:
            return self.adapters.checked(done.check, done)
        for seq, refused in self.adapters.on_read(done):
            self.scheduler.refuse(seq, refused)
        return None

    def place_adapters(self) -> set[int]:
        """Go on with the sequences whose adapters have places now. Requests of batches give a place
        back if another request needs it. Return the places that are in use then."""
        sequences = self.scheduler.sequences
        for seq, found in self.adapters.take(*sequences.adapters):
            self._on_adapter(seq, found)
        if self.adapters.wanted_place is not None:
            for seq in self.scheduler.withdraw(self.adapters.wanted_place):
                self._find_adapter(seq)
        return sequences.adapters[0]

    def close(self) -> None:
        self.grammars.close()
        self.adapters.close()

    def _on_grammar(self, seq: Sequence, found: CompiledGrammar | wire.Refused | None) -> None:
        if isinstance(found, wire.Refused):
            self.scheduler.refuse(seq, found)
        elif found is not None:
            seq.grammar = found
            self._find_adapter(seq)

    def _find_adapter(self, seq: Sequence) -> None:
        seq.status = Status.AWAITING_ADAPTER
        self._on_adapter(seq, self.adapters.find(seq))

    def _on_adapter(self, seq: Sequence, found: int | wire.Refused | None) -> None:
        if isinstance(found, wire.Refused):
            self.scheduler.refuse(seq, found)
        elif found is not None:
            self.scheduler.enqueue(seq, found)
