"""How `tests.e2e.chaos` finds that an event loop stands still: on real routers."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tests.e2e.abuse.machine import count_stalls
from tests.e2e.chaos.site import is_waiting_spare
from tests.e2e.chaos.stalls import STALL_S, Sample, stood_still
from tests.e2e.server import serving

CALM = Sample(pids=(1,), stalls=3, late_wakes=5, faults=2)


def test_only_a_delay_without_a_known_reason_is_one() -> None:
    stalled = Sample((1,), 4, 5, 2)
    assert stood_still(deque([CALM, CALM, stalled]))
    assert stood_still(deque([CALM, stalled]))
    assert not stood_still(deque([CALM]))
    assert not stood_still(deque([CALM, CALM, CALM]))
    assert not stood_still(deque([CALM, stalled, stalled])), "each is one once"
    assert not stood_still(deque([CALM, Sample((2,), 4, 5, 2)])), "another process"
    assert not stood_still(deque([CALM, CALM, Sample((1,), 4, 6, 2)])), "the machine stood still"
    assert not stood_still(deque([CALM, CALM, Sample((1,), 4, 5, 3)])), "it was stopped"


def test_a_delay_is_counted_and_a_spare_process_is_known(tiny_model: Callable[..., Path]) -> None:
    with serving(tiny_model("llama"), "--no-ssd", "--spare-engine-after-s", "0.1") as server:
        events = server.stream("abc", 2000)
        next(events)
        assert count_stalls(server.client.get("/metrics").text, STALL_S) == 0
        router = server.kill("router", signal.SIGSTOP)
        time.sleep(2 * STALL_S)
        os.kill(router, signal.SIGCONT)
        assert count_stalls(server.client.get("/metrics").text, STALL_S) == 1
        server.wait_until(lambda: len(server.pids("services.processes.engine")) == 2, 60, "a spare")
        assert sum(map(is_waiting_spare, server.pids("services.processes.engine"))) == 1
        del events
