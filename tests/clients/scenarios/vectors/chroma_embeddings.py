"""chromadb, whose collection embeds with its function for OpenAI: documents in, the nearest out."""

import os

import chromadb
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
from embeddings import DIMENSIONS, EMBEDDER, TEXTS, check_vectors
from harness import KEY, URL, check, failure, run
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


def errors() -> None:
    error = failure(BadRequestError, function, ["a " * 5000])
    check(error.code == "context_length_exceeded", error)


run(embed, errors, rerank="its function for OpenAI has no rankings")
