"""What `tests.e2e.chaos` disturbs: a server of two models, and an engine from elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from tests.conftest import unused_port
from tests.e2e.process import Process
from tests.e2e.ranks.cuttable_link import CuttableLink
from tests.e2e.server import Server, descendants, is_running, serving

KEYS = ("alice", "bob", "carol")
ADMIN = {"authorization": "Bearer boss"}
LOG_LATE_S = 10.0
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
"""


class Site:
    """Three engines: one of each model below the server, and one of the first elsewhere.

    The latter reaches router and kvstore over links that can be cut.
    """

    def __init__(self, directory: Path, models: dict[str, Path], *, has_small_disk: bool) -> None:
        self.directory, self.models = directory, models
        self.has_small_disk = has_small_disk
        self.disk = directory / "disk"
        self.store = self.disk / "blocks"
        self.links: list[CuttableLink] = []
        self.server: Server
        self.joined: Process

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the processes, but for the engine from elsewhere."""
        self.disk.mkdir(exist_ok=True)
        entries = [MODEL.format(name=name, path=path) for name, path in self.models.items()]
        file = self._write("server.toml", FILE, *entries)
        self._write("joining.toml", FILE, entries[0])
        keys = self._write("keys", *(f"sk-{key} name={key} concurrency=60\n" for key in KEYS))
        ports = [unused_port() for _ in range(4)]
        self.links = [CuttableLink(ports[0], ports[1]), CuttableLink(ports[2], ports[3])]
        with ExitStack() as stack:
            self.server = stack.enter_context(
                serving(
                    None,
                    *("--config", file, "--admin-key", "boss", "--api-key-file", keys),
                    *("--engine-socket", f"tcp://127.0.0.1:{ports[1]}"),
                    *("--kvstore-socket", f"tcp://127.0.0.1:{ports[3]}"),
                    *("--restart-wait-s", "60", "--kv-bits", "16"),
                    *("--ssd-cache-dir", str(self.store), "--ssd-policy", "write_through"),
                    *("--ssd-max-size-gb", "0.004"),
                    _MLX_LM_SERVER_CHECK_INTEGRITY="1",
                )
            )
            self.server.client.headers.update(ADMIN)
            yield

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def _write(self, name: str, *content: str) -> str:
        path = self.directory / name
        path.write_text("".join(content))
        return str(path)

    # -- the engine from elsewhere -----------------------------------------------------

    def join(self) -> None:
        runtime = self.directory / "run"
        runtime.mkdir(exist_ok=True, mode=0o700)
        self.joined = Process(
            "mlx_lm_server",
            *("engine", "--config", str(self.directory / "joining.toml")),
            *("--spare-engine-after-s", "0"),  # as in `serving`
            *("--engine-socket", f"tcp://127.0.0.1:{self.links[0].port}"),
            *("--kvstore-socket", f"tcp://127.0.0.1:{self.links[1].port}"),
            XDG_RUNTIME_DIR=str(runtime),
            _MLX_LM_SERVER_CHECK_INTEGRITY="1",
        )

    def leave(self) -> int:
        """Let the engine from elsewhere end; return the exit code of its supervisor."""
        self.joined.popen.send_signal(signal.SIGTERM)
        try:
            return self.joined.popen.wait(60)
        finally:
            self.joined.popen.kill()

    async def wait_ended(self, pids: Sequence[int]) -> None:
        while left := [pid for pid in pids if is_running(pid)]:
            send_signal(left, signal.SIGCONT)  # another fault may have stopped it
            await asyncio.sleep(0.1)

    # -- what is there -----------------------------------------------------------------

    def pids(self, role: str) -> list[int]:
        """Return the processes that do something: "router", "kvstore", "engine a", "engine b" or
        "engine elsewhere"."""
        if role == "engine elsewhere":
            below = descendants(self.joined.popen.pid)
            return [pid for pid, command in below if "services.processes.engine" in command]
        name, _, model = role.partition(" ")
        wanted = [f"services.processes.{name}", *([str(self.models[model])] if model else [])]
        below = descendants(self.server.process.pid)
        return [pid for pid, command in below if all(word in command for word in wanted)]

    async def wait_whole(self, timeout_s: float) -> float | None:
        """Wait until all engines are ready and the disk is well. Return the seconds, None if it
        was longer."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, headers=ADMIN, timeout=10) as client:
            while time.monotonic() < began + timeout_s:
                try:
                    if await self._is_whole(client):
                        return time.monotonic() - began
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        return None

    async def _is_whole(self, client: httpx.AsyncClient) -> bool:
        health = await client.get("/health")
        engines = [e for model in health.json()["models"] for e in model["engines"]]
        if [engine["ready"] for engine in engines] != [True] * 3:
            return False
        if (await client.get("/admin/engines")).json()["restarting"]:
            return False
        metrics = (await client.get("/metrics")).text
        states = re.findall(r'^mlx_lm_server_store_state\{.*state="ok"\} (\S+)', metrics, re.M)
        return len(states) == 3 and all(float(state) for state in states)

    # -- the router --------------------------------------------------------------------

    @property
    def router_losses(self) -> int:
        """How often the router has ended without being told to, says the supervisor."""
        return sum("router was killed by" in line for line in list(self.server.log))

    async def has_lost_router(self, losses: int) -> bool:
        """Return whether it was lost since there were ``losses``. The log may be late."""
        deadline = time.monotonic() + LOG_LATE_S
        while self.router_losses == losses and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return self.router_losses > losses

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


def mount_small_disk(directory: Path) -> bool:
    """Mount a small disk of memory, in a mount namespace of our own. Return whether that went."""
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
