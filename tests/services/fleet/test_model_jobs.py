"""Models that come and go while the server runs: downloads, deletions, and how long they stay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.fleet import model_jobs
from services.fleet.model_jobs import MOST_AT_ONCE, pulled_entry
from shared.settings import Settings
from tests.services.fleet.runner import FleetRun, entry

GB = 10**9


def ask(run: FleetRun, do: str, target: str, **fields: Any) -> None:
    run.router.messages.append({"do": do, "target": target, **fields})
    run.fleet.turn()


def finish(run: FleetRun, code: int, **message: Any) -> None:
    process = run.job_processes[-1]
    process.messages.append(message)
    process.state.exit_code = code
    run.fleet.turn()


def test_a_pulled_model_is_served_beside_the_others_until_it_is_deleted() -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    ask(run, "pull", "me/b")
    run.job_processes[0].messages.append({"completed": 5, "total": 10})
    run.fleet.turn()
    assert (run.jobs["me/b"]["completed"], run.jobs["me/b"]["total"]) == (5, 10)
    assert set(run.states) == {"a"}
    finish(run, 0)
    run.settle()
    assert run.jobs["me/b"]["state"] == "done"
    assert run.states == {"a": "ready", "me/b": "ready"}
    run.fleet.reconfigure(run.settings, [entry("a"), entry("c")])
    run.settle()
    assert set(run.states) == {"a", "c", "me/b"}, "reading the file again takes nothing out"
    ask(run, "delete", "me/b")
    run.settle()
    assert set(run.states) == {"a", "c"}
    finish(run, 0)
    assert run.jobs["me/b"]["kind"] == "delete" and run.jobs["me/b"]["state"] == "done"


def test_a_failed_download_serves_nothing_and_says_why() -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    ask(run, "pull", "me/b")
    finish(run, 1, reason="the disk is full")
    assert (
        run.jobs["me/b"]["state"] == "failed" and run.jobs["me/b"]["reason"] == "the disk is full"
    )
    assert set(run.states) == {"a"}
    ask(run, "pull", "me/b")
    assert run.jobs["me/b"]["state"] == "running", "it can be tried again"
    assert run.jobs["me/b"]["number"] == 2
    finish(run, -9)
    assert "its process" in run.jobs["me/b"]["reason"]


def test_one_download_is_for_all_and_so_many_run_at_once() -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    for number in range(MOST_AT_ONCE):
        for _ in range(2):
            ask(run, "pull", f"me/{number}")
    assert len(run.job_processes) == MOST_AT_ONCE
    ask(run, "pull", "me/more")
    assert "already" in run.jobs["me/more"]["reason"]
    ask(run, "cancel pull", "me/0")
    ask(run, "cancel pull", "nobody")


@pytest.mark.parametrize("name", ["b", "/etc/passwd", "../x", "a/b/c", "http://x/y", ""])
def test_only_names_of_the_hub_are_pulled(name: str) -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    ask(run, "pull", name)
    assert run.jobs[name]["state"] == "failed" and not run.job_processes


def test_only_what_was_pulled_is_deleted() -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    ask(run, "delete", "a")
    assert "configuration" in run.jobs["a"]["reason"] and not run.job_processes
    assert run.states == {"a": "ready"}


def test_a_model_is_not_deleted_while_it_is_pulled_again() -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    ask(run, "pull", "me/b")
    finish(run, 0)
    ask(run, "pull", "me/b")
    ask(run, "delete", "me/b")
    assert run.jobs["me/b"]["kind"] == "pull" and "me/b" in run.states


def test_no_more_results_are_kept_than_a_message_holds() -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    for number in range(3 * model_jobs.MOST_KEPT):
        ask(run, "pull", f"{number}" + "x" * 500)
    assert len(run.jobs) <= model_jobs.MOST_KEPT + 1
    assert len(json.dumps(run.router.told[-1])) < 256 * 1024


def test_results_are_told_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FleetRun(3 * GB, [entry("a")])
    run.settle()
    ask(run, "pull", "b")
    assert run.jobs
    monkeypatch.setattr(model_jobs, "KEPT_S", -1.0)
    run.fleet.turn()
    assert not run.jobs


def test_a_pulled_model_runs_no_code_and_has_no_settings_of_another() -> None:
    settings = Settings(
        model="own",
        trust_remote_code=True,
        chat_template="x",
        draft_model_path="draft",
        kv_bits=4,
        idle_unload_s=60.0,
        given=frozenset({"model", "trust_remote_code", "chat_template", "kv_bits"}),
    )
    pulled = pulled_entry(settings, "me/b")
    found = pulled.settings
    assert (found.model, pulled.id, found.kv_bits, found.idle_unload_s) == ("me/b", "me/b", 4, 60.0)
    assert not found.trust_remote_code and found.chat_template is None
    assert found.draft_model_path is None
    assert not any("trust" in word or "template" in word for word in pulled.arguments())


def test_a_request_says_how_long_a_model_stays() -> None:
    run = FleetRun(2 * GB, [entry("a", idle_unload_s=60.0)])
    run.settle()
    ask(run, "keep", "a", keep_s=-1.0)
    run.settle(a=(0, 1000.0))
    assert run.states == {"a": "ready"}
    ask(run, "keep", "a", keep_s=None)
    run.settle(a=(0, 1000.0))
    assert run.states == {"a": "unloaded"}
    run.settle(a=(1, 0.0))
    ask(run, "keep", "a", keep_s=30.0)
    run.settle(a=(0, 50.0))
    assert run.states == {"a": "ready"}, (
        "its time counts from the request, whatever was told before"
    )
    run.settle(a=(0, 0.0))
    ask(run, "keep", "a", keep_s=0.0)
    run.settle(a=(0, 0.0))
    assert run.states == {"a": "ready"}, "it has requests"
    run.settle(a=(0, 0.1))
    assert run.states == {"a": "unloaded"}
    run.settle(a=(1, 0.0))
    run.settle(a=(0, 59.0))
    assert run.states == {"a": "ready"}, "the next load is as configured"


def test_a_pinned_model_stays_whatever_requests_say() -> None:
    run = FleetRun(2 * GB, [entry("a", pinned=True)])
    run.settle()
    ask(run, "keep", "a", keep_s=0.0)
    run.settle(a=(0, 100.0))
    assert run.states == {"a": "ready"}
