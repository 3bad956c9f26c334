"""The health check of a container: `python deploy/health.py kvstore|URL|engine URL`.

Exits with 0 if the kvstore replies on its socket, or the URL answers with 200, or the URL of a
router's /health lists the engines of this machine as ready.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without http_proxy, which Docker sets in containers: a proxy reaches neither this container nor
the network of its neighbours."""


def main(what: str, url: str = "") -> int:
    try:
        if what == "engine":
            engines_are_ready(url, socket.gethostname().partition(".")[0])
        elif what == "kvstore":
            kvstore_answers()
        else:
            url_answers(what)
    except (OSError, ValueError) as error:  # OSError: base class of zmq's and urllib's errors too
        sys.stderr.write(f"{what}: {error}\n")
        return 1
    return 0


def engines_are_ready(url: str, host: str) -> None:
    """Look for engines named HOST-0, HOST-1, ..., perhaps after the name of their key and a dot."""
    try:
        with DIRECT.open(url, timeout=TIMEOUT_S) as answer:
            health = json.load(answer)
    except urllib.error.HTTPError as error:  # with the same body, where another engine is missing
        health = json.load(error)
    own = [
        engine
        for model in health["models"]
        for engine in model["engines"]
        if engine["name"].rpartition(".")[2].rpartition("-")[0] == host
    ]
    if not own:
        raise OSError(f"no engine of {host} has joined")
    for engine in own:
        if not engine["ready"]:
            raise OSError(f"{engine['name']}: {engine['trouble']}")


def url_answers(url: str) -> None:
    with DIRECT.open(url, timeout=TIMEOUT_S):
        pass


def kvstore_answers() -> None:
    import zmq  # imported here: the check of a URL runs often and should be cheap

    from shared import wire

    with zmq.Context() as context, context.socket(zmq.DEALER) as kvstore:
        kvstore.linger = 0
        kvstore.connect(os.environ["MLX_LM_SERVER_KVSTORE_SOCKET"])
        kvstore.send_multipart(wire.encode(wire.StoreStatsWanted()))
        if not kvstore.poll(round(TIMEOUT_S * 1000)):
            raise TimeoutError("no answer")
        wire.decode(kvstore.recv_multipart(), wire.FromStore)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
