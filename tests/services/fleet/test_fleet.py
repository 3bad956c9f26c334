"""Which engines run: models on demand, memory, restarts."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.supervision.fleet.memory import (
    budgets,
    entry_bytes,
    total_bytes,
    weights_bytes,
)
from services.supervision.fleet.model import FleetModel
from services.supervision.launcher import ChildSpec, LaunchedProcess, ProcessState
from services.supervision.managed_child import ManagedChild
from shared import machine_memory
from shared.exits import EXIT_CONFIG, EXIT_FAILED
from shared.settings import ModelEntry, Settings
from tests.services.fleet.runner import FleetRun, entry

GB = 10**9


def test_models_are_loaded_at_the_start_as_far_as_they_fit_pinned_ones_first() -> None:
    run = FleetRun(2 * GB, [entry("a"), entry("b"), entry("c", pinned=True)])
    assert run.log == ["+c-0", "+a-0"]
    run.settle()
    assert run.states == {"a": "ready", "b": "unloaded", "c": "ready"}


def test_five_models_on_memory_for_two_are_all_loaded_when_they_are_asked_in_turn() -> None:
    run = FleetRun.settled(2 * GB, *(entry(name) for name in "abcde"))
    for round_ in range(2):
        for name in "abcde":
            waits = run.states[name] != "ready"
            run.settle(**{**dict.fromkeys("abcde", (0, 1.0)), name: (int(waits), 0.0)})
            assert run.states[name] == "ready", (round_, name)
            assert len(run.engines) <= 2


def test_the_model_that_was_not_used_for_longest_makes_room() -> None:
    run = FleetRun.settled(3 * GB, *(entry(name) for name in "abcd"))
    run.settle(a=(0, 5.0), b=(0, 9.0), c=(0, 1.0), d=(1, 0.0))
    assert run.states == {"a": "ready", "b": "unloaded", "c": "ready", "d": "ready"}


def test_a_model_with_requests_keeps_its_memory_unless_another_waits_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FleetRun.settled(1 * GB, entry("a"), entry("b"))
    run.settle(a=(0, 0.0), b=(3, 0.0))
    assert run.states == {"a": "ready", "b": "unloaded"}
    monkeypatch.setattr("services.supervision.fleet.fleet.TAKEOVER_AFTER_S", -1.0)
    monkeypatch.setattr("services.supervision.fleet.fleet.SHORTEST_STAY_S", -1.0)
    run.settle(a=(0, 0.0), b=(3, 0.0))
    assert run.states == {"a": "unloaded", "b": "ready"}


def test_a_pinned_model_is_never_unloaded_and_what_does_not_fit_beside_it_is_broken() -> None:
    run = FleetRun(2 * GB, [entry("a", pinned=True, idle_unload_s=1.0), entry("b", 1.5)])
    run.settle(a=(0, 100.0), b=(1, 0.0))
    assert run.states == {"a": "ready", "b": "broken"}
    assert run.reason("b").startswith("it needs 1.50 GB of memory")


def test_an_idle_model_is_unloaded_and_loaded_again_when_it_is_asked() -> None:
    run = FleetRun(2 * GB, [entry("a", idle_unload_s=60.0)])
    run.settle(a=(0, 59.0))
    assert run.states == {"a": "ready"}
    run.settle(a=(0, 61.0))
    assert run.states == {"a": "ready"}, "it took a minute to load"
    run.pass_time(61.0)
    run.settle(a=(0, 122.0))
    assert (run.states, run.engines) == ({"a": "unloaded"}, [])
    run.settle(a=(1, 0.0))
    assert run.states == {"a": "ready"}


def test_a_model_that_was_unloaded_is_not_loaded_because_another_has_changed() -> None:
    idle, other = entry("a", idle_unload_s=60.0), entry("b")
    run = FleetRun(2 * GB, [idle, other])
    run.settle(a=(0, 1.0), b=(0, 1.0))
    run.pass_time(61.0)
    run.settle(a=(0, 61.0), b=(0, 61.0))
    changed, more = entry("a", idle_unload_s=60.0, temperature=0.5), entry("b", temperature=0.5)
    for entries in ([idle, more], [changed, more]):
        run.fleet.reconfigure(run.settings, entries)
        run.settle(a=(0, 62.0), b=(0, 62.0))
        assert run.states == {"a": "unloaded", "b": "ready"}
    run.fleet.reconfigure(run.settings, [changed, more, entry("c")])
    run.settle(a=(0, 62.0), b=(0, 62.0))
    assert run.states == {"a": "unloaded", "b": "ready", "c": "ready"}
    run.settle(a=(1, 0.0), b=(0, 62.0), c=(0, 1.0))
    assert run.states["a"] == "ready"


def test_a_restart_starts_each_new_engine_before_the_old_one_drains_one_at_a_time() -> None:
    run = FleetRun.settled(3 * GB, entry("a", engines=2))
    run.log.clear()
    run.router.messages.append({"do": "restart", "target": None})
    run.fleet.update()
    run.fleet.update()
    assert run.log == ["+a-2"], "the old engine stays until the new one is ready"
    run.settle()
    assert run.log == ["+a-2", "-a-0", ".a-0", "+a-0", "-a-1", ".a-1"]
    assert run.router.told[-1]["restarting"] is False


def test_a_restart_asked_for_while_the_engine_before_still_ends_is_not_forgotten() -> None:
    run = FleetRun.settled(3 * GB, entry("a"))
    run.fleet.restart("a")
    run.fleet.update()
    run.make_ready()
    run.fleet.update()
    assert run.child("a-0").retired_until is not None
    run.log.clear()
    run.fleet.restart("a-1")
    run.settle()
    assert run.log == [".a-0", "+a-0", "-a-1", ".a-1"]


def test_settings_that_change_while_the_new_engine_starts_are_not_forgotten() -> None:
    run = FleetRun.settled(3 * GB, entry("a"))
    run.fleet.restart("a")
    run.fleet.update()
    run.log.clear()
    run.fleet.reconfigure(run.settings, [entry("a", temperature=0.5)])
    run.settle()
    assert run.log == ["-a-0", ".a-0", "+a-0", "-a-1", ".a-1"], "a-1 has the old settings"


def test_without_memory_for_both_the_old_engine_drains_first() -> None:
    run = FleetRun.settled(2 * GB, entry("a", engines=2))
    run.log.clear()
    run.router.messages.append({"do": "restart", "target": "a-1"})
    run.settle()
    assert run.log == ["-a-1", ".a-1", "+a-1"]


def test_a_model_whose_new_settings_do_not_fit_is_loaded_on_demand() -> None:
    run = FleetRun.settled(3 * GB, entry("a"), entry("b", 1.5))
    run.log.clear()
    run.fleet.reconfigure(run.settings, [entry("a", 2), entry("b", 1.5)])
    run.settle()
    assert run.log == ["-a-0", ".a-0"] and run.states == {"a": "unloaded", "b": "ready"}
    run.settle(a=(1, 0.0), b=(0, 9.0))
    assert run.states == {"a": "ready", "b": "unloaded"}


def test_a_model_requested_while_a_pinned_one_is_restarted_is_loaded_afterwards() -> None:
    run = FleetRun.settled(2 * GB, entry("a", pinned=True), entry("b", idle_unload_s=1.0))
    run.pass_time(100.0)
    run.settle(b=(0, 100.0))
    assert run.states == {"a": "ready", "b": "unloaded"}
    run.fleet.restart("a")
    run.fleet.update()  # both engines of a
    run.router.state.facts = {"models": {"a": (0, 1.0), "b": (1, 0.0)}}
    run.settle(b=(1, 0.0))
    assert run.states == {"a": "ready", "b": "ready"}


def test_a_restart_ends_where_the_new_engine_cannot_start() -> None:
    run = FleetRun.settled(3 * GB, entry("a", engines=2))
    run.fleet.restart("a")
    for _ in range(3):
        run.fleet.update()
    run.child("a-2").gave_up = "no such model"
    run.settle()
    assert sorted(run.engines) == ["a-0", "a-1"]
    assert run.states == {"a": "ready"}


def test_the_server_goes_on_without_an_engine_that_cannot_be_exchanged_or_started() -> None:
    """Not even the only model's: others of its engines serve."""
    run = FleetRun(2 * GB, [entry("a", engines=2)])
    assert [child.spec.essential for child in run.children[1:]] == [True, False]
    run.settle()
    run.fleet.restart("a-1")
    run.fleet.update()
    run.end_retired()  # there is no memory for both
    run.fleet.update()
    run.child("a-1").gave_up = "no such model"
    run.settle()
    assert run.engines == ["a-0"], "it is not started again and again"
    run.fleet.restart("a")
    run.settle()
    assert sorted(run.engines) == ["a-0", "a-1"]


def test_a_model_that_is_taken_out_during_its_restart_is_gone() -> None:
    run = FleetRun.settled(2 * GB, entry("a"), entry("b"))
    run.fleet.restart("b")
    run.fleet.update()
    run.fleet.reconfigure(run.settings, [entry("a")])
    run.settle()
    assert run.engines == ["a-0"]


def test_the_router_is_told_at_once_which_engine_has_ended_and_whether_that_was_planned() -> None:
    run = FleetRun.settled(2 * GB, entry("a", engines=2))
    killed = run.child("a-0")
    run.fleet.on_exit(killed)
    assert run.router.told[-1] == {"ended": "a-0", "planned": False}
    run.fleet.restart("a-1")
    run.settle()
    assert {"ended": "a-1", "planned": True} in run.router.told


@pytest.mark.parametrize("again", ["restarted", "configured"])
def test_a_model_that_cannot_be_loaded_is_broken_until_it_is_restarted_or_configured_again(
    again: str,
) -> None:
    entries = [entry("a"), entry("b")]
    run = FleetRun(2 * GB, entries)
    run.child("b-0").gave_up = "there is no model at /nowhere/b"
    run.settle(b=(1, 0.0))
    assert run.states == {"a": "ready", "b": "broken"}
    assert run.reason("b") == "there is no model at /nowhere/b"
    assert run.ended_with is None
    if again == "restarted":
        run.fleet.restart("b")
    else:
        run.fleet.reconfigure(run.settings, entries)
    run.settle()
    assert run.states == {"a": "ready", "b": "ready"}


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_FAILED])
def test_the_server_ends_if_no_model_can_be_loaded_for_good_unless_one_has_crashed(
    code: int,
) -> None:
    run = FleetRun(2 * GB, [entry("a"), entry("b")])
    for child, its_code in zip(run.children[1:], (EXIT_CONFIG, code), strict=True):
        child.gave_up, child.exit_code = "why", its_code
    run.fleet.update()
    assert run.ended_with == code


def test_a_model_that_is_given_more_memory_than_there_is_gets_all_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = FleetRun.settled(2 * GB, entry("a", 16.0, alone=True))
    assert (run.states, run.ended_with) == ({"a": "ready"}, None)
    assert (
        "model a gets 2.00 GB of memory, because there is no more (--memory-gb 16)" in caplog.text
    )
    run = FleetRun(2 * GB, [entry("a", 16.0), entry("b", pinned=True)])
    run.settle(a=(1, 0.0), b=(0, 1.0))
    assert run.states == {"a": "broken", "b": "ready"}


def test_models_share_what_their_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(machine_memory, "machine_bytes", lambda: 64 * GB)
    monkeypatch.setattr("sys.platform", "linux")
    assert total_bytes(Settings(), None) == 64 * GB
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes(Settings(), None) == 64 * GB
    (tmp_path / "memory.max").write_text(f"{8 * GB}\n")
    assert total_bytes(Settings(), None) == 8 * GB


def test_engines_that_do_not_fit_are_named(caplog: pytest.LogCaptureFixture) -> None:
    run = FleetRun.settled(2 * GB, entry("a", 1.5, engines=3, alone=True))
    assert run.log == ["+engine-0"]
    assert "model a: 1 of 3 engines fit in memory" in caplog.text


def test_another_configuration_adds_takes_out_and_restarts_models() -> None:
    run = FleetRun.settled(9 * GB, entry("a"), entry("b"), entry("c"))
    run.log.clear()
    run.fleet.reconfigure(run.settings, [entry("a"), entry("b", temperature=0.5), entry("d")])
    run.settle()
    assert run.log == ["-c-0", "+d-0", "+b-1", ".c-0", "-b-0", ".b-0"]
    assert run.states == {"a": "ready", "b": "ready", "d": "ready"}


def write_weights(file: Path, size: int) -> None:
    tensors = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    header = json.dumps({"__metadata__": {"format": "mlx"}, **tensors}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_the_size_of_weights_is_read_from_the_headers_of_files(tmp_path: Path) -> None:
    for number, size in enumerate((300, 50)):
        write_weights(tmp_path / f"model-{number}.safetensors", size)
    assert weights_bytes(str(tmp_path)) == 350
    for header in (b"[1]", b'{"w": {"data_offsets": []}}', 100_000 * b"[", b"\xff" * 20):
        (tmp_path / "model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        assert weights_bytes(str(tmp_path)) is None
    for nowhere in ("no/such-model-at-all", "~no-such-user/model", 5000 * "a"):
        assert weights_bytes(nowhere) is None


def test_the_router_is_told_of_files_once_they_are_here(tmp_path: Path) -> None:
    model = FleetModel(entry("a", model=str(tmp_path / "a")), None)
    assert "directory" not in model.describe()
    (tmp_path / "a").mkdir()
    config = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    model.weights_bytes = 5
    told = model.describe()
    assert told["directory"] == str(tmp_path / "a")
    assert told["takes_images"] == (find_spec("mlx_vlm") is not None)


@pytest.mark.parametrize(("phase", "told"), [("loading", "the hub is down"), ("failed", None)])
def test_the_router_is_told_why_an_engine_tries_again_but_not_that_it_is_about_to_exit(
    phase: str, told: str | None
) -> None:
    """A request would get the wrong error: that the model is still loading."""
    model, child = FleetModel(entry("a"), 5), ManagedChild(ChildSpec(name="a-0", command=()))
    state = ProcessState(started_at=0.0, phase=phase, reason="the hub is down")
    child.process = cast(LaunchedProcess, SimpleNamespace(state=state))
    model.engines.append(child)
    assert (model.state, model.describe()["reason"]) == ("loading", told)


def test_a_draft_model_is_part_of_what_an_engine_loads(tmp_path: Path) -> None:
    for name, size in (("model", 300), ("draft", 40)):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name / "model.safetensors", size)

    def loaded(spec_decode: Any, draft: str) -> int | None:
        model, draft_model = str(tmp_path / "model"), str(tmp_path / draft)
        settings = Settings(model=model, spec_decode=spec_decode, draft_model_path=draft_model)
        return entry_bytes(ModelEntry(settings=settings))

    assert loaded("draft", "draft") == loaded("auto", "draft") == 340
    assert loaded("none", "draft") == 300
    assert loaded("draft", "missing") is None


def test_budgets_divide_the_memory_where_all_fit_and_stay_near_the_weights_otherwise() -> None:
    entries = [entry("a"), entry("b", engines=2)]
    free = [
        type(each)(settings=type(each.settings)(engines=each.settings.engines)) for each in entries
    ]
    assert budgets(entries, [None, None], 100 * GB) == [GB, GB], "as configured"
    assert budgets(free, [10 * GB, 20 * GB], 110 * GB) == [30 * GB, 40 * GB]
    assert budgets(free, [10 * GB, 20 * GB], 60 * GB) == [15 * GB, 30 * GB]
    assert budgets(free, [None, 20 * GB], 60 * GB) == [20 * GB, 30 * GB]
