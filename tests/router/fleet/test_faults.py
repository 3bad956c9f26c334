"""Requests when engines fail, messages are wrong, and clients go away."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shared.wire import Abort, Delta, Ping, Submit, Tokens, encode
from tests.router.conftest import Server, StartServer, begin, error_of, eventually, text_of
from tests.router.scripted_engine import ScriptedEngine, names_of

FLAGS = ("--restart-wait-s=4", "--first-token-timeout-s=5", "--request-timeout-s=3")


def runs(engine: ScriptedEngine, count: int = 1) -> Callable[[], bool]:
    return lambda: len(engine.running) == count


def error_code(text: str) -> str:
    """Return the code of the error with which a stream ends. It is the only one."""
    assert text.count('"error"') == 1 and "[DONE]" not in text
    return str(events_of(text)[-1]["error"]["code"])


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line[:7] == "data: {"]


def streamed(text: str) -> str:
    """Return the content of all chunks of a stream."""
    deltas = [choice["delta"] for event in events_of(text) for choice in event.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def assert_complete(answer: Future[httpx.Response]) -> None:
    text = answer.result(60).text
    assert "[DONE]" in text and '"error"' not in text


def test_an_error_during_an_answer_names_the_field_at_fault(server: Server) -> None:
    """A grammar may exceed a limit only then."""
    engine = server.join("hello", hold_tokens_after=0)
    answer = server.begin("x")
    eventually(runs(engine))
    told: dict[str, Any] = {"finish": "error", "error": "too many states", "param": "guided_regex"}
    delta = Delta(**names_of(engine.got(Submit)[-1]), index=0, token_ids=[], **told)
    engine.say(*encode(Tokens(deltas=[delta])))
    error = error_of(answer.result(60), 400)
    assert error["param"] == "guided_regex"
    assert error["message"] == "Invalid 'guided_regex': too many states."


# -- engines that go away ------------------------------------------------------


def test_a_request_without_a_token_is_resubmitted_before_heartbeats_are_missed(
    server: Server,
) -> None:
    first = server.join("hello world", name="again", hold_tokens_after=0)
    whole, stream = (server.begin("x", stream=stream) for stream in (False, True))
    eventually(runs(first, 2))
    first.kill()
    second = server.start_engine("hello world", name="again")
    assert text_of(whole.result(60)) == "hello world"
    assert_complete(stream)
    assert {submit.attempt for submit in second.got(Submit)} == {1}
    seeds = [{s.sampling.seed for s in engine.got(Submit)} for engine in (first, second)]
    assert seeds[0] == seeds[1]
    log = server.log.read_text()
    assert "engine again is lost: sent no heartbeat" not in log and "engine again is lost" in log


def start_answer(server: Server, **fields: Any) -> tuple[ScriptedEngine, Future[httpx.Response]]:
    """Return an engine that sends two tokens only, and the answer that waits for more."""
    engine = server.join("hello world", hold_tokens_after=2)
    before = server.num_tokens
    answer = server.begin("x", **fields)
    server.wait_tokens(before + 2)
    return engine, answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_begun_answer_resumes_where_it_stopped(server: Server, stream: bool) -> None:
    fields = {"logprobs": True, "stream_options": {"include_usage": True}} if stream else {}
    first, answer = start_answer(server, stream=stream, **fields)
    first.kill()
    second = server.start_engine("hello world")
    result = answer.result(60)
    (submit,) = second.got(Submit)
    assert submit.generated == second.behaviour.script(submit)[:2]
    assert submit.sampling == first.got(Submit)[0].sampling
    if not stream:
        assert text_of(result) == "hello world"
        return
    assert result.text.endswith("data: [DONE]\n\n") and '"error"' not in result.text
    assert streamed(result.text) == "hello world"
    request_id = f"request_id={result.headers['x-request-id']}"
    eventually(lambda: request_id in server.log.read_text())
    (written,) = (each for each in server.log.read_text().splitlines() if request_id in each)
    times = dict(word.split("=") for word in written.split() if "_s=" in word)
    assert float(times["queue_s"]) <= float(times["first_token_s"]), "queued for the first engine"
    undisturbed, events = server.chat("x", logprobs=True).json(), events_of(result.text)
    scored = [event["choices"][0].get("logprobs") for event in events if event["choices"]]
    tokens = [token for one in scored if one for token in one["content"]]
    assert tokens == undisturbed["choices"][0]["logprobs"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]


def test_a_stream_whose_engine_stays_away_ends_with_an_error(start_server: StartServer) -> None:
    server = start_server("--restart-wait-s=3")
    first, answer = start_answer(server, stream=True)
    first.kill()
    killed = time.monotonic()
    text = answer.result(60).text
    assert time.monotonic() - killed > 2, "it waits for a restart"
    assert streamed(text) == "hello wor", "what its two tokens say"
    assert error_code(text) == "engine_lost"


def test_a_request_that_lost_two_engines_is_not_given_to_a_third(server: Server) -> None:
    first, answer = start_answer(server, stream=True)
    whole = server.begin("x")
    eventually(lambda: first.sent_counts == [2, 2])
    first.kill()
    second = server.start_engine("hello world", hold_tokens_after=3)
    eventually(runs(second, 2))
    second.kill()
    third = server.start_engine("hello world")
    assert error_code(answer.result(60).text) == "engine_lost"
    assert error_of(whole.result(60), 503)["code"] == "engine_lost"
    assert not third.got(Submit)


def test_a_stream_outlives_any_number_of_planned_restarts(server: Server) -> None:
    before = server.num_tokens
    engine, answer = start_answer(server, stream=True)
    for held in (3, 4):
        engine.leave()
        engine = server.start_engine("hello world", hold_tokens_after=held)
        server.wait_tokens(before + held)
    engine.behaviour.phase = "draining"
    server.wait_unready()
    engine.kill()
    last = server.start_engine("hello world")
    assert_complete(answer)
    assert [submit.attempt for submit in last.got(Submit)] == [3]


def test_losses_are_forgotten_as_tokens_come(server: Server) -> None:
    before = server.num_tokens
    answer = None
    for held in (2, 258, None):
        engine = server.join("hello" * 400, hold_tokens_after=held, tokens_per_step=20)
        answer = answer or server.begin("x", stream=True, max_tokens=400)
        if held:
            server.wait_tokens(before + held)
            engine.kill()
    assert answer is not None
    assert_complete(answer)


def test_a_stream_that_waits_to_resume_times_out(server: Server) -> None:
    first, answer = start_answer(server, stream=True)
    slow = "so slow that it takes longer than anybody likes to wait for it"
    second = server.start_engine(slow, name="e1", max_sequences=1, step_s=0.4)
    server.wait_replicas(2)
    first.behaviour.phase = "draining"
    server.wait_replicas(1)
    other = server.begin("y", stream=True)
    eventually(runs(second))
    first.kill()
    assert error_code(answer.result(60).text) == "timeout"
    second.behaviour.step_s = 0.0
    assert_complete(other)


def test_a_request_waits_for_a_restart(server: Server) -> None:
    engine = server.join("hi")
    engine.kill()
    server.wait_unready()
    assert server.client.get("/health").json()["status"] != "ok"
    waits = server.begin("x")
    time.sleep(0.5)
    server.start_engine("hi")
    assert text_of(waits.result(60)) == "hi"


def test_without_an_engine_the_server_is_live_but_not_ready(start_server: StartServer) -> None:
    server = start_server("--restart-wait-s=1")
    for path, status in (("/livez", 200), ("/readyz", 503), ("/health", 503)):
        assert server.client.get(path).status_code == status
    assert server.client.get("/readyz").json()["reasons"] == ["no engine has joined yet"]
    for codes in (("no_engine_ready",), ("no_engine_ready", "engine_lost")):
        answer = server.chat("x")
        assert error_of(answer, 503)["code"] in codes
        assert int(answer.headers["retry-after"]) > 0
        server.join("hi").kill()


@pytest.mark.parametrize(
    ("field", "bad", "good", "said"),
    [
        ("heartbeats", False, True, "no heartbeat"),
        ("stalled_s", 45.0, 0.0, "stalled"),
        ("phase", "loading", "ready", "loading"),
    ],
)
def test_an_engine_that_makes_no_progress_makes_the_server_unready(
    server: Server, field: str, bad: Any, good: Any, said: str
) -> None:
    engine = server.join("hi")
    setattr(engine.behaviour, field, bad)
    server.wait_unready()
    for path in ("/readyz", "/health"):
        assert said in server.client.get(path).text
    setattr(engine.behaviour, field, good)
    server.wait_ready()
    assert text_of(server.chat("x")) == "hi"


def test_two_engines_share_the_work_and_one_may_leave(server: Server) -> None:
    options = {"hold_tokens_after": 0, "max_sequences": 2}
    one, other = (server.start_engine("hi", name=name, **options) for name in ("e0", "e1"))
    server.wait_replicas(2)
    answers = [server.begin(f"x{i}") for i in range(4)]
    eventually(lambda: len(one.running) == len(other.running) == 2)
    one.leave()
    other.behaviour.hold_tokens_after = None
    assert [text_of(answer.result(60)) for answer in answers] == ["hi"] * 4


def test_two_engines_may_have_the_same_name(server: Server) -> None:
    for _ in range(2):
        server.start_engine("hi")
    server.wait_replicas(2)
    time.sleep(0.5)
    assert server.client.get("/v1/models/tiny").json()["ready_replicas"] == 2
    (model,) = server.client.get("/health").json()["models"]
    assert len({engine["name"] for engine in model["engines"]}) == 2


# -- wrong messages ------------------------------------------------------------


def test_a_sequence_that_heartbeats_do_not_mention_is_resubmitted(server: Server) -> None:
    engine = server.join("hi", forget=True)
    answer = server.begin("x", max_tokens=4)
    eventually(lambda: len(engine.got(Submit)) == 1)
    engine.behaviour.forget = False
    assert text_of(answer.result(60)) == "hi"


def test_a_gap_in_the_tokens_is_never_passed_on(server: Server) -> None:
    engine = server.join("hello world", skip_token=True)
    assert error_code(server.chat("x", stream=True).text) == "engine_lost"
    engine.behaviour.skip_token = False
    assert text_of(server.chat("x")) == "hello world"


def test_a_request_the_router_does_not_know_is_aborted(server: Server) -> None:
    engine = server.join("x", hold_tokens_after=0)
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
        eventually(runs(engine))
    (submit,) = engine.got(Submit)
    eventually(runs(engine, 0))
    engine.run_unasked("stranger", submit, [5])
    eventually(lambda: any(a.request_id == submit.request_id for a in engine.got(Abort)[1:]))


def test_undecodable_messages_are_counted_and_dropped(server: Server) -> None:
    engine = server.join("hi")
    for size in range(40):
        engine.say(os.urandom(size))
        engine.say(os.urandom(8), os.urandom(size), b"")
    engine.say(b"")
    engine.say(encode(Ping(router_id="x"))[0])
    engine.say(*([b"x"] * 5000))
    eventually(lambda: server.metric("dropped_messages_total") >= 83)
    assert text_of(server.chat("x")) == "hi"


# -- clients that go away, and timeouts ----------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_the_engine(server: Server, stream: bool) -> None:
    engine = server.join("never ending " * 30, step_s=0.05)
    body = {"prompt": "x", "stream": stream, "max_tokens": 400}
    patience = httpx.Timeout(10, read=0.3)
    with (
        pytest.raises(httpx.TimeoutException),
        server.client.stream("POST", "/v1/completions", json=body, timeout=patience) as answer,
    ):
        for _ in answer.iter_bytes():
            if engine.running:
                raise httpx.ReadTimeout("enough")
    eventually(lambda: bool(engine.got(Abort)), 3)
    eventually(runs(engine, 0), 3)


def test_a_disconnected_client_leaves_the_queue(server: Server) -> None:
    engine = server.join("hi", hold_tokens_after=0, max_sequences=1)
    first = server.begin("first")
    eventually(runs(engine))
    with pytest.raises(httpx.TimeoutException):
        server.client.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
    eventually(lambda: 'queued_requests{model="tiny"} 0.0' in server.metrics)
    engine.behaviour.hold_tokens_after = None
    assert text_of(first.result(60)) == "hi"
    assert len(engine.got(Submit)) == 1


def test_a_silent_stream_gets_comments_and_ends_with_a_timeout(start_server: StartServer) -> None:
    server = start_server("--first-token-timeout-s=7", "--request-timeout-s=6")
    server.join("hello world", hold_tokens_after=0)
    for answer in [begin(ask, "x", stream=True) for ask in (server.chat, server.complete)]:
        text = answer.result(60).text
        assert ": keep-alive\n\n" in text
        assert error_code(text) == "timeout"


def test_silence_before_and_after_the_first_token_is_an_error(server: Server) -> None:
    engine = server.join("hello world", hold_tokens_after=0)
    assert server.chat("x").status_code == 504
    engine.behaviour.hold_tokens_after = 1
    stream = server.begin("x", stream=True)
    assert server.chat("x").status_code == 504
    assert error_code(stream.result(60).text) == "timeout"
    eventually(runs(engine, 0))


def test_a_client_that_does_not_read_blocks_no_others_and_is_disconnected(server: Server) -> None:
    tokens = 8000
    engine = server.join(
        script=lambda submit: [5] * tokens, tokens_per_step=2, step_s=0.001, context_length=10**6
    )
    address = urlsplit(server.url)
    messages = [{"role": "user", "content": "x"}]
    # Many bytes a token: on a busy machine several tokens are one event.
    fields = {"logprobs": True, "top_logprobs": 20, "max_tokens": tokens, "stream": True}
    body = json.dumps({"messages": messages, **fields}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        eventually(runs(engine))
        assert len(text_of(server.chat("x", max_tokens=4))) == 4
        eventually(lambda: server.client.get("/health").json()["requests"] == 0, 60)
        assert "does not read" in server.log.read_text()
