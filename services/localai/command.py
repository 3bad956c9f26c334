"""`mlx-lm-server localai`: a LocalAI backend, over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from services.commands.parser import CommandParser
from shared import logs
from shared.exits import EXIT_FAILED, EXIT_OK, fail

try:
    import grpc

    from services.localai.methods import Backend, service
except ModuleNotFoundError as error:
    if error.name not in ("grpc", "google", "google.protobuf", "httpx"):
        raise
    _missing: str | None = error.name
else:
    _missing = None

logger = logging.getLogger(__name__)

PROG = "mlx-lm-server localai"
TOKEN_VARIABLE = "LOCALAI_GRPC_AUTH_TOKEN"
WATCH_VARIABLE = "LOCALAI_BACKEND_PARENT_WATCH"
KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"
MAX_MESSAGE_BYTES = 50 * 2**20
"""LocalAI's default."""
_GRACE_S = 5.0
"""Max time for running calls to finish when the backend is told to stop."""
_WATCH_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop, or until the program that started this backend is gone."""
    options = parser().parse_args(argv)
    logs.setup("localai", "info", "text")
    if _missing is not None:
        return fail(PROG, f"{_missing} is not installed: install the extra 'localai'", EXIT_FAILED)
    return asyncio.run(_serve(options.addr, options.url))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog=PROG,
        description="Serve LocalAI's gRPC backend interface. Each model that LocalAI loads gets "
        "its own server, which reads its settings from the environment like "
        f"`serve`. ${TOKEN_VARIABLE}: the token that callers must send.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--addr", default="localhost:50051", help="HOST:PORT to listen on (default: %(default)s)"
    )
    made.add_argument(
        "--url",
        default="",
        help=f"use the server running at this URL, with the key in ${KEY_VARIABLE}, and start none",
    )
    return made


async def _serve(address: str, url: str) -> int:
    backend = Backend(url, os.environ.get(KEY_VARIABLE, ""))
    token = os.environ.get(TOKEN_VARIABLE, "")
    server = grpc.aio.server(
        interceptors=[make_token_check(token)] if token else [],
        options=[
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),  # a port in use is then an error
        ],
    )
    server.add_generic_rpc_handlers((service(backend),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        return fail(PROG, f"--addr: cannot listen on {address}", EXIT_FAILED)
    await server.start()
    sys.stdout.write(f"{PROG} ready: port {port}\n")
    sys.stdout.flush()
    await _told_to_stop(os.environ)
    await server.stop(_GRACE_S)
    await backend.close()
    return EXIT_OK


def make_token_check(token: str) -> Any:
    """Return an interceptor that accepts only calls with the bearer ``token``."""

    class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            handler = await continuation(details)
            given = dict(details.invocation_metadata).get("authorization", "")
            if handler is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return handler
            kind = "unary_stream" if handler.response_streaming else "unary_unary"
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            return make(_refuse, handler.request_deserializer, handler.response_serializer)

    return TokenCheck()


async def _refuse(call: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "invalid token")


async def _told_to_stop(environ: Mapping[str, str]) -> None:
    """Wait for SIGTERM or SIGINT, or for the end of LocalAI if it started this process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parent = os.getppid()
    watches = parent > 1 and environ.get(WATCH_VARIABLE, "").lower() not in (
        *("false", "0", "no", "off"),
    )
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), _WATCH_S)
        except TimeoutError:
            if watches and os.getppid() != parent:
                logger.warning("the program that started this backend is gone")
                return


if __name__ == "__main__":
    sys.exit(main())
