"""The embeddings of LlamaIndex, for servers like OpenAI's."""

import asyncio

from embeddings import EMBEDDER, TEXTS, check_same, check_vectors
from harness import KEY, URL, check, failure, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from openai import BadRequestError

embeddings = OpenAILikeEmbedding(
    model_name=EMBEDDER, api_base=f"{URL}/v1", api_key=KEY, embed_batch_size=2, max_retries=0
)


def embed() -> None:
    found = embeddings.get_text_embedding_batch(TEXTS)
    check_vectors(found, len(TEXTS))
    query = embeddings.get_query_embedding(TEXTS[0])
    check_same(query, found[0])
    check_vectors(asyncio.run(embeddings.aget_text_embedding_batch(TEXTS)), len(TEXTS))


def errors() -> None:
    error = failure(BadRequestError, embeddings.get_text_embedding, "a " * 5000)
    check(error.code == "context_length_exceeded", error)


run(embed, errors, rerank="the client has no rankings")
