"""The queues in which requests wait for their grammars and for their adapters."""

from __future__ import annotations

from typing import NamedTuple

from engine.adapters.queue import AdapterQueue
from engine.grammar.queue import GrammarQueue
from engine.io.inbox import GrammarCompiled, Inbox
from engine.model.load import LoadedModel
from engine.replica.build import Replica
from engine.replica.grammars import open_grammar_queue


class RequestQueues(NamedTuple):
    grammars: GrammarQueue
    adapters: AdapterQueue

    def close(self) -> None:
        self.grammars.close()
        self.adapters.close()


def open_queues(loaded: LoadedModel, replica: Replica, inbox: Inbox) -> RequestQueues:
    """Return the queues of ``replica``. Their threads put their results into ``inbox``."""
    grammars = open_grammar_queue(
        loaded,
        replica.executor,
        replica.draft_model,
        lambda *done: inbox.put(GrammarCompiled(*done)),
    )
    adapters = AdapterQueue(None, None)
    if replica.adapters is not None:
        adapters = replica.adapters.open_queue(inbox.put)
    return RequestQueues(grammars, adapters)
