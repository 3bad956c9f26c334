"""All addresses where engines join: a private one, and others over tcp with CURVE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from router.fleet.engines.socket import EngineSocket, EngineSocketError
from shared.network.allow_list import AllowedKey
from shared.network.curve import CurveError, Gatekeeper
from shared.network.named_address import is_named
from shared.wire import Heartbeat, Hello, Message, ToRouter


class EngineSockets:
    """The sockets of a router, used as one.

    A peer's name is the number of its socket, one byte, followed by its routing id. Engines that
    join with a key are named ``KEY'S NAME.THEIR NAME``, so that none can pass for an engine of
    another key.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        curve_dir: Path | None,
        on_message: Callable[[bytes, ToRouter, list[bytes], AllowedKey | None], None],
        on_undecodable: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Bind all of ``addresses``; those over tcp use CURVE if there is a ``curve_dir``.

        ``on_refused`` is called on a thread (see `Gatekeeper`). Raises `EngineSocketError`.
        """
        self._on_message = on_message
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[EngineSocket] = []
        self._gatekeeper: Gatekeeper | None = None
        try:
            if curve_dir is not None and any(_is_tcp(address) for address in addresses):
                self._gatekeeper = Gatekeeper(self._context, curve_dir, on_refused=on_refused)
            for address in addresses:
                if is_named(address):
                    raise EngineSocketError(
                        f"{address} is a form for engines; a router needs tcp://"
                    )
                self._sockets.append(self._bind(address, on_undecodable))
        except CurveError as error:
            self.close()
            raise EngineSocketError(f"--curve-dir: {error}") from None
        except EngineSocketError as error:
            self.close()
            raise EngineSocketError(f"--engine-socket: {error}") from None

    def start(self) -> None:
        """Start receiving on the running loop."""
        if self._gatekeeper is not None:
            self._gatekeeper.start()
        for socket in self._sockets:
            socket.start()

    def close(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def send(self, peer: bytes, message: Message, *payload: bytes | memoryview) -> bool | None:
        """Like `EngineSocket.send`."""
        return self._sockets[peer[0]].send(peer[1:], message, *payload)

    def receive_pending(self) -> None:
        for socket in self._sockets:
            socket.receive_pending()

    def may_serve(self, key: str | None, hello: Hello) -> bool:
        """Return whether an engine that joined with ``key`` may (still) serve its model."""
        if key is None or self._gatekeeper is None:
            return True
        allowed = self._gatekeeper.find_key(key)
        return allowed is not None and allowed.may_serve([hello.model, *hello.aliases])

    def _bind(self, address: str, on_undecodable: Callable[[], None]) -> EngineSocket:
        number = len(self._sockets)

        def on_message(
            peer: bytes, message: ToRouter, payload: list[bytes], key: AllowedKey | None
        ) -> None:
            if key is not None and isinstance(message, Hello | Heartbeat):
                name = f"{key.name}.{message.engine}"
                message = msgspec.structs.replace(message, engine=name)
            self._on_message(bytes([number]) + peer, message, payload, key)

        gatekeeper = self._gatekeeper if _is_tcp(address) else None
        return EngineSocket(self._context, address, on_message, on_undecodable, gatekeeper)


def _is_tcp(address: str) -> bool:
    return address.startswith("tcp:")
