"""The backend of LocalAI beside the HTTP API of the same server: tokens per second of streams."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import prompts
from bench.client import complete_all
from bench.servers import ended_with_us, ours

STREAMS, PROMPT_TOKENS, TOKENS = 16, 128, 64


def localai(model: str, runs: int) -> None:
    """Print both rates for `STREAMS` streams at once, in turn, and the median of their ratios."""
    with ours(model, "--max-batch-size", str(STREAMS)) as port, backend(port) as address:
        rates: tuple[list[float], list[float]] = ([], [])
        for run in range(runs + 1):
            for which in (0, 1) if run % 2 else (1, 0):
                seed = 200_000 + 1000 * run + 100 * which
                texts = [prompts.text(seed + i, PROMPT_TOKENS) for i in range(STREAMS)]
                begun = time.perf_counter()
                if which:
                    streams = asyncio.run(complete_all(port, texts, TOKENS))
                    tokens = sum(stream.completion_tokens for stream in streams)
                else:
                    tokens = asyncio.run(predict_all(address, texts))
                if run:  # the first pair warms up
                    rates[which].append(tokens / (time.perf_counter() - begun))
        mine, theirs = (statistics.median(each) for each in rates)
        ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
        print(f"{STREAMS} streams: gRPC {mine:.1f} tok/s, HTTP {theirs:.1f} tok/s, {ratio:.3f}")


@contextmanager
def backend(port: int) -> Iterator[str]:
    """Run a backend in front of the server at ``port``; yield its address."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlx_lm_server", "localai"),
            *("--addr", "127.0.0.1:0", "--url", f"http://127.0.0.1:{port}"),
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "LOCALAI_GRPC_AUTH_TOKEN": ""},
    )
    with process, ended_with_us(process):
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline().split()[-1])}"
        finally:
            process.terminate()


async def predict_all(address: str, texts: list[str]) -> int:
    """Stream an answer to each text at once; return the number of tokens."""
    import grpc

    from services.localai import messages

    async with grpc.aio.insecure_channel(address) as channel:
        load = channel.unary_unary(
            f"/{messages.SERVICE}/LoadModel",
            request_serializer=messages.ModelOptions.SerializeToString,
            response_deserializer=messages.Result.FromString,
        )
        loaded = await load(messages.ModelOptions(Model="any"))
        assert loaded.success, loaded.message
        predict = channel.unary_stream(
            f"/{messages.SERVICE}/PredictStream",
            request_serializer=messages.PredictOptions.SerializeToString,
            response_deserializer=messages.Reply.FromString,
        )

        async def one(text: str) -> int:
            tokens = 0
            async for reply in predict(messages.PredictOptions(Prompt=text, Tokens=TOKENS)):
                tokens = reply.tokens
            return tokens

        return sum(await asyncio.gather(*map(one, texts)))
