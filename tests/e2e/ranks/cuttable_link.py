"""A TCP connection's middle: it forwards, and cuts or silences what it forwards."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct


class CuttableLink:
    """Forwards the connections to a port of its own to another port of this machine."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._may_forward = asyncio.Event()
        self._may_forward.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> int:
        """Reset all connections; return how many ends there were. New ones may be made at once."""
        for writer in self._writers:
            with contextlib.suppress(OSError):
                connection = writer.get_extra_info("socket")
                # With no time to linger, the other side gets a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return len(self._writers)

    def silence(self, *, on: bool) -> None:
        """Keep what is sent, in both directions, until this is undone: as a cable that is out."""
        if on:
            self._may_forward.clear()
        else:
            self._may_forward.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(2**16):
                await self._may_forward.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
