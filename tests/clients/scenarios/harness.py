"""What every scenario needs. Only the client is installed where it runs, not this project."""

import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

URL = os.environ["CLIENT_URL"]
KEY = os.environ["CLIENT_KEY"]
HEADERS = {"authorization": f"Bearer {KEY}"}
MODEL = os.environ["CLIENT_MODEL"]
CALLER = os.environ.get("CLIENT_CALLER", "")
"""A second server, whose model calls tools: it goes by the same name and key."""
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
LONG = "Count from 1 to 1000, one number a line."
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITIES = ("Paris", "Rome")
Failure = TypeVar("Failure", bound=Exception)


class NotApplicable(Exception):
    """The client does not support the scenario."""


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The name of a city.
    """
    return f"sunny in {city}"


def check(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(str(what))


def failure(
    kind: type[Failure], action: Callable[..., object], *arguments: Any, **fields: Any
) -> Failure:
    """Return the error of this ``kind`` that ``action`` raises."""
    try:
        action(*arguments, **fields)
    except kind as error:
        return error
    raise AssertionError("no error")


def aborts() -> float:
    return counted("mlx_lm_server_aborts_total")


def answers(path: str) -> float:
    """Return how many requests of ``path`` have had an answer with 200."""
    return counted(f'mlx_lm_server_requests_total{{path="{path}",status="200"}}')


def counted(name: str) -> float:
    """Return the sum of the server's metrics whose lines begin with ``name``."""
    request = urllib.request.Request(URL + "/metrics", headers=HEADERS)
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def check_aborted(before: float) -> None:
    """Check that more requests are aborted than ``before``: the server saw the disconnection."""
    deadline = time.monotonic() + 90
    while aborts() <= before:
        check(time.monotonic() < deadline, "the server continued after the client disconnected")
        time.sleep(0.1)


def run(*scenarios: Callable[[], None], **missing: str) -> None:
    """Run the scenarios named in the arguments, or all. Print a line of JSON for each. Of those
    that the client does not support, ``missing`` has the reason by name."""
    actions = {scenario.__name__: scenario for scenario in scenarios}
    for name in (*actions, *missing):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        result, reason = _outcome(actions[name]) if name in actions else ("n/a", missing[name])
        print(json.dumps({"scenario": name, "result": result, "reason": reason}), flush=True)


def _outcome(scenario: Callable[[], None]) -> tuple[str, str]:
    try:
        scenario()
    except NotApplicable as error:
        return "n/a", str(error)
    except Exception as error:
        traceback.print_exc()
        return "fail", f"{type(error).__name__}: {error}"
    return "pass", ""
