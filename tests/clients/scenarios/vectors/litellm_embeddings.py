"""The embeddings and rankings of LiteLLM."""

import litellm
from embeddings import EMBEDDER, RANKER, TEXTS, check_ranking, check_vectors
from harness import KEY, URL, failure, run

ADDRESS = {"api_base": f"{URL}/v1", "api_key": KEY}


def embed() -> None:
    answer = litellm.embedding(
        model=f"openai/{EMBEDDER}", input=TEXTS, encoding_format="float", **ADDRESS
    )
    check_vectors([item["embedding"] for item in answer.data], len(TEXTS))


def rerank() -> None:
    answer = litellm.rerank(
        model=f"jina_ai/{RANKER}",
        query="what is it",
        documents=TEXTS,
        api_base=f"{URL}/v1/rerank",
        api_key=KEY,
    )
    results = answer.results or []
    scores = [item["relevance_score"] for item in results]
    check_ranking(scores, [item["index"] for item in results], len(TEXTS))


def errors() -> None:
    wrong = {"model": "openai/no-model", "input": TEXTS, **ADDRESS}
    failure(litellm.exceptions.NotFoundError, litellm.embedding, **wrong)


run(embed, rerank, errors)
