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
from bench.peers.cells import CELLS, ask, measure, measured, results_of, serving  # noqa: E402
from bench.peers.environments import (  # noqa: E402
    PEERS,
    PeerUnavailable,
    folder_of,
    forget_reason,
    install,
    keep_reason,
    kept_reason,
    version,
)

_NO_LIMIT_S = 1e9


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped too
    ends, complete = time.monotonic() + options.seconds, True
    for peer in (peer for peer in PEERS if peer.name in options.only):
        if options.again:
            forget_reason(peer)
            for file in results_of(peer).glob("*.json"):
                file.unlink()
        try:
            if options.install:
                install(peer)
            elif options.check:
                install(peer)
                with serving(peer) as port:
                    print(f"{peer.name}: {ask(peer, port)!r}", flush=True)
            else:
                complete = measure(peer, options.cells, options.runs, ends) and complete
        except PeerUnavailable as error:
            keep_reason(peer, error)
            print(f"{peer.name} does not run here: {error}", file=sys.stderr, flush=True)
    if options.write is not None and not (options.install or options.check):
        found = {peer: cells for peer in PEERS if (cells := measured(peer))}
        if found:
            versions = {peer: version(peer, folder_of(peer)) for peer in found}
            reasons = {peer.name: reason for peer in PEERS if (reason := kept_reason(peer))}
            page.write(options.write, found, versions, reasons)
    if not complete:
        print("not all is measured; the next call goes on")
    return 0


def _options() -> argparse.Namespace:
    """Return the options; ``cells`` are the chosen ones."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Install other servers, and measure them beside this one. What was measured is "
        "kept, and the next call goes on.",
    )
    names = [peer.name for peer in PEERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some of them")
    kinds = list(page.NAMES)
    parser.add_argument(
        "--workloads", nargs="+", choices=kinds, default=kinds, help="some of the workloads"
    )
    parser.add_argument("--clients", nargs="+", type=int, metavar="N", help="some of the levels")
    parser.add_argument("--runs", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=_NO_LIMIT_S,
        help="begin nothing after so long; the next call goes on (default: until all is there)",
    )
    parser.add_argument(
        "--again", action="store_true", help="forget what was measured, and why some did not run"
    )
    parser.add_argument("--install", action="store_true", help="install, and measure nothing")
    parser.add_argument("--check", action="store_true", help="start each and ask it a question")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page's section")
    options = parser.parse_args()
    options.cells = [
        cell
        for cell in CELLS
        if cell.workload in options.workloads
        and (options.clients is None or cell.clients in options.clients)
    ]
    return options


if __name__ == "__main__":
    sys.exit(main())
