"""The short form of `make abuse`: a few of the list, with limits for a machine that is busy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.abuse.__main__ import WITHOUT_KEYS, abuse, abused_server
from tests.e2e.abuse.attacks import GREEDY

NAMES = (
    "a fence with much whitespace",
    "log-probabilities of prompts",
    "echoes with log-probabilities",
    "200,000 prompts",
    "a prompt of a megabyte",
    "a stored conversation",
    "a pipeline that is left",
    "random framing",
    "trailers without end",
    "a body after its answer",
    "connections that say little",
    "more connections than an address may have",
    "bodies without their last byte",
    "a template that runs away",
    "a template that grows",
)
NAMES_WITHOUT_KEYS = (GREEDY, "bodies without their last byte", "a template that runs away")
SLACK = 10
STALL_S = 1.0


@pytest.mark.slow
def test_no_client_can_hold_up_the_others(tmp_path: Path) -> None:
    with abused_server(tmp_path) as server:
        wrong = abuse(server, NAMES, 0.5, SLACK, STALL_S)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_no_address_can_hold_up_the_others(tmp_path: Path) -> None:
    with abused_server(tmp_path, clients=WITHOUT_KEYS) as server:
        wrong = abuse(server, NAMES_WITHOUT_KEYS, 0.5, SLACK, STALL_S)
    assert not wrong, "\n".join(wrong)
