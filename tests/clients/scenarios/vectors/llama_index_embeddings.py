"""The embeddings of LlamaIndex, for servers like OpenAI's."""

import asyncio

from embeddings import EMBEDDER, TEXTS, check_vectors
from harness import KEY, URL, NotApplicable, check, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from openai import BadRequestError

embeddings = OpenAILikeEmbedding(
    model_name=EMBEDDER, api_base=f"{URL}/v1", api_key=KEY, embed_batch_size=2, max_retries=0
)


def embed() -> None:
    found = embeddings.get_text_embedding_batch(TEXTS)
    check_vectors(found, len(TEXTS))
    query = embeddings.get_query_embedding(TEXTS[0])
    check(max(abs(a - b) for a, b in zip(query, found[0], strict=True)) < 1e-6, "another vector")
    check_vectors(asyncio.run(embeddings.aget_text_embedding_batch(TEXTS)), len(TEXTS))


def rerank() -> None:
    raise NotApplicable("the client has no rankings")


def errors() -> None:
    try:
        embeddings.get_text_embedding("a " * 5000)
    except BadRequestError as error:
        check(error.code == "context_length_exceeded", error)
    else:
        raise AssertionError("no error")


run(embed, rerank, errors)
