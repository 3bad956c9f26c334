"""Two routers over one engine, which joins them and a kvstore with CURVE."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.commands import keys
from tests.conftest import unused_port
from tests.e2e.process import Process, running_process, wait_until
from tests.e2e.server import pieces, private_directory

PATIENCE_S = 60.0
LONG: dict[str, Any] = {
    "prompt": "the same prompt",
    "max_tokens": 500,
    "ignore_eos": True,
    "temperature": 0,
}


class RouterProcess:
    """A router, and a client of it."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        self._stack, self._flags = stack, flags
        self.start()

    def start(self) -> None:
        self.process: Process = self._stack.enter_context(
            running_process("mlx_lm_server", "router", *self._flags, "--host=127.0.0.1", "--port=0")
        )
        url = self.process.wait_for(r"listening on (https?://\S+)")[1]
        self.client = self._stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S))

    def kill(self) -> None:
        self.process.popen.send_signal(signal.SIGKILL)
        self.process.popen.wait()

    def wait_ready(self) -> None:
        self.wait_until(lambda: self.client.get("/readyz").status_code == 200)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.process)

    def metric(self, name: str) -> float | None:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", self.client.get("/metrics").text, re.M)
        return float(found[1]) if found else None

    def knows_the_store(self) -> bool:
        return self.metric("mlx_lm_server_store_blocks") is not None

    def text(self) -> str:
        answer = self.client.post("/v1/completions", json=LONG)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def stream(self) -> Iterator[str]:
        return pieces(self.client, **LONG)


class KeyDirectories:
    """The keys of both sides."""

    def __init__(self, server: Path, engine: Path) -> None:
        self.server, self.engine = server, engine
        self.make("server", server)
        self.make("engine", engine)

    def make(self, role: str, directory: Path) -> None:
        """Create the keys of a role in place of those that there are."""
        for name in (f"{role}.key", f"{role}.secret"):
            (directory / name).unlink(missing_ok=True)
        public = [] if role == "server" else ["--server", self.public(self.server, "server")]
        assert keys.main([role, f"--curve-dir={directory}", *public]) == 0

    def allow(self) -> None:
        own = self.public(self.engine, "engine")
        assert keys.main(["allow", f"--curve-dir={self.server}", own, "--name=studio"]) == 0

    def remove(self) -> None:
        assert keys.main(["remove", f"--curve-dir={self.server}", "studio"]) == 0

    @staticmethod
    def public(directory: Path, role: str) -> str:
        return (directory / f"{role}.key").read_text().strip()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> KeyDirectories:
    return KeyDirectories(tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def routers(
    tiny_model: Callable[..., Path], directories: KeyDirectories
) -> Iterator[tuple[RouterProcess, RouterProcess]]:
    """Two routers, one at IPv6 with CURVE and one at a private socket, over one engine. It finds
    the first as it finds those that have a name."""
    server, engine = directories.server, directories.engine
    directories.allow()
    with ExitStack() as stack:
        private = stack.enter_context(private_directory())
        first = f"--engine-socket=tcp://[::1]:{unused_port()}"
        second = f"--engine-socket=ipc://{private}/engines"
        store = f"--kvstore-socket=tcp://[::1]:{unused_port()}"
        curve = f"--curve-dir={server}"
        stack.enter_context(
            running_process(
                "mlx_lm_server", "kvstore", store, curve, f"--ssd-cache-dir={private}/b"
            )
        )
        both = RouterProcess(stack, first, curve), RouterProcess(stack, second)
        model = f"--model={tiny_model('llama')}"
        stack.enter_context(
            running_process(
                "mlx_lm_server",
                *("engine", model, first.replace("tcp:", "dns+tcp:"), second, store),
                *(f"--curve-dir={engine}", "--kv-bits=16"),
            )
        )
        for router in both:
            router.wait_ready()
        yield both


def test_two_routers_share_an_engine_and_its_store(
    routers: tuple[RouterProcess, RouterProcess],
) -> None:
    texts = {router.text() for router in routers}
    assert len(texts) == 1
    for router in routers:
        router.wait_until(router.knows_the_store)
    (names, others) = (
        [e["name"] for m in r.client.get("/health").json()["models"] for e in m["engines"]]
        for r in routers
    )
    assert names == [f"studio.{others[0]}"]


def test_a_router_that_is_killed_takes_nothing_from_the_other_and_comes_back(
    routers: tuple[RouterProcess, RouterProcess],
) -> None:
    first, second = routers
    expected = second.text()
    with ThreadPoolExecutor(1) as pool:
        lost = first.stream()
        next(lost)
        kept = second.stream()
        begin = next(kept)
        rest = pool.submit("".join, kept)
        first.kill()
        assert begin + rest.result(PATIENCE_S) == expected
        with pytest.raises(httpx.HTTPError):
            list(lost)
    second.wait_until(lambda: second.metric("active_sequences") == 0)
    first.start()
    first.wait_ready()
    assert first.text() == expected


def test_new_keys_of_the_engine_replace_the_old_ones_without_a_restart(
    routers: tuple[RouterProcess, RouterProcess], directories: KeyDirectories
) -> None:
    """Also those of its connection to the kvstore, which refuses them at first."""
    first, second = routers
    expected = second.text()
    directories.make("engine", directories.engine)
    directories.remove()
    first.wait_until(lambda: first.client.get("/readyz").status_code == 503)
    second.wait_until(lambda: not second.knows_the_store())
    directories.allow()
    first.wait_ready()
    assert first.text() == expected
    first.wait_until(first.knows_the_store)


def test_an_engine_finds_a_router_that_was_restarted_with_new_keys(
    routers: tuple[RouterProcess, RouterProcess], directories: KeyDirectories
) -> None:
    """Stands last: the kvstore still has the old ones."""
    first, second = routers
    first.kill()
    directories.make("server", directories.server)
    first.start()
    (directories.engine / "server.key").write_text(
        directories.public(directories.server, "server") + "\n"
    )
    first.wait_ready()
    assert first.text() == second.text()
