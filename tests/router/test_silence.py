"""Engines that are silent for a while, and come back."""

from __future__ import annotations

import pytest

from router.fleet.sequences.losses import FORGIVEN_AFTER_TOKENS, MAX_LOSSES, Losses
from shared.wire import Submit
from tests.router.conftest import StartServer, eventually, text_of

CHAT_MODEL = True


@pytest.mark.timeout(120)
def test_an_engine_that_comes_back_was_not_ended_by_its_requests(start_server: StartServer) -> None:
    server = start_server("--restart-wait-s=60", "--first-token-timeout-s=90")
    engine = server.join("hello world", hold_tokens_after=0)
    answer = server.begin("x")
    lost = "is lost: sent no heartbeat"
    for times in (1, 2):
        eventually(lambda: len(engine.running) == 1)
        engine.behaviour.heartbeats = False
        eventually(lambda times=times: server.log.read_text().count(lost) == times)  # type: ignore[misc]
        engine.behaviour.heartbeats = True
        eventually(lambda times=times: len(engine.got(Submit)) == times + 1)  # type: ignore[misc]
    engine.behaviour.hold_tokens_after = None
    assert text_of(answer.result(60)) == "hello world"


def test_only_engines_that_stay_away_are_gone() -> None:
    losses = Losses()
    losses.add("mac", 0, planned=True)
    assert not losses
    for gone, back in (("mac", "mac"), ("mini", "mini"), ("studio", "another")):
        losses.add(gone, 0, planned=False)
        losses.on_return(back)
        assert losses and not losses.are_too_many
    losses.add("mac", 10, planned=False)
    assert losses.are_too_many
    losses.add("mac", 10 + FORGIVEN_AFTER_TOKENS, planned=False)
    assert not losses.are_too_many


def test_no_request_is_tried_for_ever() -> None:
    losses = Losses()
    for number in range(MAX_LOSSES):
        assert not losses.are_too_many
        losses.add("mac" if number % 2 else None, 0, planned=False)
        losses.on_return("mac")
    assert losses.are_too_many
