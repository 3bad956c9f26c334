"""Fill-in-the-middle with Ollama's own client: ``suffix`` of prompts."""

from functools import partial

import harness as h
import ollama
from gaps import FEW, MANY, PREFIX, SUFFIX

client = ollama.Client(h.URL, headers=h.HEADERS)
few = {"num_predict": FEW, "temperature": 0}
fill = partial(client.generate, h.MODEL, PREFIX, SUFFIX)


def insert() -> None:
    h.check("insert" in client.show(h.MODEL).capabilities, "the capability")
    answer = fill(options=few)
    h.check(answer.response and answer.eval_count <= FEW and answer.context is None, answer)
    plain = client.generate(h.MODEL, PREFIX, raw=True, options=few)
    h.check(plain.prompt_eval_count < answer.prompt_eval_count, (plain, answer))


def stream() -> None:
    whole = fill(options=few).response
    *parts, last = fill(options=few, stream=True)
    h.check("".join(part.response for part in parts) == whole and last.done, whole)


def errors() -> None:
    wrong = h.failure(ollama.ResponseError, fill, system="You are an editor.")
    h.check(wrong.status_code == 400 and "'suffix'" in wrong.error, wrong)


def cancel() -> None:
    before = h.aborts()
    parts = fill(options={"num_predict": MANY, "ignore_eos": True}, stream=True)
    next(iter(parts))
    parts.close()
    h.check_aborted(before)


h.run(insert, stream, errors, cancel)
