"""The server behind the backend: one of its own for each model, or one already running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import httpx

from services.processes.listener import listen
from services.supervision import own_server

_POLL_S = 0.1
_STOP_WITHIN_S = 30.0
"""Time after which a server that was told to stop is killed."""
_READ_BYTES = 65536
_KEPT_BYTES = 2000
"""Number of lines of output kept for the error if it exits."""
_KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"


class LoadFailed(Exception):
    """The model cannot be served; the message is the reason."""


class ModelServer(ABC):
    """A server of our API, and the name of the model in it."""

    model: str

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No limit on connections: the server's own limits apply.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False
        )

    @property
    @abstractmethod
    def trouble(self) -> str | None:
        """The reason why it cannot serve any more; None if it can, as far as known."""

    async def close(self) -> None:
        await self.client.aclose()


class JoinedServer(ModelServer):
    """A server that someone else starts and stops."""

    @property
    def trouble(self) -> None:
        return None

    async def find(self, model: str) -> None:
        """Use ``model`` of the server, which may be an adapter, or its only model. Raises:
        `LoadFailed`."""
        try:
            answer = await self.client.get("/v1/models")
            answer.raise_for_status()
            cards = answer.json()["data"]
            names = [each["id"] for each in cards]
            models = [each["id"] for each in cards if not each.get("parent")]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise LoadFailed(f"no server answers at {self.client.base_url}: {error}") from None
        if model not in names and len(models) != 1:
            raise LoadFailed(f"the server has no model {model!r}; it has {', '.join(names)}")
        self.model = model if model in names else models[0]


class OwnServer(ModelServer):
    """A server for one model, at a local address with a key that only this process has. It exits
    when this process does, for whatever reason."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, key: str) -> None:
        super().__init__(f"http://127.0.0.1:{port}", key)
        self._process = process
        self._link: socket.socket | None = None
        self._written = b""
        self._reading = asyncio.create_task(self._pass_on_output())

    @classmethod
    async def start(cls, model: str, flags: Sequence[str]) -> OwnServer:
        """Raises: `LoadFailed` if the flags are invalid for such a server."""
        try:
            own_server.check(flags)
        except own_server.OwnServerFailed as error:
            raise LoadFailed(str(error)) from None
        key = secrets.token_urlsafe(32)
        link, child_end = socket.socketpair()
        with listen("127.0.0.1", 0) as http, child_end:
            command, started = own_server.arguments(flags, http, child_end, **{_KEY_VARIABLE: key})
            process = await asyncio.create_subprocess_exec(
                *command,
                **started,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            server = cls(process, http.getsockname()[1], key)
        server._link, server.model = link, model
        return server

    async def wait_ready(self) -> None:
        """Raises: `LoadFailed` once it has exited."""
        while self.trouble is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await self.client.get("/readyz", timeout=5)).status_code == 200:
                    return
            await asyncio.sleep(_POLL_S)
        await self._reading
        raise LoadFailed(self.trouble)

    @property
    def trouble(self) -> str | None:
        code = self._process.returncode
        if code is None:
            return None
        return (
            f"the server exited with code {code}: {self._written.decode(errors='replace')}".strip()
        )

    async def close(self) -> None:
        """Stop the server, and kill it if it does not stop."""
        await super().close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_WITHIN_S)
        except TimeoutError:
            self._process.kill()  # its children exit with the link to it
            await self._process.wait()
        await self._reading
        if self._link is not None:
            self._link.close()

    async def _pass_on_output(self) -> None:
        """Copy the server's output to our standard error, which LocalAI logs."""
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(_READ_BYTES):
            self._written = (self._written + data)[-_KEPT_BYTES:]
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), data)
