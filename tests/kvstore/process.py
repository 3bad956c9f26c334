"""A kvstore as a real process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kvstore.blocks import NAMESPACE, hash_of, wait_until


class Process:
    """`services.processes.kvstore` on ``directory``; `start` returns when its socket is there."""

    def __init__(self, directory: Path, socket_path: Path, *flags: str) -> None:
        self.directory = directory
        self.socket_path = socket_path
        self.endpoint = f"ipc://{socket_path}"
        self.command = [
            *(sys.executable, "-m", "services.processes.kvstore"),
            *("--disk-reserve-gb", "0"),
            *("--ssd-cache-dir", str(directory), "--kvstore-socket", self.endpoint),
            *flags,
        ]
        self.process: subprocess.Popen[str] | None = None

    def start(self, *flags: str) -> Process:
        self.command += flags
        self.run_with()
        wait_until(self._answers, 60)
        return self

    def run_with(self, **fields: Any) -> None:
        """Start the process with these arguments of `subprocess.Popen`."""
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, **fields)

    def wait(self) -> int:
        """Wait until the process ends by itself; return the exit code."""
        return self._reap()

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process
        self.process.kill()
        self._reap()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal that stops it; return the exit code."""
        assert self.process
        self.process.send_signal(number)
        return self._reap()

    def pause(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)

    def revive(self) -> None:
        """Let it run, whatever a test did to it."""
        if self.process is None or self.process.returncode is not None:
            self.start()
        self.resume()

    def file_path(self, number: int, namespace: str = NAMESPACE) -> Path:
        """Return the path of a stored block. ``namespace`` may be one of a rank."""
        model, _, rank = namespace.partition("/")
        pattern = f"{model}/{rank or 'rank_0'}/*/{hash_of(number).hex()}.safetensors"
        (path,) = self.directory.glob(pattern)
        return path

    def corrupt(self, number: int, namespace: str = NAMESPACE) -> Path:
        """Flip a bit of a stored block; return its path."""
        path = self.file_path(number, namespace)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return path

    def end(self) -> None:
        """End the process, in whatever state it is."""
        if self.process and self.process.returncode is None:
            self.kill()

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run a process that is expected to end by itself."""
        return subprocess.run(self.command, capture_output=True, text=True, timeout=60, check=False)

    def _reap(self) -> int:
        assert self.process and self.process.stderr
        code = self.process.wait(30)
        self.process.stderr.close()
        return code

    def _answers(self) -> bool:
        assert self.process and self.process.poll() is None, "it ended"
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket_path)) == 0
