"""Fill-in-the-middle with Mistral's own client."""

from functools import partial

import harness as h
from gaps import FEW, MANY, PREFIX, SUFFIX
from mistralai.client import Mistral
from mistralai.client.errors import MistralError

client = Mistral(api_key=h.KEY, server_url=h.URL)
fields = {"model": h.MODEL, "prompt": PREFIX, "suffix": SUFFIX, "temperature": 0}


def insert() -> None:
    answer = client.fim.complete(**fields, max_tokens=FEW, min_tokens=FEW, random_seed=7)
    (choice,) = answer.choices
    h.check(choice.message.content and choice.finish_reason == "length", answer)
    h.check(answer.usage.completion_tokens == FEW, answer.usage)
    h.check(client.fim.complete(model=h.MODEL, prompt="", max_tokens=1).choices, "an empty gap")


def stream() -> None:
    whole = client.fim.complete(**fields, max_tokens=FEW).choices[0].message.content
    parts = [event.data for event in client.fim.stream(**fields, max_tokens=FEW)]
    h.check("".join(part.choices[0].delta.content for part in parts) == whole, parts)
    h.check(parts[-1].usage.prompt_tokens > 0, parts[-1])


def errors() -> None:
    failure = partial(h.failure, MistralError, client.fim.complete)
    h.check(failure(**fields | {"model": "nobody"}).status_code == 404, "an unknown model")
    wrong = failure(**fields | {"temperature": 9})
    h.check(wrong.status_code == 400 and "temperature" in wrong.body, wrong)
    stranger = Mistral(api_key="wrong", server_url=h.URL)
    h.check(h.failure(MistralError, stranger.fim.complete, **fields).status_code == 401, "a key")


def cancel() -> None:
    before = h.aborts()
    with client.fim.stream(**fields, max_tokens=MANY, min_tokens=MANY) as events:
        next(iter(events))
    h.check_aborted(before)


h.run(insert, stream, errors, cancel)
