"""The holders of API keys: what each may use, and how much."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.wire import BACKGROUND_PRIORITY


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """The holder of an API key (or of several with one name), or every client if no keys are set.

    A limit of 0 means no limit.
    """

    name: str = ""
    """Safe to log, and unique. Empty where no keys are set."""
    address: str = ""
    """The address of the client where no keys are set."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    """Max requests that run and wait at once."""
    models: frozenset[str] | None = None
    """The names of the models that may be used; None: all."""
    max_priority: int | None = None
    """The highest priority; None: any."""
    alone: bool = True
    """Whether this is the only tenant. Otherwise capacity is reserved for the others."""
    background: bool = False
    """Whether this is for lines of batches, which use idle capacity only."""

    def in_background(self) -> Tenant:
        """Return this tenant for lines of batches, which have their own limits."""
        return replace(
            self, background=True, requests_per_minute=0, tokens_per_minute=0, concurrency=0
        )

    @property
    def share(self) -> str:
        """The name under which capacity is shared fairly: a key's, or an address without keys."""
        return self.name or self.address

    @property
    def noun(self) -> str:
        """The noun for what tells clients apart, in error messages."""
        return "API key" if self.name else "address"

    @property
    def group(self) -> str:
        """The name under which engines share their work fairly: batches are apart."""
        return f"batches {self.name}" if self.background else self.share

    def may_use(self, names: list[str]) -> bool:
        """Return whether the model called ``names`` may be used."""
        return self.models is None or not self.models.isdisjoint(names)

    def priority(self, asked: int | None) -> int:
        """Return the priority of a request that asks for ``asked``: too high a value is lowered,
        not rejected.

        The answer is the same, and a client does not know the limits of its key.
        """
        if self.background:
            return BACKGROUND_PRIORITY
        wanted = asked or 0
        return wanted if self.max_priority is None else min(wanted, self.max_priority)


ADMINISTRATOR = Tenant(name="(admin)")
"""The holder of the admin key. No API key can have this name."""
EVERYBODY = Tenant()
"""The tenant of all requests if no keys are set."""
