"""Serving of an embedding or reranking model, in an engine's process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from engine import device
from engine.io.inbox import Inbox
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from engine.model.errors import ModelUnavailable
from engine.model.starting import StartTimes, lean_imports
from services.processes.ready import announce, digests
from shared import settings, wire
from shared.settings import Settings
from shared.version import installed_version

if TYPE_CHECKING:  # this imports mlx
    from engine.embedding.build import LoadedTextModel

logger = logging.getLogger("engine")

MAX_JOBS = 32
"""Max messages with texts that an engine holds; each has some dozens of texts."""


def task_of(options: Settings, path: Path) -> wire.Task:
    """Return the task of the model in ``path``. Raises: `ModelUnavailable`."""
    from engine.embedding.checkpoint import task_of

    return task_of(path) if options.task == "auto" else options.task


def serve_texts(
    options: Settings,
    path: Path,
    task: wire.Task,
    io_thread: IOThread,
    inbox: Inbox,
    status: EngineStatus,
    times: StartTimes,
    *,
    engine: str,
    incarnation: str,
) -> None:
    """Load the model and serve until drained. Raises: `ModelUnavailable`."""
    named = options.adapter or options.max_adapters
    for flag, given in (
        ("--adapter-path", options.adapter_path),
        ("--adapter", named),
        ("--distributed-mode", options.ranks > 1),
    ):
        if given:
            raise ModelUnavailable(f"{flag} cannot be used with an embedding or reranking model")
    with lean_imports():
        import mlx.core as mx

        from engine.embedding.build import load_text_model
        from engine.embedding.core import EmbeddingCore
        from engine.replica.memory import EngineMemory, set_limits

        times.ended("imports")
        device.prepare()
        own = EngineMemory.of(options)
        logger.info("loading the model %s, task %s", options.model, task)
        loaded = load_text_model(
            path, task, cpu_precision=options.cpu_precision, memory_bytes=own.size_bytes
        )
    times.ended("weights")
    set_limits(own)
    hello = _hello(options, loaded, task, engine=engine, incarnation=incarnation)
    announce(hello, loaded.tokenizer_files, io_thread, status, times)
    EmbeddingCore(
        model=loaded.model,
        inbox=inbox,
        io_thread=io_thread,
        status=status,
        max_jobs=MAX_JOBS,
        active_memory_bytes=mx.get_active_memory,
    ).run()


def _hello(
    options: Settings, loaded: LoadedTextModel, task: wire.Task, *, engine: str, incarnation: str
) -> wire.Hello:
    names = options.served_model_name or (options.model,)
    return wire.Hello(
        protocol=wire.PROTOCOL_VERSION,
        engine=engine,
        incarnation=incarnation,
        model=names[0],
        aliases=list(names[1:]),
        fingerprint=loaded.fingerprint,
        context_length=loaded.max_tokens,
        vocab_size=loaded.vocab_size,
        block_size=options.block_size,
        total_blocks=0,
        max_sequences=MAX_JOBS,
        max_batch_size=MAX_JOBS,
        namespace=b"",
        eos_token_ids=[],
        files=digests(loaded.tokenizer_files),
        capabilities=["embeddings" if task == "embed" else "rerank"],
        version=installed_version(),
        options=settings.serving_options(options),
        task=task,
        text_task=loaded.task,
    )
