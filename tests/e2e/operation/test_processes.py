"""Processes that are started one by one: an engine with a fake router, and two engines."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import wire
from tests.conftest import unused_port
from tests.e2e.process import Process, running_process, wait_until
from tests.e2e.requests.malformed import NAN, TO_ENGINE, Peer, malformed
from tests.e2e.server import assert_retry, private_directory
from tests.shared.submits import submit

COMPLETIONS = "/v1/completions"


class FakeRouter:
    """Binds the socket to which an engine connects, and sends what no router sends."""

    def __init__(self, endpoint: str) -> None:
        self.peer = Peer(endpoint, bind=True)
        self.peer.receive(wire.Heartbeat, wire.ToRouter)
        self._number = 0

    def greet(self) -> wire.Hello:
        self.peer.send(wire.Ping(router_id="not really"))
        return self.peer.receive(wire.Hello, wire.ToRouter)

    def run(self, **fields: Any) -> wire.Refused | int:
        """Run a request; return its refusal, or the number of its tokens."""
        self._number += 1
        plain: dict[str, Any] = {
            "request_id": f"r{self._number}",
            "token_ids": [5, 6, 7],
            "max_tokens": 3,
        }
        sent = submit(**plain | fields)
        self.peer.send(sent)
        tokens = 0
        while True:
            message = self.peer.receive(wire.Message, wire.ToRouter)
            if isinstance(message, wire.Refused) and message.request_id == sent.request_id:
                return message
            for delta in message.deltas if isinstance(message, wire.Tokens) else ():
                if delta.request_id != sent.request_id:
                    continue
                tokens += len(delta.token_ids)
                if delta.finish is not None:
                    assert delta.finish == "length", delta
                    return tokens


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Iterator[tuple[Process, FakeRouter]]:
    with ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        endpoint = f"ipc://{directory}/engines"
        process = stack.enter_context(
            running_process(
                "services.processes.engine",
                *("--model", str(tiny_model("llama")), "--engine-socket", endpoint, "--no-ssd"),
                _MLX_LM_SERVER_CHECK_INTEGRITY="1",
            )
        )
        router = FakeRouter(endpoint)
        stack.callback(router.peer.close)
        router.greet()
        yield process, router


@pytest.fixture
def router(engine: tuple[Process, FakeRouter]) -> Iterator[FakeRouter]:
    """Check that the engine runs after the test, and serves."""
    process, router = engine
    yield router
    assert router.run() == 3
    assert process.is_running


def test_an_engine_counts_and_drops_malformed_messages(router: FakeRouter) -> None:
    sent = malformed(TO_ENGINE)
    for frames in sent:
        router.peer.send_raw(frames)
    while True:
        stats = router.peer.receive(wire.Heartbeat, wire.ToRouter).stats
        if stats.dropped_messages_total >= len(sent):
            break
    assert stats.dropped_messages_total == len(sent)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
        ({"token_ids": [320]}, "prompt"),
        ({"token_ids": [2**63]}, "prompt"),
        ({"token_ids": [5] * 1_000_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -(2**40)}, "max_tokens"),
        ({"generated": [2**40]}, "generated"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_request_with_invalid_values_is_refused(
    router: FakeRouter, fields: dict[str, Any], param: str
) -> None:
    refused = router.run(**fields)
    assert isinstance(refused, wire.Refused)
    assert refused.param == param
    assert refused.reason in ("invalid", "too_large")


NONSENSE: dict[str, list[Any]] = {
    "request_id": ["", "x" * 1_000_000],
    "attempt": [-(2**63), 2**63],
    "priority": [-(2**63), 2**63],
    "min_tokens": [-1, 2**63],
    "cache_salt": ["\x00" * 100_000],
    "logprob_token_ids": [(5,) * 100_000],
}
NONSENSE_OF_SAMPLING: dict[str, list[Any]] = {
    "temperature": [NAN, math.inf, -1.0, 1e-300, 1e300],
    "top_p": [NAN, -1.0, 1e-300, 2.0],
    "top_k": [-(2**63), 2**63],
    "min_p": [NAN, math.inf, -1.0],
    "seed": [-(2**63), 2**64 - 1],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsensical_values_that_can_be_served_are_served(router: FakeRouter, name: str) -> None:
    for value in NONSENSE[name]:
        assert router.run(**{name: value}) == 3, repr(value)[:99]


@pytest.mark.parametrize("name", NONSENSE_OF_SAMPLING)
def test_nonsensical_ways_of_sampling_choose_tokens(router: FakeRouter, name: str) -> None:
    for value in NONSENSE_OF_SAMPLING[name]:
        fields: dict[str, Any] = {"seed": 1, "temperature": 1.0, name: value}
        assert router.run(sampling=wire.SamplingParams(**fields)) == 3, value


@pytest.mark.parametrize("stop_token_ids", [list(range(320)), [5] * 100_000], ids=["all", "many"])
def test_tokens_that_stop_do_not_come_before_the_least_number(
    router: FakeRouter, stop_token_ids: list[int]
) -> None:
    assert router.run(min_tokens=5, stop_token_ids=stop_token_ids) == 3


def test_huge_max_tokens_end_with_the_context(router: FakeRouter) -> None:
    assert router.run(token_ids=[5] * 2000, max_tokens=2**63) == 48


def test_a_request_that_is_complete_already_ends_at_once(router: FakeRouter) -> None:
    assert router.run(generated=[5] * 50) == 0


def test_repeated_requests_and_unknown_aborts_do_no_harm(router: FakeRouter) -> None:
    for _ in range(3):
        router.peer.send(submit("twice", [5], max_tokens=500))
    for number in range(1000):
        router.peer.send(wire.Abort(request_id=f"unknown-{number}"))
    router.peer.send(wire.Abort(request_id="twice"))
    router.peer.send(wire.Ping(router_id="another"))
    router.peer.receive(wire.Hello, wire.ToRouter)


def test_two_engines_join_a_router_and_one_takes_over_from_the_other(
    tiny_model: Callable[..., Path], tmp_path: Path, socket_dir: Path
) -> None:
    """The engines connect to the router over TCP."""
    with ExitStack() as stack:
        engines = f"tcp://127.0.0.1:{unused_port()}"
        blocks = f"ipc://{socket_dir}/kvstore"
        flags = [
            *("--model", str(tiny_model("llama"))),
            *("--engine-socket", engines, "--kvstore-socket", blocks),
            *("--ssd-cache-dir", str(tmp_path / "ssd")),
        ]
        stack.enter_context(running_process("services.processes.kvstore", *flags))
        router = stack.enter_context(
            running_process(
                "services.processes.router", *flags, "--host=127.0.0.1", "--port=0", TEST_FORKS="0"
            )
        )
        url = router.wait_for(r"listening on (https?://\S+)")[1]
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))

        def complete(number: int) -> httpx.Response:
            body = {"prompt": f"{number} abc", "max_tokens": 40, "ignore_eos": True}
            return client.post(COMPLETIONS, json=body)

        def generated() -> dict[str, float]:
            """Return the number of generated tokens by the engine's name."""
            pattern = r'mlx_lm_server_generated_tokens_total\{engine="([^"]+)".*\} (\S+)'
            return {e: float(v) for e, v in re.findall(pattern, client.get("/metrics").text)}

        assert_retry(complete(0), 503, "no_engine_ready")
        both = [
            stack.enter_context(
                running_process("services.processes.engine", *flags, _MLX_LM_SERVER_ENGINE=name)
            )
            for name in ("left", "right")
        ]
        wait_until(lambda: len(generated()) == ready_replicas(client) == 2, router)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(complete, range(24)))
            assert [answer.status_code for answer in answers] == [200] * 24
            wait_until(lambda: all(generated().values()), router)
            in_flight = [pool.submit(complete, number) for number in range(24)]
            both[0].popen.kill()
            # Nothing of these answers has been sent yet, so the other engine computes them.
            assert [future.result().status_code for future in in_flight] == [200] * 24
        wait_until(lambda: ready_replicas(client) == 1, router)
        assert complete(1).status_code == 200
        if sys.platform == "linux":
            assert "libmlx" in loaded_by(both[1]) and "libmlx" not in loaded_by(router)


def loaded_by(process: Process) -> str:
    """Return the lines of all files that a process has mapped, its libraries among them."""
    return Path(f"/proc/{process.popen.pid}/maps").read_text()


def ready_replicas(client: httpx.Client) -> int:
    models = client.get("/v1/models").json()["data"]
    return int(models[0]["ready_replicas"]) if models else 0
