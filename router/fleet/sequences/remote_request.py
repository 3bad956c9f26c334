"""The router's side of a request: from the queue through one or more engines to its end."""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from router.errors import ApiError
from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.sequences.losses import Losses
from router.fleet.tenants.tenant import Tenant
from shared.wire import Abort, AdapterRef, Encode, LiveRequest, Submit, Usage


class RemoteRequestState(enum.Enum):
    WAITING = "waiting"
    """In the queue."""
    PLACED = "placed"
    """Sent to an engine that has not responded yet."""
    ACCEPTED = "accepted"
    STOPPING = "stopping"
    """Ended by a stop string; waits for the engine's final usage."""
    DONE = "done"


class RemoteRequest(ABC):
    """The router's side of a sequence or of texts, from admission to its end."""

    model: ModelReplicas
    """The version of the model that it waits for or runs on. Set when it is admitted."""
    engine: Engine | None = None
    """The engine that it was sent to; None while it waits."""
    prompt_blocks: Mapping[tuple[bytes, int], Sequence[bytes]] = MappingProxyType({})
    """The result of `router.fleet.queue.placement.prompt_blocks`."""
    adapter: AdapterRef | None = None
    """The adapter that it names."""
    payload: Sequence[bytes | memoryview] = ()
    """Raw frames sent with the message of each attempt."""
    computed_prompt_tokens: int | None = None
    """Prompt tokens that this attempt has computed or found, as far as known."""
    is_alone = True
    """Whether it is all of its request. Known once it is admitted."""
    usage: Usage | None = None
    first_token_at: float | None = None
    last_token_at = 0.0

    def __init__(
        self, request_id: str, priority: int, tenant: Tenant, on_change: Callable[[], None]
    ) -> None:
        """``on_change`` is called after every change that a reader may wait for."""
        self.request_id, self.priority, self.tenant = request_id, priority, tenant
        self._on_change = on_change
        self.state = RemoteRequestState.WAITING
        self.attempt = 0
        self.losses = Losses()
        self.error: ApiError | None = None
        self.refusal = ""
        """Why the last engine did not accept it, if it waits for another one since then."""
        self.missed_heartbeats = 0
        self.arrived_at = self.queued_at = time.monotonic()
        self.placed_at = self.first_placed_at = self.stopping_at = 0.0

    @property
    def key(self) -> str:
        """The name of the tenant, for fairness between keys."""
        return self.tenant.share

    @property
    def names_adapter(self) -> bool:
        """Whether it needs an engine that supports adapters."""
        return self.adapter is not None

    @property
    def done(self) -> bool:
        return self.state is RemoteRequestState.DONE

    @property
    def started(self) -> bool:
        """Whether an engine has accepted it, or it is done."""
        return self.state not in (RemoteRequestState.WAITING, RemoteRequestState.PLACED)

    @property
    @abstractmethod
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int:
        return 0

    @property
    def has_output(self) -> bool:
        """Whether the rest must come from the same weights."""
        return self.num_output_tokens > 0

    def next_version(self, *, prefer_successor: bool = False) -> ModelReplicas:
        """Return the version of the model that it continues with (`ModelReplicas.version_for`)."""
        return self.model.version_for(
            has_output=self.has_output,
            has_images=bool(self.payload),
            adapter=self.adapter,
            prefer_successor=prefer_successor,
        )

    @abstractmethod
    def message(self, priority: int) -> Submit | Encode:
        """Return the message of the current attempt."""

    def abort_message(self) -> Abort:
        return Abort(request_id=self.request_id, attempt=self.attempt)

    def place(self) -> None:
        self.state = RemoteRequestState.PLACED
        self.placed_at = time.monotonic()
        self.first_placed_at = self.first_placed_at or self.placed_at
        self.missed_heartbeats = 0
        self.computed_prompt_tokens = None

    def requeue(self) -> None:
        """Queue it again, as a new attempt. Messages about the old attempt are ignored."""
        self.state = RemoteRequestState.WAITING
        self.computed_prompt_tokens = None
        self.attempt += 1
        self.queued_at = time.monotonic()

    def exclude(self, suspended_s: float) -> None:
        """Exclude a time in which nothing could arrive."""
        self.arrived_at += suspended_s
        self.queued_at += suspended_s
        for name in ("placed_at", "first_placed_at", "stopping_at", "last_token_at"):
            if at := getattr(self, name):  # 0: not yet
                setattr(self, name, at + suspended_s)

    def accept(self) -> None:
        if self.state is RemoteRequestState.PLACED:
            self.state = RemoteRequestState.ACCEPTED
            self.refusal = ""
            self._on_change()

    def take_progress(self, live: LiveRequest) -> None:
        """Apply a heartbeat, which contains nothing about texts."""
        del live

    def end(self, usage: Usage | None = None) -> None:
        """End a request that was stopped or released."""
        self.usage = usage or self.usage
        self.state = RemoteRequestState.DONE
        self._on_change()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.state = RemoteRequestState.DONE
        self._on_change()
