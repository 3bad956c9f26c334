"""The keeper of a rank that heartbeats as one that serves, with the plans and tokens on its command
line.

If the word after them is ``stop``, it stops after its first heartbeat."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

from engine.parallel.health import RankHeartbeats
from engine.parallel.progress import StepProgress
from services.ranks.keepers import read_job
from shared.supervisor_link import SupervisorLink


def main() -> None:
    read_job(0)
    link = SupervisorLink(socket.socket(fileno=1))
    progress = StepProgress()
    for plan, tokens in json.loads(sys.argv[1]):
        progress.begin(plan.encode())
        if tokens is not None:  # else it is never read
            progress.finish(tokens)
    heartbeats = RankHeartbeats(link, progress)
    heartbeats.phase = "ready"
    heartbeats.send()
    if "stop" in sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGSTOP)
    heartbeats.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
