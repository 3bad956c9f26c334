"""chromadb, whose collection embeds with its function for OpenAI: documents in, the nearest out."""

import os

import chromadb
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
from embeddings import DIMENSIONS, EMBEDDER, TEXTS, check_vectors
from harness import KEY, URL, NotApplicable, check, run
from openai import BadRequestError

os.environ["CHROMA_OPENAI_API_KEY"] = KEY
function = OpenAIEmbeddingFunction(
    api_key_env_var="CHROMA_OPENAI_API_KEY", api_base=f"{URL}/v1", model_name=EMBEDDER
)


def embed() -> None:
    check_vectors([[float(number) for number in vector] for vector in function(TEXTS)], len(TEXTS))
    collection = chromadb.EphemeralClient().create_collection(
        "texts", embedding_function=function, metadata={"hnsw:space": "cosine"}
    )
    collection.add(ids=["0", "1", "2"], documents=TEXTS)
    found = collection.query(query_texts=[TEXTS[1]], n_results=1, include=["distances"])
    check(found["ids"] == [["1"]], found)
    check(abs(found["distances"][0][0]) < 1e-4, found)
    stored = collection.get(include=["embeddings"])["embeddings"]
    check(stored.shape == (len(TEXTS), DIMENSIONS), stored.shape)


def rerank() -> None:
    raise NotApplicable("its function for OpenAI has no rankings")


def errors() -> None:
    try:
        function(["a " * 5000])
    except BadRequestError as error:
        check(error.code == "context_length_exceeded", error)
    else:
        raise AssertionError("no error")


run(embed, rerank, errors)
