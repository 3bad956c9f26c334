"""The embeddings of openai's own Python client, which asks for base64 by default."""

from typing import Any

from embeddings import DIMENSIONS, EMBEDDER, TEXTS, check_vectors
from harness import KEY, URL, check, failure, run
from openai import BadRequestError, OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def embed() -> None:
    answer = client.embeddings.create(model=EMBEDDER, input=TEXTS)
    check_vectors([item.embedding for item in answer.data], len(TEXTS))
    check(answer.usage.prompt_tokens > len(TEXTS), answer.usage)
    plain = client.embeddings.create(model=EMBEDDER, input=TEXTS, encoding_format="float")
    check([i.embedding for i in plain.data] == [i.embedding for i in answer.data], "other numbers")
    short = client.embeddings.create(model=EMBEDDER, input=TEXTS[0], dimensions=DIMENSIONS // 4)
    check(len(short.data[0].embedding) == DIMENSIONS // 4, short)


def errors() -> None:
    large: Any = {"model": EMBEDDER, "input": "a", "dimensions": DIMENSIONS + 1}
    error = failure(BadRequestError, client.embeddings.create, **large)
    check(error.param == "dimensions", error)


run(embed, errors, rerank="the client has no rankings")
