"""What `tests.e2e.chaos` disturbs: a server of several models, an engine from elsewhere, and a
second router for that."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.conftest import unused_port
from tests.e2e.awake import awake_s
from tests.e2e.process import Process
from tests.e2e.ranks.cuttable_link import CuttableLink
from tests.e2e.server import Server, descendants, is_running, serving

KEYS = ("alice", "bob", "carol")
LIMITED, HOSTILE = "dave", "mallory"
"""A key with few requests a minute, and the key of hostile clients."""
ADMIN = {"authorization": "Bearer boss"}
LOG_LATE_S = 10.0
SETTLED_WITHIN_S = 180.0
"""For the end of a process, or the start of the second router."""
ENGINES_READY = "mlx-lm-server engine ready, for "
"""What the command of the engine from elsewhere prints once."""
DISK_BYTES = 24 * 2**20
FILE = """
num_blocks = 512
kv_bits = 16
max_batch_size = 8
restart_wait_s = 60
first_token_timeout_s = 60
request_timeout_s = 60
fleet_memory_gb = 2
"""
MODEL = """
[[model]]
id = "{name}"
path = "{path}"
memory_gb = 0.2
tool_parser = "json_tools"
{more}
"""
ADAPTER = """
[[model.adapter]]
name = "{name}"
path = "{path}"
"""
SELDOM = "seldom"
"""The model that is unloaded when idle."""
SHARED = "a"
"""The model that has an engine elsewhere, which two routers share."""
SUPERVISORS = ("supervisor", "supervisor elsewhere")
SETTINGS = {
    SHARED: 'spec_decode = "ngram"\nmax_adapters = 1\n',
    SELDOM: "idle_unload_s = 15\n",
    "ranks": 'distributed_mode = "ring"\nnum_local_ranks = 2\n',
}


@dataclass
class Endpoint:
    """A router, as its clients see it."""

    url: str
    losses: Callable[[], int]
    """Number of unplanned exits."""
    is_down: bool = False

    async def has_lost_router(self, losses: int) -> bool:
        """Return whether it was lost since there were ``losses``. The log may be late."""
        deadline = awake_s() + LOG_LATE_S
        while self.losses() == losses and awake_s() < deadline:
            await asyncio.sleep(0.1)
        return self.losses() > losses


class Site:
    """A server of several models, and an engine of `SHARED` elsewhere.

    The latter reaches router and kvstore over links that can be cut, and has a router of its own.
    """

    def __init__(self, directory: Path, models: dict[str, Path], adapters: dict[str, Path]) -> None:
        self.directory, self.models, self.adapters = directory, models, adapters
        self.disk = directory / "disk"
        self.has_small_disk = self.disk.is_mount()
        self.has_spare = Path("/proc/self/fd").is_dir()
        """Whether the engine elsewhere has a spare process, which is known by its open files."""
        self.store = self.disk / "blocks"
        self.links: list[CuttableLink] = []
        self.server: Server
        self.joined: Process
        self.second: Process
        self.first_endpoint: Endpoint
        self.second_endpoint = Endpoint(f"http://127.0.0.1:{unused_port()}", lambda: self._lost)
        self._lost = 0
        """How often the second router was killed."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all processes except the remote engine and its router."""
        self.disk.mkdir(exist_ok=True)
        entries = {name: self._entry(name) for name in self.models}
        file = self._write("server.toml", FILE, *entries.values())
        self._write("joining.toml", FILE, entries[SHARED])
        keys = (f"sk-{key} name={key} concurrency=60\n" for key in KEYS)
        limited = f"sk-{LIMITED} name={LIMITED} rpm=20 tpm=20000\n"
        hostile = f"sk-{HOSTILE} name={HOSTILE} rpm=1000000\n"
        self._keys = self._write("keys", *keys, limited, hostile)
        ports = [unused_port() for _ in range(4)]
        self.links = [CuttableLink(ports[0], ports[1]), CuttableLink(ports[2], ports[3])]
        with ExitStack() as stack:
            self.server = stack.enter_context(
                serving(
                    None,
                    *("--config", file, "--admin-key", "boss", "--api-key-file", self._keys),
                    *("--engine-socket", f"tcp://127.0.0.1:{ports[1]}"),
                    *("--kvstore-socket", f"tcp://127.0.0.1:{ports[3]}"),
                    *("--restart-wait-s", "60", "--kv-bits", "16"),
                    *("--ssd-cache-dir", str(self.store), "--ssd-policy", "write_through"),
                    *("--ssd-max-size-gb", "0.004", "--batch-dir", str(self.directory / "batches")),
                    _MLX_LM_SERVER_CHECK_INTEGRITY="1",
                )
            )
            self.server.client.headers.update(ADMIN)
            self.first_endpoint = Endpoint(
                f"http://127.0.0.1:{self.server.port}", lambda: self.router_losses
            )
            yield

    @property
    def url(self) -> str:
        return self.first_endpoint.url

    def _entry(self, name: str) -> str:
        more = SETTINGS.get(name, "")
        adapters = self.adapters if name == SHARED else {}
        tables = [ADAPTER.format(name=one, path=path) for one, path in adapters.items()]
        return MODEL.format(name=name, path=self.models[name], more=more + "".join(tables))

    def _write(self, name: str, *content: str) -> str:
        path = self.directory / name
        path.write_text("".join(content))
        return str(path)

    # -- the engine from elsewhere, and its router ---------------------------------------

    def join(self) -> None:
        self.joined = Process(
            "mlx_lm_server",
            *("engine", "--config", str(self.directory / "joining.toml")),
            # In `serving` there is none: several engines are told apart by their command lines.
            *("--spare-engine-after-s", "1" if self.has_spare else "0"),
            *("--engine-socket", f"tcp://127.0.0.1:{self.links[0].port}"),
            *("--engine-socket", self._second_socket),
            *("--kvstore-socket", f"tcp://127.0.0.1:{self.links[1].port}"),
            XDG_RUNTIME_DIR=self._runtime(),
            _MLX_LM_SERVER_CHECK_INTEGRITY="1",
        )

    def start_second_router(self) -> None:
        port = self.second_endpoint.url.rpartition(":")[2]
        self.second = Process(
            "mlx_lm_server",
            *("router", "--host", "127.0.0.1", "--port", port, "--admin-key", "boss"),
            *("--engine-socket", self._second_socket, "--api-key-file", self._keys),
            *("--restart-wait-s", "60", "--first-token-timeout-s", "60"),
            *("--request-timeout-s", "60"),
            XDG_RUNTIME_DIR=self._runtime(),
        )

    async def lose_second_router(self) -> None:
        """Kill the second router, and start it again."""
        self._lost += 1
        self.second_endpoint.is_down = True
        self.second.popen.kill()
        await asyncio.to_thread(self.second.popen.wait)
        self.start_second_router()
        deadline = awake_s() + SETTLED_WITHIN_S
        async with httpx.AsyncClient(base_url=self.second_endpoint.url, timeout=10) as client:
            while True:
                assert awake_s() < deadline, ("no second router", self.second.log[-30:])
                with suppress(httpx.HTTPError):
                    if (await client.get("/livez")).is_success:
                        break
                await asyncio.sleep(0.1)
        self.second_endpoint.is_down = False

    @property
    def _second_socket(self) -> str:
        return f"ipc://{self._runtime()}/second"

    def _runtime(self) -> str:
        runtime = self.directory / "run"
        runtime.mkdir(exist_ok=True, mode=0o700)
        return str(runtime)

    def leave(self) -> list[int]:
        """Let the engine from elsewhere and the second router end; return their exit codes, which
        is -SIGKILL for one that did not end."""
        codes = []
        for process in (self.joined, self.second):
            process.popen.send_signal(signal.SIGTERM)
            try:
                process.popen.wait(60)
            except subprocess.TimeoutExpired:
                process.popen.kill()
            codes.append(process.popen.wait())
        return codes

    async def wait_ended(self, pids: Sequence[int]) -> None:
        deadline = awake_s() + SETTLED_WITHIN_S
        while left := [pid for pid in pids if is_running(pid)]:
            assert awake_s() < deadline, f"still running: {left}"
            send_signal(left, signal.SIGCONT)  # another fault may have stopped it
            await asyncio.sleep(0.1)

    # -- what is there -----------------------------------------------------------------

    @property
    def roles(self) -> tuple[str, ...]:
        """What processes do. `SELDOM`'s engine, decoders of images and the spare process need not
        be there."""
        elsewhere = ("engine elsewhere", "spare") if self.has_spare else ("engine elsewhere",)
        engines = (f"engine {name}" for name in self.models)
        ranks = ("rank",) if "ranks" in self.models else ()
        images = ("image decoder",) if "images" in self.models else ()
        return ("router", "kvstore", *engines, *ranks, *images, *elsewhere, "second router")

    def pids(self, role: str) -> list[int]:
        """Return the processes with one of `roles`, or one of `SUPERVISORS`."""
        match role:
            case "supervisor":
                return [self.server.process.pid]
            case "supervisor elsewhere":
                return [self.joined.popen.pid]
            case "second router":
                return [self.second.popen.pid]
            case "engine elsewhere":
                return [pid for pid in self._elsewhere() if not is_waiting_spare(pid)]
            case "spare":
                return [pid for pid in self._elsewhere() if is_waiting_spare(pid)]
            case "image decoder":
                return self.server.pids("router.images.decoder")
        name, _, model = role.partition(" ")
        what = ("engine", "text_engine") if name == "engine" else (name,)
        own = str(self.models[model]) if model else ""
        below = descendants(self.server.process.pid)
        return [
            pid
            for pid, command in below
            if own in command and any(f"services.processes.{one} " in f"{command} " for one in what)
        ]

    def _elsewhere(self) -> list[int]:
        below = descendants(self.joined.popen.pid)
        return [pid for pid, command in below if "services.processes.engine" in command]

    async def wait_whole(self, timeout_s: float) -> float | None:
        """Wait until all engines are ready and the disk is well. Return the seconds, None if it
        was longer."""
        began = awake_s()
        async with httpx.AsyncClient(base_url=self.url, headers=ADMIN, timeout=10) as client:
            while awake_s() < began + timeout_s:
                try:
                    if await self._is_whole(client):
                        return awake_s() - began
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.5)
        return None

    async def _is_whole(self, client: httpx.AsyncClient) -> bool:
        on_start = [name for name in self.models if name != SELDOM]
        if self.second_endpoint.is_down or not await self._are_ready(client, on_start):
            return False
        ready_there = await client.get(f"{self.second_endpoint.url}/readyz")
        metrics = (await client.get("/metrics")).text
        states = re.findall(r'^mlx_lm_server_store_state\{.*state="ok"\} (\S+)', metrics, re.M)
        return ready_there.is_success and bool(states) and all(float(state) for state in states)

    async def _are_ready(self, client: httpx.AsyncClient, models: Iterable[str]) -> bool:
        """Return whether all engines of ``models`` are ready, and none is being restarted."""
        health = await client.get("/health")
        ready = {
            model["id"]: [engine["ready"] for engine in model["engines"]]
            for model in health.json()["models"]
        }
        if any(ready.get(name) != [True] * (2 if name == SHARED else 1) for name in models):
            return False
        return not (await client.get("/admin/engines")).json()["restarting"]

    async def wait_started(self, supervisor: str, timeout_s: float) -> bool:
        """Wait until all engines below one of `SUPERVISORS` have been ready once. Return whether
        they have."""
        deadline = awake_s() + timeout_s
        async with httpx.AsyncClient(base_url=self.url, headers=ADMIN, timeout=10) as client:
            while awake_s() < deadline:
                if supervisor == "supervisor elsewhere":
                    if any(ENGINES_READY in line for line in list(self.joined.log)):
                        return True
                else:
                    with suppress(httpx.HTTPError):
                        if await self._are_ready(client, self.models):
                            return True
                await asyncio.sleep(0.5)
        return False

    def gives_same_bits(self, name: str) -> bool:
        """Return whether the engine of this model or adapter, which is loaded, says nothing else in
        the log."""
        engine = f" {SHARED if name in self.adapters else name}-"
        return not any(
            engine in line and "may depend on the batch" in line for line in list(self.server.log)
        )

    # -- the router --------------------------------------------------------------------

    @property
    def router_losses(self) -> int:
        """How often the router has ended without being told to, says the supervisor."""
        return sum("router was killed by" in line for line in list(self.server.log))

    # -- the disk ----------------------------------------------------------------------

    def fill_disk(self) -> None:
        with (self.disk / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**16))
            except OSError:
                pass

    def free_disk(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)

    def remove_store(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)  # others write meanwhile

    # -- signals -----------------------------------------------------------------------

    def send(self, role: str, number: int) -> Sequence[int]:
        """Send a signal to the processes that do something; return their ids."""
        pids = self.pids(role)
        send_signal(pids, number)
        return pids


def send_signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def is_waiting_spare(pid: int) -> bool:
    """Return whether a process was started as a spare one and is no engine yet: it polls no
    socket."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        files = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return b"engine_spare" in command and "anon_inode:[eventpoll]" not in files


def mount_small_disk(directory: Path) -> bool:
    """Mount a small tmpfs in this mount namespace. Return whether it succeeded."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def admin_restart(url: str) -> bool:
    """Restart all engines. Return whether the router has answered."""
    try:
        return httpx.post(f"{url}/admin/restart", headers=ADMIN, timeout=30).is_success
    except httpx.HTTPError:
        return False
