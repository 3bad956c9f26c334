"""The embeddings of langchain-openai, which sends token ids unless told otherwise."""

from embeddings import EMBEDDER, TEXTS, check_vectors
from harness import KEY, URL, NotApplicable, check, run
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
    check(max(abs(a - b) for a, b in zip(query, found[0], strict=True)) < 1e-6, "another vector")


def rerank() -> None:
    raise NotApplicable("the client has no rankings")


def errors() -> None:
    try:
        embeddings.embed_query("a " * 5000)
    except BadRequestError as error:
        check(error.code == "context_length_exceeded", error)
    else:
        raise AssertionError("no error")


run(embed, rerank, errors)
