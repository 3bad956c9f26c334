"""Names that stand for the addresses of several routers."""

from __future__ import annotations

import time

import pytest

from shared.network.named_address import NameWatch, look_up


def test_a_name_is_all_of_its_addresses() -> None:
    assert look_up("dns+tcp://localhost:5555") == {"tcp://127.0.0.1:5555"}
    assert look_up("dns+tcp://[::1]:5555") == {"tcp://[::1]:5555"}


def test_a_name_that_is_not_found_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tries = 0

    def count(address: str) -> frozenset[str]:
        nonlocal tries
        tries += 1
        if tries % 2:
            return look_up("dns+tcp://localhost:1")
        return look_up("dns+tcp://" + "too-long" * 20 + ":1")

    watch = NameWatch("dns+tcp://routers:1", count, interval_s=0.001)
    watch.start()
    while tries < 6:
        time.sleep(0.01)
    watch.stop()
    watch.join()
    assert watch.found == {"tcp://127.0.0.1:1"}
    assert "cannot look up dns+tcp://routers:1" in caplog.text
