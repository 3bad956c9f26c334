"""The embeddings of langchain-openai, which sends token ids unless told otherwise."""

from embeddings import EMBEDDER, TEXTS, check_same, check_vectors
from harness import KEY, URL, check, failure, run
from langchain_openai import OpenAIEmbeddings
from openai import BadRequestError
from pydantic import SecretStr

embeddings = OpenAIEmbeddings(
    model=EMBEDDER,
    base_url=f"{URL}/v1",
    api_key=SecretStr(KEY),
    check_embedding_ctx_length=False,
    max_retries=0,
)


def embed() -> None:
    found = embeddings.embed_documents(TEXTS)
    check_vectors(found, len(TEXTS))
    query = embeddings.embed_query(TEXTS[0])
    check_same(query, found[0])


def errors() -> None:
    error = failure(BadRequestError, embeddings.embed_query, "a " * 5000)
    check(error.code == "context_length_exceeded", error)


run(embed, errors, rerank="the client has no rankings")
