"""A rank that heartbeats as one that serves, with the plans and tokens on its command line.

If the word after them is ``stop``, it stops after its first heartbeat."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from engine.parallel.health import LeaderWatch
from engine.parallel.progress import StepProgress
from shared.supervisor_link import SupervisorLink


def main() -> None:
    link = SupervisorLink.from_environment()
    assert link is not None
    progress = StepProgress()
    for plan, tokens in json.loads(sys.argv[1]):
        progress.begin(plan.encode())
        if tokens is not None:  # else it is never read
            progress.finish(tokens)
    watch = LeaderWatch(link, os.getppid(), progress)
    watch.phase = "ready"
    watch.heartbeat()
    if "stop" in sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGSTOP)
    watch.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
