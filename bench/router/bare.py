"""The baseline of the router: `python -m bench.router.bare EVENTS_FILE --port PORT`.

A Starlette application with one handler, on uvicorn with its defaults. It streams events from
memory, at the rate of the engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def create_app(events: list[bytes], rate: float) -> Starlette:
    async def stream(max_tokens: int) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(max_tokens):
            yield events[number % len(events)]
            await asyncio.sleep(began + (number + 1) / rate - loop.time())

    async def complete(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(stream(body["max_tokens"]), media_type="text/event-stream")

    async def ready(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/readyz", ready),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router.bare", description=__doc__)
    parser.add_argument("events", type=Path, help="a JSON list of the texts of events")
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    events = [event.encode() for event in json.loads(options.events.read_text())]
    app = create_app(events, options.rate)
    uvicorn.run(app, port=options.port, log_level="error", access_log=False, backlog=2048)
    return 0


if __name__ == "__main__":
    sys.exit(main())
