"""Models that come and go while the server runs: downloads, deletions, and how long they stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.supervision.fleet import model_jobs
from services.supervision.fleet.model_jobs import MAX_AT_ONCE
from services.supervision.fleet.pulled import pulled_entry
from shared.settings import Settings
from tests.services.fleet.runner import FleetRun, entry

GB = 10**9


@pytest.fixture
def run() -> FleetRun:
    """A fleet of one model, with memory for two more."""
    return FleetRun.settled(3 * GB, entry("a"))


def ask(run: FleetRun, do: str, target: str, **fields: Any) -> None:
    run.router.messages.append({"do": do, "target": target, **fields})
    run.fleet.update()


def finish(run: FleetRun, code: int, **message: Any) -> None:
    process = run.job_processes[-1]
    process.messages.append(message)
    process.state.exit_code = code
    run.fleet.update()


def pull(run: FleetRun, name: str) -> None:
    ask(run, "pull", name)
    finish(run, 0)


def pulled(run: FleetRun, name: str) -> None:
    pull(run, name)
    run.settle()


def test_a_pulled_model_is_served_beside_the_others_until_it_is_deleted(run: FleetRun) -> None:
    ask(run, "pull", "me/b")
    run.job_processes[0].messages.append({"completed": 5, "total": 10})
    run.fleet.update()
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
    assert set(run.states) == {"a", "c", "me/b"}
    finish(run, 0)
    run.settle()
    assert set(run.states) == {"a", "c"}
    assert run.jobs["me/b"]["kind"] == "delete" and run.jobs["me/b"]["state"] == "done"


def test_a_failed_download_serves_nothing_and_says_why(run: FleetRun) -> None:
    ask(run, "pull", "me/b")
    finish(run, 1, reason="the disk is full")
    job = run.jobs["me/b"]
    assert (job["state"], job["reason"]) == ("failed", "the disk is full")
    assert set(run.states) == {"a"}
    ask(run, "pull", "me/b")
    assert run.jobs["me/b"]["state"] == "running", "it can be tried again"
    assert run.jobs["me/b"]["number"] == 2
    finish(run, -9)
    assert "its process" in run.jobs["me/b"]["reason"]


def test_one_download_is_for_all_and_so_many_run_at_once(run: FleetRun) -> None:
    for number in range(MAX_AT_ONCE):
        for _ in range(2):
            ask(run, "pull", f"me/{number}")
    assert len(run.job_processes) == MAX_AT_ONCE
    ask(run, "pull", "me/more")
    assert "already" in run.jobs["me/more"]["reason"]
    assert run.jobs["me/more"]["state"] == "failed", "later it may work"
    ask(run, "cancel pull", "me/0")
    ask(run, "cancel pull", "nobody")


@pytest.mark.parametrize("name", ["b", "/etc/passwd", "../x", "a/b/c", "http://x/y", ""])
def test_only_names_of_the_hub_are_pulled(run: FleetRun, name: str) -> None:
    ask(run, "pull", name)
    assert run.jobs[name]["state"] == "refused" and not run.job_processes


def test_only_what_was_pulled_is_deleted(run: FleetRun) -> None:
    ask(run, "delete", "a")
    assert "configured model" in run.jobs["a"]["reason"] and not run.job_processes
    assert run.states == {"a": "ready"}


def test_a_model_that_is_served_under_another_name_is_neither_pulled_nor_deleted() -> None:
    own = entry("assistant", model="me/b")
    run = FleetRun.settled(3 * GB, own)
    for name in ("me/b", "Me/B"):
        ask(run, "pull", name)
        assert "assistant" in run.jobs[name]["reason"], name
    assert not run.job_processes
    pulled(run, "me/c")
    for other in (
        entry("assistant", model="me/c"),
        entry("assistant", model="me/b", draft_model_path="me/c"),
    ):
        run.fleet.reconfigure(run.settings, [other])
        run.settle()
        ask(run, "delete", "me/c")
        assert "assistant" in run.jobs["me/c"]["reason"]
        assert set(run.states) == {"assistant", "me/c"}
    assert len(run.job_processes) == 1, "no deletion has begun"


def test_a_model_whose_files_another_is_served_from_by_path_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--me--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    run = FleetRun(3 * GB, [entry("assistant", model=str(tmp_path / "link"))])
    pulled(run, "me/b")
    pulled(run, "me/b2")
    ask(run, "delete", "me/b")
    assert "assistant" in run.jobs["me/b"]["reason"]
    ask(run, "delete", "me/b2")
    assert run.jobs["me/b2"]["state"] == "running"


def test_a_model_that_is_not_deleted_after_all_is_served_as_before() -> None:
    run = FleetRun(4 * GB, [entry("a")])
    pulled(run, "me/b")
    for number in range(MAX_AT_ONCE):
        ask(run, "pull", f"me/more{number}")
    ask(run, "delete", "me/b")
    run.settle()
    assert "already" in run.jobs["me/b"]["reason"]
    assert run.states == {"a": "ready", "me/b": "ready"}
    finish(run, 1)
    log = list(run.log)
    ask(run, "delete", "me/b")
    finish(run, 1, reason="the disk is read-only")
    run.settle()
    assert "read-only" in run.jobs["me/b"]["reason"]
    assert run.states == {"a": "ready", "me/b": "ready"} and run.log == log


def test_a_model_is_not_loaded_while_it_is_deleted() -> None:
    run = FleetRun.settled(4 * GB, entry("a"))
    pull(run, "me/b")
    ask(run, "delete", "me/b")
    assert "starting" in run.jobs["me/b"]["reason"], "it reads the files"
    run.settle()
    ask(run, "keep", "me/b", keep_s=0.0)
    run.settle(**{"me/b": (0, 0.1)})
    assert run.states["me/b"] == "unloaded"
    ask(run, "delete", "me/b")
    run.log.clear()
    run.settle(**{"me/b": (1, 0.0)})
    assert not run.log
    finish(run, 1)
    run.settle(**{"me/b": (1, 0.0)})
    assert run.log == ["+me-b-0"], "it was not deleted after all"


def test_a_download_just_after_a_cancelled_one_is_a_new_one(run: FleetRun) -> None:
    ask(run, "pull", "me/b")
    ask(run, "cancel pull", "me/b")
    assert run.jobs["me/b"]["state"] == "cancelled"
    ask(run, "pull", "me/b")
    assert (run.jobs["me/b"]["state"], run.jobs["me/b"]["number"]) == ("running", 2)
    assert len(run.job_processes) == 1, "the other still has files open"
    finish(run, -9)
    run.fleet.update()
    assert len(run.job_processes) == 2
    finish(run, 0)
    assert run.jobs["me/b"]["state"] == "done"


def test_a_path_of_this_machine_is_not_pulled(
    run: FleetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    ask(run, "pull", "me/b")
    assert "path" in run.jobs["me/b"]["reason"] and not run.job_processes


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.supervision.fleet.fleet.entry_bytes", lambda _: GB // 10)


ONLY_MODEL = entry("a", None, alone=True)
"""It may take all memory, as that of --model."""


@pytest.mark.usefixtures("small_models")
def test_the_only_engine_is_not_restarted_by_the_first_pull_and_the_last_delete() -> None:
    run = FleetRun.settled(2 * GB, ONLY_MODEL)
    pulled(run, "me/b")
    assert run.states == {"a": "ready", "me/b": "unloaded"}
    assert run.log == ["+engine-0"]
    ask(run, "delete", "me/b")
    finish(run, 0)
    run.settle()
    assert run.log == ["+engine-0"]


@pytest.mark.usefixtures("small_models")
def test_the_memory_of_an_engine_counts_until_it_is_exchanged_for_a_smaller_one() -> None:
    run = FleetRun.settled(2 * GB, ONLY_MODEL)
    pulled(run, "me/b")
    run.log.clear()
    run.settle(**{"me/b": (1, 0.0)})
    assert run.states == {"a": "ready", "me/b": "ready"}
    assert run.log == ["+a-0", "-engine-0", ".engine-0", "+me-b-0"]
    budgets = [int(child.spec.command[1]) for child in run.children[1:]]
    assert sum(budgets) <= 2 * GB


@pytest.mark.usefixtures("small_models")
def test_a_model_that_is_added_to_the_file_is_loaded_once_there_is_memory() -> None:
    one, two = entry("a", None), entry("b", None)
    run = FleetRun.settled(2 * GB, one)
    run.log.clear()
    run.fleet.reconfigure(run.settings, [one, two])
    run.settle()
    assert run.log == ["+a-1", "-a-0", ".a-0", "+b-0"]


def test_a_model_is_not_deleted_while_it_is_pulled_again(run: FleetRun) -> None:
    pull(run, "me/b")
    ask(run, "pull", "me/b")
    ask(run, "delete", "me/b")
    assert run.jobs["me/b"]["kind"] == "pull" and "me/b" in run.states


def test_no_more_results_are_kept_than_a_message_holds(run: FleetRun) -> None:
    for number in range(3 * model_jobs.MAX_KEPT):
        ask(run, "pull", f"{number}" + "x" * 500)
    assert len(run.jobs) <= model_jobs.MAX_KEPT + 1
    assert len(json.dumps(run.router.told[-1])) < 256 * 1024


def test_results_are_told_for_a_while(run: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(run, "pull", "b")
    assert run.jobs
    monkeypatch.setattr(model_jobs, "KEPT_S", -1.0)
    run.fleet.update()
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
    run = FleetRun.settled(2 * GB, entry("a", idle_unload_s=60.0))
    ask(run, "keep", "a", keep_s=-1.0)
    run.settle(a=(0, 1000.0))
    assert run.states == {"a": "ready"}
    ask(run, "keep", "a", keep_s=None)
    run.pass_time(1000.0)
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
    run = FleetRun.settled(2 * GB, entry("a", pinned=True))
    ask(run, "keep", "a", keep_s=0.0)
    run.settle(a=(0, 100.0))
    assert run.states == {"a": "ready"}
