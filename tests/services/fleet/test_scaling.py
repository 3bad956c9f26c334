"""How many engines a model has, by its queue."""

from __future__ import annotations

import pytest

from services.supervision.fleet.scaling import UP_AFTER_S, Scaling
from shared.settings import Settings
from tests.services.fleet.runner import FleetRun, PretendedProcess, entry

GB = 10**9
OPTIONS = Settings(engines=1, max_engines=3, scale_down_s=60.0)


class Load:
    """A model whose engines are ready at once, and its load over time."""

    def __init__(self, options: Settings = OPTIONS) -> None:
        self._options = options
        self._scaling = Scaling(options.engines)
        self._now = 0.0

    def lasts(self, seconds: float, queued: int = 0, busy: float = 0.0, ready: int = 0) -> int:
        """Return how many engines are wanted after ``seconds`` of this load. By default all that
        are wanted are ready."""
        for _ in range(round(seconds / 0.5)):
            self._now += 0.5
            self._scaling.note_load(queued, busy)
            self._scaling.follow(self._options, ready or self._scaling.wanted, self._now)
        return self._scaling.wanted


def test_an_engine_is_added_for_each_time_that_the_queue_stays_long() -> None:
    load = Load()
    assert load.lasts(60, queued=3, busy=1.0) == 1
    assert load.lasts(UP_AFTER_S - 0.5, queued=4, busy=1.0) == 1
    assert load.lasts(0.5, queued=0, busy=1.0) == 1
    assert load.lasts(UP_AFTER_S + 0.5, queued=4, busy=1.0) == 2
    assert load.lasts(60, queued=7, busy=1.0) == 2, "four for each of two"
    assert load.lasts(60, queued=100, busy=1.0) == 3, "the most"


def test_the_next_engine_is_added_once_the_last_one_is_ready() -> None:
    load = Load()
    assert load.lasts(UP_AFTER_S + 0.5, queued=50, busy=1.0) == 2
    assert load.lasts(60, queued=50, busy=1.0, ready=1) == 2
    assert load.lasts(60, queued=50, busy=1.0, ready=2) == 3


def test_engines_end_one_by_one_when_the_others_have_room() -> None:
    load = Load()
    assert load.lasts(60, queued=50, busy=1.0) == 3
    assert load.lasts(600, busy=0.5) == 3, "1.5 of 2 places would be taken"
    assert load.lasts(59, busy=0.4) == 3
    assert load.lasts(1, busy=1.0) == 3
    assert load.lasts(61, busy=0.4) == 2
    assert load.lasts(600, busy=0.0) == 1
    assert load.lasts(600, busy=0.0) == 1, "the fewest"


def test_without_a_maximum_there_are_as_many_as_set() -> None:
    assert Load(Settings(engines=2)).lasts(600, queued=500, busy=1.0) == 2
    assert Load(Settings(engines=2)).lasts(600) == 2


def test_a_fleet_starts_and_ends_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.supervision.fleet.scaling.UP_AFTER_S", 0.0)
    scaled = entry("a", max_engines=2, scale_down_s=0.0)
    run = FleetRun.settled(4 * GB, scaled, entry("b"))
    assert run.engines == ["a-0", "b-0"]
    run.router.state.facts = {"load": {"a": (4, 1.0)}}
    run.fleet.update()
    assert run.log[-1] == "+a-1"
    run.make_ready()
    run.router.state.facts = {"load": {"a": (0, 0.0)}}
    run.fleet.update()
    assert run.log[-1] == "-a-1"


def test_an_engine_that_is_lost_and_started_again_elsewhere_is_told_to_the_router() -> None:
    run = FleetRun.settled(GB, entry("a"))
    (engine,) = (child for child in run.children if child.name == "a-0")
    assert isinstance(engine.process, PretendedProcess)
    engine.process.messages.append({"lost": True})
    run.fleet.update()
    assert {"ended": "a-0", "planned": False} in run.router.told
