"""The life of batches, with OpenAI's client and a real router."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from services.commands import cli
from tests.router.batches.conftest import ASKED, BatchClient, Body, line
from tests.router.conftest import Server, bearer, error_of, eventually

BOSS = bearer("boss")


def test_a_batch_is_answered_line_by_line(served: BatchClient) -> None:
    names = [f"r{number}" for number in range(20)]
    done = served.run(list(map(line, names)), metadata={"night": "1"})
    assert (done.status, done.metadata) == ("completed", {"night": "1"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert done.error_file_id is None and done.errors is None
    lines = served.lines(done.output_file_id)
    assert [each["custom_id"] for each in lines] == names
    for each in lines:
        assert each["error"] is None and each["id"].startswith("batch_req_")
        response = each["response"]
        assert response["status_code"] == 200 and response["request_id"].startswith("req_")
        assert response["body"]["choices"][0]["text"] == "hello world"
    tokens = sum(each["response"]["body"]["usage"]["completion_tokens"] for each in lines)
    assert done.usage.output_tokens == tokens > 0
    assert done.usage.total_tokens == done.usage.input_tokens + tokens
    for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at"):
        assert getattr(done, name) is not None
    assert done.expires_at == done.created_at + 86400


def test_each_line_is_answered_as_a_request_is(server: Server, served: BatchClient) -> None:
    bodies: dict[str, Body] = {
        "good": {"prompt": "hello", "max_tokens": 3},
        "wrong type": {"prompt": 7},
        "no such model": {"prompt": "hello", "model": "other"},
        "over a limit": {"prompt": "hello", "n": 17},
        "not supported": {"prompt": "hello", "suffix": "x"},
    }
    before = server.metric("batch_lines_total")
    done = served.run([line(name) | {"body": body} for name, body in bodies.items()])
    assert server.metric("batch_lines_total") == before + len(bodies)
    assert server.metric("batches_unfinished") == 0
    assert done.status == "completed" and done.request_counts.failed == 4
    files = [done.output_file_id, done.error_file_id]
    found = {each["custom_id"]: each["response"] for one in files for each in served.lines(one)}
    assert found.keys() == bodies.keys()
    for name, body in bodies.items():
        answer = server.client.post("/v1/completions", json=body)
        assert found[name]["status_code"] == answer.status_code
        if answer.status_code != 200:
            assert found[name]["body"] == answer.json()


def test_chats_and_responses_are_answered(
    batches: BatchClient, server: Server, chat_model_dir: Path
) -> None:
    server.join_as("chat", "hello", directory=chat_model_dir)
    messages = [{"role": "user", "content": "hello"}]
    url = "/v1/chat/completions"
    asked = [line("a", url, model="chat", messages=messages)]
    (answer,) = batches.lines(batches.run(asked, endpoint=url).output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    url = "/v1/responses"
    done = batches.run([line("a", url, model="chat", input="hello")], endpoint=url)
    (answer,) = batches.lines(done.output_file_id)
    assert done.usage.output_tokens > 0 and done.model == "chat"
    with pytest.raises(openai.NotFoundError):  # a batch does not fill the store of responses
        batches.api.responses.retrieve(answer["response"]["body"]["id"])


@pytest.mark.parametrize("name", ["stream", "str\\u0065am"], ids=["plain", "escaped"])
def test_a_stream_is_refused_in_its_line(served: BatchClient, name: str) -> None:
    lines = [json.dumps(line("a", stream=True)).replace("stream", name)]
    lines += [json.dumps(line("b", stream=False))]
    done = served.run("\n".join(lines).encode())
    assert done.status == "completed" and done.request_counts.completed == 1
    (failed,) = served.lines(done.error_file_id)
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "stream"


GOOD = json.dumps(line("good")).encode()


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{nothing}\n", "invalid_json_line", 1),
        (GOOD + b"\n\n[]\n", "invalid_json_line", 3),
        (GOOD.decode().encode("utf-16"), "invalid_json_line", 1),
        (b'{"custom_id": "\xff"}', "invalid_json_line", 1),
        (b"[" * 200_000, "invalid_json_line", 1),
        (GOOD + b"\n" + GOOD, "duplicate_custom_id", 2),
        (GOOD.replace(b"good", b""), "invalid_custom_id", 1),
        (GOOD.replace(b"POST", b"GET"), "invalid_method", 1),
        (GOOD.replace(b"/v1/completions", b"/v1/messages"), "invalid_url", 1),
        (json.dumps(line("a") | {"body": "text"}).encode(), "invalid_body", 1),
        (json.dumps(line("a", prompt="x" * 1_100_000)).encode(), "line_too_long", 1),
    ],
)
def test_a_file_with_a_wrong_line_fails_before_any_line_runs(
    served: BatchClient, content: bytes, code: str, number: int | None
) -> None:
    failed = served.run(content)
    assert failed.status == "failed" and failed.output_file_id is None
    error = failed.errors.data[0]
    assert (error.code, error.line) == (code, number)
    assert error.message


def test_a_mark_of_utf8_and_ends_of_lines_of_windows_are_no_error(served: BatchClient) -> None:
    second = json.dumps(line("ü")).encode()
    done = served.run(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + second)
    assert served.ids(done.output_file_id) == ["good", "ü"]


def test_a_cancelled_batch_keeps_what_it_has(batches: BatchClient, server: Server) -> None:
    server.join_as("slow", "hello", step_s=0.02)
    batch = batches.create([line(f"r{number}", model="slow") for number in range(2000)])
    eventually(lambda: batches.completed(batch) > 3)
    assert batches.api.batches.cancel(batch.id).status == "cancelling"
    done = batches.wait(batch)
    assert done.status == "cancelled" and done.cancelled_at
    answered, failed = batches.ids(done.output_file_id), batches.lines(done.error_file_id)
    assert {each["error"]["code"] for each in failed} == {"batch_cancelled"}
    ids = [*answered, *(each["custom_id"] for each in failed)]
    assert sorted(int(each[1:]) for each in ids) == list(range(2000))
    counts = done.request_counts
    assert (counts.completed, counts.failed) == (len(answered), len(failed))
    with pytest.raises(openai.BadRequestError):
        batches.api.batches.cancel(batch.id)
    eventually(lambda: server.metric("batches_running") == 0)


def test_a_line_that_an_admin_cancels_is_not_rerun(batches: BatchClient, server: Server) -> None:
    server.join_as("slow", "hello", step_s=0.2)
    batch = batches.create([line("a", model="slow")])

    def running() -> list[Any]:
        answer = server.client.get("/admin/requests", headers=BOSS)
        return list(answer.json()["requests"])

    eventually(lambda: bool(running()))
    path = f"/admin/requests/{running()[0]['id']}/cancel"
    assert server.client.post(path, headers=BOSS).json()["count"] == 1
    (failed,) = batches.lines(batches.wait(batch).error_file_id)
    assert failed["response"]["status_code"] == 503
    assert failed["response"]["body"]["error"]["code"] == "cancelled"


def test_a_batch_is_cancelled_while_its_file_is_checked(served: BatchClient) -> None:
    wrong = b"{}\n"  # the last line of a file that takes some time
    content = b"".join(json.dumps(line(f"r{n}")).encode() + b"\n" for n in range(15_000)) + wrong
    batch = served.create(content)
    with suppress(openai.BadRequestError):  # on a slow machine it has been checked by now
        served.api.batches.cancel(batch.id)
    done = served.wait(batch)
    assert done.status in ("cancelled", "failed") and done.output_file_id is None


def test_a_batch_without_an_engine_waits_and_expires(batches: BatchClient) -> None:
    done = batches.run([line(name, model=None) for name in "ab"], completion_window="3s")
    assert done.status == "expired" and done.expired_at >= done.expires_at
    assert done.output_file_id is None
    failed = batches.lines(done.error_file_id)
    assert [each["error"]["code"] for each in failed] == ["batch_expired"] * 2


def test_two_batches_run_at_once(served: BatchClient) -> None:
    given = [[f"{name}{number}" for number in range(50)] for name in "ab"]
    created = [served.create(list(map(line, names))) for names in given]
    for batch, names in zip(created, given, strict=True):
        assert served.ids(served.wait(batch).output_file_id) == names


def test_batches_are_listed_in_pages(served: BatchClient) -> None:
    made = [served.create([line("a")]).id for _ in range(3)]
    page = served.api.batches.list(limit=2)
    assert [each.id for each in page.data] == [made[2], made[1]] and page.has_more
    listed = [each.id for each in served.api.batches.list(limit=2)]
    assert listed[:3] == made[::-1]
    with pytest.raises(openai.NotFoundError):
        served.api.batches.list(after="batch_0")
    for batch_id in made:
        served.wait(served.api.batches.retrieve(batch_id))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_window", "soon"),
        ("completion_window", "31d"),
        ("endpoint", "/v1/messages"),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("input_file_id", "../../etc/passwd"),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ],
)
def test_a_bad_field_is_named(server: Server, batches: BatchClient, field: str, value: Any) -> None:
    body = {"input_file_id": batches.upload([line("a")]), **ASKED, field: value}
    error = error_of(server.post("/v1/batches", **body), 404 if field == "input_file_id" else 400)
    assert error["param"] in (field, f"{field}.seconds")


def test_probes_the_page_and_a_command_show_batches(
    server: Server, batches: BatchClient, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> Any:
        return server.client.get("/health").json()["batches"]

    batch = batches.create([line("a", model=None)], completion_window="1h")
    eventually(lambda: shown()["lines"] == 1)
    assert (shown()["unfinished"], shown()["lines_done"]) == (1, 0)
    cli.main(["status", f"--url={server.url}"])
    assert "batches: 1, 0/1 lines" in capsys.readouterr().out
    with server.client.stream("GET", "/page/feed") as feed:
        for each in feed.iter_lines():
            if each.startswith("data: {") and '"batches"' in each:
                assert json.loads(each[6:])["batches"]["unfinished"] == 1
                break
    batches.api.batches.cancel(batch.id)
    batches.wait(batch)
    assert shown()["unfinished"] == 0
