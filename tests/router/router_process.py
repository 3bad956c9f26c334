"""The router as a process. `tests.router.http.test_process` starts some as users do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.forked.process import ForkedProcess


class RouterProcess(ForkedProcess):
    """Writes both its streams to the file ``log``."""

    def __init__(self, argv: Sequence[str], log: Path, max_descriptors: int | None = None) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_SERVER_")}
        with log.open("w") as file:
            super().__init__(
                *("services.processes.router", argv, environ, file.fileno()), max_descriptors
            )
