"""What the status page costs the router: ten viewers of its feed, beside 500 streams.

The CPU time of one process differs by several per cent from one window of time to the next, so the
cost is taken from the router after the streams have ended, with the figures of its engines still
changing, and set in proportion to what it took with them. Both in turn with and without viewers.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bench.router.alone import Load, running_router
from bench.router.clients import HOST, Streams
from engine.model.load import resolve
from shared.descriptors import raise_descriptor_limit

VIEWERS = 10
LOAD = Load(streams=500, seconds=10.0)


def page(model: str, runs: int) -> None:
    """CPU time of ten viewers of the status page, beside a router with 500 streams."""
    raise_descriptor_limit()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as private,
        running_router(Path(private), resolve(model), LOAD) as (port, pid),
    ):
        with closing(Streams(port, LOAD.models)) as streams:
            streams.open(LOAD.streams)
            busy = [_with_and_without(port, pid, streams.read) for _ in range(runs)]
        time.sleep(LOAD.settle_s)
        idle = [_with_and_without(port, pid, time.sleep) for _ in range(runs)]
    cost = statistics.median(viewed - alone for viewed, alone in idle)
    of_streams = statistics.median(alone for _, alone in busy)
    print(f"{VIEWERS} viewers, {LOAD.engines} engines of {LOAD.models} models: {1e3 * cost:.2f} ms")
    print(f"of CPU a second; {LOAD.streams} streams at {LOAD.rate:g} tokens/s take")
    print(f"{1e3 * of_streams:.0f} ms: {cost / of_streams:.2%}. Beside the streams themselves the")
    differences = ", ".join(f"{1e3 * (viewed - alone):+.1f}" for viewed, alone in busy)
    print(f"difference with viewers was {differences} ms a second")


def _with_and_without(port: int, pid: int, wait: Callable[[float], object]) -> tuple[float, float]:
    """Return the CPU time that the router took in a second, with viewers and without."""
    with _viewers(port):
        viewed = _cpu_in_a_second(pid, wait)
    return viewed, _cpu_in_a_second(pid, wait)


def _cpu_in_a_second(pid: int, wait: Callable[[float], object]) -> float:
    wait(LOAD.settle_s)
    before = _cpu_s(pid)
    wait(LOAD.seconds)
    return (_cpu_s(pid) - before) / LOAD.seconds


def _cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process so far; Linux counts it in nanoseconds."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in stats) / 1e9


@contextmanager
def _viewers(port: int) -> Iterator[None]:
    """Keep `VIEWERS` that read the feed on threads of their own."""
    request = b"GET /page/feed HTTP/1.1\r\nHost: localhost\r\n\r\n"
    viewers = [socket.create_connection((HOST, port), timeout=30) for _ in range(VIEWERS)]

    def read(viewer: socket.socket) -> None:
        viewer.sendall(request)
        while viewer.recv(2**20):
            pass

    threads = [threading.Thread(target=read, args=(viewer,)) for viewer in viewers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for viewer in viewers:
            viewer.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for viewer in viewers:
            viewer.close()
