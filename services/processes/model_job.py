"""`python -m services.processes.model_job pull|delete NAME`: download a model, or delete one from
the Hugging Face cache, for a running server.

It reports its progress to the supervisor, and exits with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine.backend.blas import load_fast_blas
from shared import logs
from shared.exits import EXIT_FAILED, EXIT_OK
from shared.supervisor_link import SupervisorLink

_TELL_EVERY_S = 0.2


class ModelJobError(Exception):
    """The job is not possible. The message is the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    kind, name = sys.argv[1:] if argv is None else argv
    logs.setup(kind, "info", "text")
    load_fast_blas()  # before anything imports MLX
    from engine.model.errors import ModelUnavailable

    link = SupervisorLink.from_environment()
    if link is not None:
        link.watch(lambda: os._exit(EXIT_FAILED))
    try:
        if kind == "pull":
            _pull(name, link)
        else:
            _delete(name)
    except (ModelUnavailable, ModelJobError, OSError) as error:
        if link is not None:
            link.send(reason=" ".join(str(error).split()))
        return EXIT_FAILED
    return EXIT_OK


def _pull(name: str, link: SupervisorLink | None) -> None:
    from engine.model.hub import download
    from engine.model.load import HUB_ID, resolve
    from services.processes.model_files import problems

    told_at = 0.0

    def report(completed: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if link is not None and now - told_at > _TELL_EVERY_S:
            told_at = now
            link.send(completed=completed, total=total)

    is_local = Path(name).exists() or not HUB_ID.fullmatch(name)
    path = resolve(name) if is_local else download(name, report)
    if wrong := problems(path):
        raise ModelJobError(f"mlx-lm cannot load {name}: {'; '.join(wrong)}")


def _delete(name: str) -> None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    repos = [each for each in cache.repos if each.repo_id == name and each.repo_type == "model"]
    revisions = [revision.commit_hash for each in repos for revision in each.revisions]
    cache.delete_revisions(*revisions).execute()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a failed download may still be waiting
