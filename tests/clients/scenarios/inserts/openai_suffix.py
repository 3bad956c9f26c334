"""Fill-in-the-middle with openai's own client: ``suffix`` in text completions."""

from functools import partial

import harness as h
from gaps import FEW, MANY, PREFIX, SUFFIX
from openai import APIStatusError, OpenAI

client = OpenAI(base_url=f"{h.URL}/v1", api_key=h.KEY, max_retries=0)
fields = {"model": h.MODEL, "prompt": PREFIX, "suffix": SUFFIX, "temperature": 0}
create = client.completions.create


def insert() -> None:
    answer = create(**fields, max_tokens=FEW, logprobs=2, n=2)
    h.check(len(answer.choices) == 2 and answer.choices[0].text, answer)
    h.check(answer.choices[0].logprobs.tokens, answer)
    plain = create(**fields | {"suffix": None}, max_tokens=FEW)
    h.check(plain.usage.prompt_tokens < answer.usage.prompt_tokens, (plain.usage, answer.usage))


def stream() -> None:
    whole = create(**fields, max_tokens=FEW).choices[0].text
    parts = create(**fields, max_tokens=FEW, stream=True)
    h.check("".join(part.choices[0].text for part in parts) == whole, whole)


def errors() -> None:
    failure = partial(h.failure, APIStatusError, create)
    echoed = failure(**fields, echo=True)
    h.check(echoed.status_code == 400 and echoed.param == "echo", echoed)
    h.check(failure(**fields | {"suffix": 5}).param == "suffix", "a wrong suffix")


def cancel() -> None:
    before = h.aborts()
    parts = create(**fields, max_tokens=MANY, stream=True, extra_body={"ignore_eos": True})
    next(iter(parts))
    parts.close()
    h.check_aborted(before)


h.run(insert, stream, errors, cancel)
