"""A backend of LocalAI in a process of its own, called as LocalAI calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.localai import messages
from tests.e2e.server import descendants, is_running, private_directory

PATIENCE_S = 120
_REPLIES = {
    "Health": messages.Reply,
    "LoadModel": messages.Result,
    "Free": messages.Result,
    "Predict": messages.Reply,
    "PredictStream": messages.Reply,
    "TokenizeString": messages.TokenizationResponse,
    "Status": messages.StatusResponse,
    "GetMetrics": messages.MetricsResponse,
    "Embedding": messages.EmbeddingResult,
    "TTS": messages.Result,
}


class LocalAi:
    """The caller's end of a running backend."""

    def __init__(self, process: subprocess.Popen[str], port: int, token: str = "") -> None:
        self.process, self.port = process, port
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(self, method: str, message: Any = None) -> Any:
        """Call ``method``; PredictStream returns the stream."""
        path = f"/{messages.SERVICE}/{method}"
        message = messages.HealthMessage() if message is None else message
        is_stream = method == "PredictStream"
        make = self._channel.unary_stream if is_stream else self._channel.unary_unary
        called = make(path, type(message).SerializeToString, _REPLIES[method].FromString)
        return called(message, timeout=PATIENCE_S, metadata=self.metadata)

    def error(self, method: str, message: Any = None) -> tuple[str, str]:
        """Return the name of the status and the message of a call that fails."""
        try:
            answer = self.call(method, message)
            answer = list(answer) if method == "PredictStream" else answer
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(answer)

    def pids(self, name: str) -> list[int]:
        """Return the processes below the backend whose command line contains ``name``."""
        return [pid for pid, command in descendants(self.process.pid) if name in command]


@contextmanager
def localai(*flags: str, token: str = "", **environment: str) -> Iterator[LocalAi]:
    """Run a backend on a free port, stop it, and fail if any of its processes is left."""
    with private_directory() as private:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_lm_server", "localai", "--addr", "127.0.0.1:0", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": private,
                "MLX_LM_SERVER_SSD_CACHE_DIR": f"{private}/ssd",
                "MLX_LM_SERVER_DISK_RESERVE_GB": "0",
                "MLX_LM_SERVER_SPARE_ENGINE_AFTER_S": "0",
                "LOCALAI_GRPC_AUTH_TOKEN": token,
                **environment,
            },
        )
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert "ready: port " in ready, ready
        try:
            yield LocalAi(process, int(ready.rsplit(" ", 1)[1]), token)
        finally:
            children = [pid for pid, _ in descendants(process.pid)]
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()
                left = [pid for pid in children if is_running(pid)]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left over: {left}"
