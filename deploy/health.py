"""The health check of a container: `python deploy/health.py kvstore|URL`.

Exits with 0 if the kvstore replies on its socket, or the URL answers with 200.
"""

from __future__ import annotations

import os
import sys
import urllib.request

TIMEOUT_S = 4.0


def main(what: str) -> int:
    try:
        kvstore_answers() if what == "kvstore" else url_answers(what)
    except OSError as error:  # base class of zmq's and urllib's errors too
        sys.stderr.write(f"{what}: {error}\n")
        return 1
    return 0


def url_answers(url: str) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S):
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
    raise SystemExit(main(sys.argv[1]))
