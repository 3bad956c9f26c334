"""Who decides how long a model stays loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from router.fleet.adapters import Adapters
from router.fleet.engines.registry import Registry
from router.fleet.models.supervised import Supervised
from router.fleet.router import Router
from router.fleet.tenants.tenant import EVERYBODY, Tenant
from router.ollama.keeping import keep, seconds_left
from router.ollama.schemas import OllamaChatRequest
from shared.settings import Settings
from tests.router.fleet.test_supervised import Channel


def made(channel: Channel, *, manage: bool = True, **model: Any) -> Router:
    supervised = Supervised(channel)
    described = {"names": ["a"], "state": "ready", **model}
    supervised.on_models({"models": {"a": described}})
    settings = Settings(ollama_manage=manage)
    registry = cast(Registry, SimpleNamespace(models={}, find_model=lambda _: None))
    adapters = Adapters(registry, supervised, lambda *_: False)
    router = SimpleNamespace(supervised=supervised, settings=settings, adapters=adapters)
    return cast(Router, router)


def asking(keep_alive: Any) -> OllamaChatRequest:
    body = {"model": "a"} | ({} if keep_alive is None else {"keep_alive": keep_alive})
    return msgspec.convert(body, OllamaChatRequest)


FOREVER = -1


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        *(("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("250ms", 0.25), (300, 300.0)),
        *((1.5, 1.5), (0, 0.0), ("0", 0.0)),
        *((-1, FOREVER), ("-1m", FOREVER), ("-1", FOREVER)),
    ],
)
def test_a_request_says_how_long(keep_alive: Any, seconds: float) -> None:
    channel = Channel()
    keep(made(channel), asking(keep_alive), "a", EVERYBODY)
    assert channel.told == [{"do": "keep", "target": "a", "keep_s": seconds}]


def test_without_one_what_an_earlier_request_said_is_taken_back() -> None:
    channel = Channel()
    keep(made(channel), asking(None), "a", EVERYBODY)
    assert not channel.told, "nothing was said"
    keep(made(channel, kept_s=60.0), asking(None), "a", EVERYBODY)
    assert channel.told == [{"do": "keep", "target": "a", "keep_s": None}]


def test_only_those_who_may_decide_are_heard() -> None:
    channel = Channel()
    stranger = Tenant(name="x", models=frozenset({"b"}))
    keep(made(channel), asking(0), "a", stranger)
    keep(made(channel, manage=False), asking(0), "a", EVERYBODY)
    keep(made(channel), asking(0), "nobody", EVERYBODY)
    assert not channel.told


def test_the_time_that_is_left() -> None:
    for fields, least, most in (
        ({}, float("inf"), float("inf")),
        ({"idle_unload_s": 60.0}, 59, 60),
        ({"idle_unload_s": 60.0, "kept_s": 10.0}, 9, 10),
        ({"idle_unload_s": 60.0, "kept_s": -1.0}, float("inf"), float("inf")),
        ({"idle_unload_s": 60.0, "pinned": True}, float("inf"), float("inf")),
    ):
        assert least <= seconds_left(made(Channel(), **cast(dict[str, Any], fields)), "a") <= most
