"""What `tests.forked.process` has imported before it forks. Nothing here may start a thread."""

from __future__ import annotations

import contextlib
import gc
import importlib

from engine.backend.blas import load_fast_blas
from engine.model.starting import lean_imports
from services.processes.engine_spare import MODULES

load_fast_blas()
with lean_imports():
    for module in (
        *MODULES,
        *("mlx_lm.tokenizer_utils", "mlx_lm.models.llama", "uvicorn.loops.auto"),
        *("services.commands.cli", "services.supervision.local"),
        *("services.processes.router", "services.processes.kvstore"),
    ):
        with contextlib.suppress(ImportError):  # the processes will report what is missing
            importlib.import_module(module)
gc.collect()
gc.freeze()
