"""The removal of an engine's blocks and states from a kvstore that may be away."""

from __future__ import annotations

from collections.abc import Callable

from shared import wire

_CERTAIN_AFTER = 2
"""The number of answered probes after which the kvstore has read what was sent before, if it then
has nothing to clear: the first may have been sent earlier, and one is open at a time."""


class CacheClear:
    """Has ``namespaces`` cleared. Used on the IO thread only.

    ``send`` sends a message to the kvstore or returns False. `wire.Clear` has no reply: a kvstore
    that is lost soon after it was sent may not have read it, or not have removed everything, so the
    next one gets it again.
    """

    def __init__(self, namespaces: set[str], send: Callable[[wire.Message], bool]) -> None:
        self._namespaces = namespaces
        self._send = send
        self._is_wanted = False
        self._awaited = 0  # probes that must still be answered; 0: it was not sent

    def request(self) -> None:
        """Clear them now, or once there is a kvstore."""
        self._is_wanted, self._awaited = True, 0
        self.send()

    def send(self) -> None:
        """Send it if it is wanted and was not sent."""
        if self._is_wanted and not self._awaited:
            messages = [wire.Clear(namespace=namespace) for namespace in self._namespaces]
            if all(self._send(message) for message in messages):
                self._awaited = _CERTAIN_AFTER

    def on_probe_answered(self, *, is_clearing: bool) -> None:
        """``is_clearing``: whether the kvstore is still removing what was cleared."""
        if self._awaited and not is_clearing:
            self._awaited -= 1
            self._is_wanted = self._awaited > 0

    def on_disconnected(self) -> None:
        self._awaited = 0
