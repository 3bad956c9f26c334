"""A child for the supervisor's tests: `child_program.py FOLDER NAME BEHAVIOUR`.

It records its start and end in ``FOLDER/journal`` ("start NAME PID TIME"), and behaves as
BEHAVIOUR says. To the supervisor it looks like one of the real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from shared.exits import EXIT_CONFIG, EXIT_OK
from shared.supervisor_link import SupervisorLink


def main(folder: str, name: str, behaviour: str) -> int:
    journal = Path(folder) / "journal"
    starts = sum(line.split()[1] == name for line in _lines(journal, "start"))
    _note(journal, "start", name)
    link = SupervisorLink.from_environment()
    assert link is not None
    link.watch(lambda: os._exit(EXIT_OK))
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.append(number)

    signal.signal(signal.SIGHUP, lambda *_: _note(journal, "hangup", name))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else stop)
    if behaviour == "refuse" or (behaviour == "refuse-later" and starts == 1):
        sys.stderr.write("no such model: nonsense\n")
        return EXIT_CONFIG
    if behaviour == "crash":
        return 3
    if behaviour == "chatty":
        for number in range(60_000):
            sys.stderr.write(f"line {number} {'x' * 80}\n")
        _note(journal, "written", name)
    if behaviour == "helped":  # by a process of its group, which is stopped
        helper = subprocess.Popen(["sleep", "600"])
        helper.send_signal(signal.SIGSTOP)
        _note(journal, "helper", name, helper.pid)
    if behaviour == "mute":
        time.sleep(600)
    while not stopping:
        link.heartbeat("ready")
        time.sleep(0.05)
        if behaviour in ("ready-then-crash", "refuse-later"):
            return 3
    time.sleep(0.3)
    _note(journal, "end", name)
    return EXIT_OK


def _note(journal: Path, event: str, name: str, pid: int | None = None) -> None:
    with journal.open("a") as file:
        file.write(f"{event} {name} {pid or os.getpid()} {time.monotonic()}\n")


def _lines(journal: Path, event: str) -> list[str]:
    if not journal.exists():
        return []
    return [line for line in journal.read_text().splitlines() if line.startswith(event + " ")]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
