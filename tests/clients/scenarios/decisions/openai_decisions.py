"""OpenAI's Python client: decisions."""

from typing import Any

import harness as h
import openai

client: Any = openai.OpenAI(base_url=h.URL + "/v1", api_key=h.KEY, max_retries=0)
STATE = "My card was charged twice, and nobody replies."
PREDICATE = {"type": "predicate", "instructions": "Is the writer angry?"}


def decide() -> None:
    choices = [{"value": "true", "description": "a word"}, {"value": True}, {"value": "billing"}]
    levels = [{"label": "later"}, {"label": "now", "description": "today"}]
    parts = [
        {"type": "input_text", "text": STATE},
        {"type": "input_json", "data": {"order": 5}},
    ]
    found = client.decisions.create(
        model=h.MODEL,
        input=[{"role": "user", "content": parts}],
        questions=[
            {"type": "choice", "name": "team", "instructions": "Which?", "choices": choices},
            PREDICATE,
            {"type": "score", "instructions": "How urgent?", "levels": levels},
        ],
    )
    choice, predicate, score = found.answers
    h.check([each.value for each in choice.probabilities] == ["true", True, "billing"], choice)
    h.check(choice.name == "team" and choice.choice in ("true", True, "billing"), choice)
    h.check(abs(sum(each.probability for each in choice.probabilities) - 1) < 1e-6, choice)
    h.check(predicate.name is None and 0 < predicate.probability < 1, predicate)
    h.check([each.label for each in score.probabilities] == ["later", "now"], score)
    h.check(0 <= score.score <= 1 and 0 <= score.confidence <= 1, score)
    h.check(found.usage.total_tokens == found.usage.input_tokens > 0, found.usage)
    h.check(found.usage.output_tokens_details.reasoning_tokens == 0, found.usage)
    again = client.decisions.create(model=h.MODEL, input=STATE, questions=[PREDICATE])
    warm = client.decisions.create(model=h.MODEL, input=STATE, questions=[PREDICATE])
    h.check(warm.answers == again.answers, warm)


def errors() -> None:
    create = client.decisions.create
    missing = h.failure(
        openai.NotFoundError, create, model="nobody", input=STATE, questions=[PREDICATE]
    )
    h.check(missing.code == "model_not_found", missing)
    wrong = {**PREDICATE, "type": "choice", "choices": [{"value": "a"}]}
    invalid = h.failure(
        openai.BadRequestError, create, model=h.MODEL, input=STATE, questions=[PREDICATE, wrong]
    )
    h.check(invalid.param == "questions[1].choices", invalid)
    long = h.failure(
        openai.BadRequestError,
        create,
        model=h.MODEL,
        input="a " * 200_000,
        questions=[PREDICATE],
    )
    h.check(long.code == "context_length_exceeded", long)


h.run(decide, errors, models="the models of chats are those of decisions")
