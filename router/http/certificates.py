"""TLS certificates are loaded again when their files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NoReturn

from shared.watched_file import stamp

logger = logging.getLogger(__name__)

_POLL_S = 1.0


async def follow_certificate(
    context: ssl.SSLContext, certfile: Path, keyfile: Path | None
) -> NoReturn:
    """Use the certificate in ``certfile`` for new connections whenever it has changed and then been
    stable for a moment. One that cannot be used changes nothing."""
    paths = [path for path in (certfile, keyfile) if path is not None]

    def look() -> list[object]:
        return [stamp(path) for path in paths]

    def check() -> None:
        # A certificate without its key would leave `context` without either.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)

    used = seen = await asyncio.to_thread(look)
    while True:
        await asyncio.sleep(_POLL_S)
        found = await asyncio.to_thread(look)
        settled, seen = found == seen, found
        if not settled or found == used:
            continue
        used = found
        try:
            await asyncio.to_thread(check)
            # Not on a thread: a handshake meanwhile would find a certificate without its key.
            context.load_cert_chain(certfile, keyfile)
        except (ssl.SSLError, OSError) as error:
            logger.error("the TLS certificate stays as it was: %s", error)
        else:
            logger.info("the TLS certificate was loaded again")
