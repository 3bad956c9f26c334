"""lm-eval through `local-completions`: answers and log-likelihoods, without a data set."""

import os
from typing import Any

from harness import ANSWER, KEY, MODEL, QUESTION, URL, check, failure, run

os.environ["OPENAI_API_KEY"] = KEY

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def model(name: str = MODEL) -> Any:
    return LocalCompletionsAPI(
        base_url=URL + "/v1/completions",
        model=name,
        tokenizer=os.environ["CLIENT_TOKENIZER"],
        tokenizer_backend="huggingface",
        max_retries=1,
    )


def asked(kind: str, *arguments: Any) -> list[Any]:
    return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]


def chat() -> None:
    prompt = f"Question: {QUESTION}\nAnswer:\n"
    requests = asked("generate_until", prompt, {"until": ["."], "max_gen_toks": 20})
    (answer,) = model().generate_until(requests)
    check(ANSWER in answer, answer)
    ((score, _),) = model().loglikelihood(asked("loglikelihood", "The capital is", " Paris"))
    check(score < 0, score)


def errors() -> None:
    requests = asked("generate_until", "x", {"max_gen_toks": 5})
    error = failure(Exception, model("nobody").generate_until, requests)
    check("404" in f"{error!r} {error.__cause__!r}", repr(error))


run(
    chat,
    errors,
    stream="it does not stream",
    tools="it has no tools",
    structured="it has no structured output",
    cancel="it reads every answer to its end",
)
