"""The real supervisor with children that run `child_program`, as a process.

Usage: `supervised.py FOLDER LIMITS NAME:BEHAVIOUR:STAGE[:WORK]...`; LIMITS is a JSON object.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from services.supervision.launcher import ChildSpec
from services.supervision.local_launcher import LocalLauncher
from services.supervision.managed_child import Limits
from services.supervision.output import LogCollector
from services.supervision.supervisor import Supervisor
from shared import logs
from shared.rundir import RUN_DIR_VARIABLE, RunDir


def main(folder: str, limits: str, *children: str) -> int:
    output = LogCollector("text")
    logs.setup("supervisor", "info", "text", output)
    with RunDir.create() as run_dir:
        specs = []
        for child in children:
            name, behaviour, stage, *work = child.split(":")
            specs.append(
                ChildSpec(
                    name=name,
                    command=(
                        *(sys.executable, "-m", "tests.services.child_program"),
                        *(folder, name, behaviour),
                    ),
                    environment={RUN_DIR_VARIABLE: str(run_dir.path)},
                    stop_stage=int(stage),
                    announces_ready=True,
                    takes_hang_up=name == "router",
                    work="".join(work),
                    essential=work != ["spared"],
                )
            )
        supervisor = Supervisor(
            specs,
            LocalLauncher(output),
            limits=Limits(**json.loads(limits)),
            on_ready=lambda: announce(run_dir),
        )
        code = supervisor.run()
        output.close()
        return code


def announce(run_dir: RunDir) -> None:
    """Write a line that tests wait for, whose end may meet a terminal that is closed already."""
    with suppress(OSError):
        print(f"ready {run_dir.path}", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
