"""The flags of `mlx-lm-server bench serve`."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from services.commands.admin_client import add_json_flag, default_url
from services.commands.parser import CommandParser
from services.measuring.client import TIMEOUT_S
from services.measuring.measures import Limits, Measure
from services.measuring.workloads import (
    DEFAULTS,
    Endpoint,
    TokenRange,
    WorkloadName,
    WorkloadShape,
)

KEY_VARIABLE = "MLX_LM_SERVER_API_KEY"
CONCURRENCY = (1, 2, 4, 8, 16)
MIN_REQUESTS = 8
PER_CLIENT = 4
OPEN_S = 30
"""Duration of an open loop without a flag."""
JOINS = 3


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    url: str
    api_key: str
    model: str
    label: str
    endpoint: Endpoint
    shape: WorkloadShape
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...] | None
    """None for a closed loop."""
    burstiness: float
    requests: int | None
    duration_s: float | None
    goodput: Limits
    seed: int
    warm_up: int
    temperature: float
    ignore_eos: bool
    extra_body: dict[str, Any]
    timeout_s: float
    json: bool
    save: Path | None
    plot: Path | None

    def loads(self) -> Sequence[int | float]:
        """Return the number of clients, or requests per second, of each level."""
        return self.concurrency if self.request_rate is None else self.request_rate

    def count(self, load: int | float) -> int | None:
        """Return the number of conversations (or joins) in a level, at least one for each client;
        None if only time limits it."""
        if self.shape.name == "long-join":
            return self.requests or (None if self.duration_s else JOINS)
        if self.requests is not None:
            clients = 0 if self.request_rate is not None else math.ceil(load)
            return max(clients, math.ceil(self.requests / self.shape.turns))
        if self.duration_s is not None:
            return None
        if self.request_rate is not None:
            return math.ceil(max(MIN_REQUESTS, load * OPEN_S))
        return math.ceil(max(MIN_REQUESTS, load * PER_CLIENT) / self.shape.turns)

    def fields(self) -> dict[str, Any]:
        """Return the fields added to every request."""
        found: dict[str, Any] = {"temperature": self.temperature}
        if self.ignore_eos:
            found["ignore_eos"] = True
        return {**found, **self.extra_body}

    def said(self) -> dict[str, Any]:
        """Return the description of the workload for the report."""
        shape = {name: str(value) for name, value in self.shape._asdict().items()}
        return {
            **shape,
            "burstiness": None if self.request_rate is None else self.burstiness,
            "fields": self.fields(),
            "goodput_ms": dict(self.goodput),
        }


def read_options(argv: Sequence[str]) -> ServeOptions:
    """Return the options in ``argv``. Raises SystemExit with the error."""
    parser = make_parser()
    given = parser.parse_args(argv)
    if given.request_rate and given.workload == "long-join":
        parser.error(
            "--request-rate: cannot be used with joins, where a long prompt joins --concurrency "
            "streams"
        )
    if given.endpoint == "completions" and given.workload == "multi-turn":
        parser.error("--workload multi-turn: requires --endpoint chat")
    base = DEFAULTS[given.workload]
    names = ("input_tokens", "output_tokens", "prefix_tokens", "prefixes", "turns", "join_tokens")
    changes = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.workload != "multi-turn":
        changes.pop("turns", None)
    made = {
        "url": given.url.rstrip("/"),
        "shape": base._replace(**changes),
        "goodput": dict(given.goodput),
        "seed": random.randrange(1 << 31) if given.seed is None else given.seed,
    }
    same = [each.name for each in fields(ServeOptions) if each.name not in made]
    return ServeOptions(**made, **{name: getattr(given, name) for name in same})


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="mlx-lm-server bench serve",
        description="Measure any server with OpenAI's API under load. docs/bench.md defines the "
        "figures. Ctrl-C stops and reports what was measured.",
        epilog="Exit codes: 0 done, 1 some requests failed, 2 invalid arguments, 3 no server "
        "responds, 130 interrupted.",
        allow_abbrev=False,
    )
    _add_server(parser)
    _add_workload(parser)
    _add_load(parser)
    _add_output(parser)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    url = default_url()
    group.add_argument("--url", default=url, help="server URL (default: %(default)s)")
    group.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        help=f"API key (default: ${KEY_VARIABLE}, which other users cannot read)",
    )
    group.add_argument("--model", default="", help="model (default: the server's first model)")
    group.add_argument(
        "--endpoint",
        choices=get_args(Endpoint),
        default="chat",
        help="/v1/chat/completions or /v1/completions (default: %(default)s)",
    )
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="extra fields of requests"
    )
    group.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate up to the max length, if the server supports the field ignore_eos",
    )
    group.add_argument(
        "--timeout-s",
        type=_positive,
        default=TIMEOUT_S,
        help="timeout of a request (default: %(default)g)",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        choices=get_args(WorkloadName),
        default="fixed",
        help="fixed and mixed lengths; a shared prefix; conversations; or streams joined by a "
        "long prompt (default: %(default)s)",
    )
    for name, what in (
        ("input", "length of a prompt, or of each message of a conversation"),
        ("output", "max length of an answer"),
    ):
        group.add_argument(
            f"--{name}-tokens",
            type=_token_range,
            metavar="N[:M]",
            help=f"{what}; random between N and M if both are given",
        )
    group.add_argument("--prefix-tokens", type=count, metavar="N", help="(default: 1000)")
    group.add_argument(
        "--prefixes", type=count, metavar="N", help="number of different prefixes (default: 1)"
    )
    group.add_argument(
        "--turns", type=count, metavar="N", help="turns of a conversation (default: 4)"
    )
    group.add_argument(
        "--join-tokens", type=count, metavar="N", help="length of the long prompt (default: 2000)"
    )
    group.add_argument(
        "--seed", type=int, help="seed of the prompts (default: random, so that nothing is cached)"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    loops = group.add_mutually_exclusive_group()
    loops.add_argument(
        "--concurrency",
        type=counts,
        default=CONCURRENCY,
        metavar="N[,N...]",
        help="closed loop: levels of concurrent clients, each waiting for its answer (default: "
        f"{','.join(map(str, CONCURRENCY))})",
    )
    loops.add_argument(
        "--request-rate",
        type=_rates,
        metavar="R[,R...]",
        help="open loop: levels of requests (or conversations) per second, independent of "
        "completions",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        help="burstiness of the open loop: 1 is a Poisson process, lower values are burstier "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help=f"requests per level (default: {PER_CLIENT} per client, at least {MIN_REQUESTS}; "
        "never fewer than a conversation for each client; "
        f"{OPEN_S} s of an open loop; {JOINS} joins)",
    )
    group.add_argument(
        "--duration-s",
        type=_positive,
        metavar="S",
        help="start no requests (or conversations) of a level after this time",
    )
    group.add_argument(
        "--warm-up",
        type=int,
        default=1,
        metavar="N",
        help="warm-up requests (default: %(default)s)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"count good requests: those within limits for {', '.join(get_args(Measure))}",
    )
    add_json_flag(parser)
    group.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the levels, as .svg, .png or .pdf"
    )
    group.add_argument(
        "--label", default="", help="label of the server in plots (default: the model)"
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not greater than 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not greater than 0")
    return value


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(map(_positive, text.split(",")))


def _token_range(text: str) -> TokenRange:
    try:
        return TokenRange.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or N:M") from None


def _limit(text: str) -> tuple[Measure, float]:
    name, _, value = text.partition(":")
    for known in get_args(Measure):
        if name == known:
            return known, _positive(value)
    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(get_args(Measure))}")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found
