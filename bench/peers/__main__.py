"""`python -m bench.peers`: install other servers, measure them beside this one, write the page."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.peers import page  # noqa: E402
from bench.peers.cells import measure, measured, results_of  # noqa: E402
from bench.peers.environments import PEERS, PeerUnavailable, folder_of, install, version  # noqa: E402

_NO_LIMIT_S = 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--runs", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="forget what was measured")
    parser.add_argument("--install", action="store_true", help="install, and measure nothing")
    parser.add_argument(
        "--seconds",
        type=float,
        default=_NO_LIMIT_S,
        help="begin nothing after so long; the next call goes on (default: until all is there)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page's section")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also stops the servers
    ends, complete = time.monotonic() + options.seconds, True
    peers, reasons = [peer for peer in PEERS if peer.name in options.only], {}
    for peer in peers:
        if options.again:
            for file in results_of(peer).glob("*.json"):
                file.unlink()
        try:
            if options.install:
                install(peer)
            else:
                complete = measure(peer, options.runs, ends) and complete
        except PeerUnavailable as error:
            reasons[peer.name] = str(error)
            print(f"{peer.name} is not here: {error}", file=sys.stderr)
    if options.write is not None:
        found = {peer: cells for peer in peers if (cells := measured(peer))}
        if found:
            versions = {peer: version(peer, folder_of(peer)) for peer in found}
            page.write(options.write, found, versions, reasons)
    if not complete:
        print("not all is measured; the next call goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
