"""TypeSafe's Python client."""

from typing import Any

import harness as h
import typesafe_sdk as ts

client: Any = ts.TypeSafeClient(
    base_url=h.URL, api_key=h.KEY, model=h.MODEL, retry=ts.RetryPolicy(max_retries=0), timeout=120
)
STATE = {"subject": "My card was charged twice", "text": "Nobody replies. " * 100}


def decide() -> None:
    found = client.system_one(
        state=STATE,
        questions={
            "team": ts.Choice(
                instructions="Who handles this?", criteria={"billing": "payments", "post": None}
            ),
            "angry": ts.Noul(instructions="Is the writer angry?"),
            "described": ts.Noul(instructions=None, criteria={"true": "it is about money"}),
            "urgent": ts.Score(instructions={"task": "rate"}, criteria=["later", {"when": "now"}]),
        },
    )
    h.check(list(found.answers) == ["team", "angry", "described", "urgent"], found)
    team = found.choices["team"]
    h.check(list(team.probabilities) == ["billing", "post"], team)
    h.check(team.choice in team.probabilities and 0 <= team.confidence <= 1, team)
    h.check(0 < found.nouls["angry"].noul < 1 and 0 < found.nouls["described"].noul < 1, found)
    urgent = found.scores["urgent"]
    h.check(urgent.legend == {0: "later", 1: {"when": "now"}}, urgent)
    h.check(abs(sum(urgent.probabilities.values()) - 1) < 1e-6, urgent)
    h.check(found.usage.input_tokens > 0 == found.usage.output_tokens, found.usage)


def models() -> None:
    listed = client.models.list()
    h.check(h.MODEL in [model.name for model in listed.models], listed)
    h.check(all(model.release_date and model.description for model in listed.models), listed)


def errors() -> None:
    angry = {"angry": ts.Noul(instructions="Is the writer angry?")}
    missing = h.failure(ts.TypeSafeAPIError, client.system_one, STATE, angry, model="nobody")
    h.check(missing.status == 404 and "nobody" in str(missing), missing)
    levels = {"urgent": ts.Score(instructions="How?", criteria=["a"] * 11)}
    invalid = h.failure(ts.TypeSafeAPIError, client.system_one, STATE, levels)
    h.check(invalid.status == 422 and "11 levels" in str(invalid), invalid)
    h.check(invalid.request_id, invalid.headers)
    stranger: Any = ts.TypeSafeClient(
        base_url=h.URL, api_key="wrong", model=h.MODEL, retry=ts.RetryPolicy(max_retries=0)
    )
    refused = h.failure(ts.TypeSafeAPIError, stranger.system_one, STATE, angry)
    h.check(refused.status == 401, refused)


h.run(decide, models, errors)
