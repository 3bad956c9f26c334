"""The rankings of Cohere's Python client."""

import cohere
from embeddings import RANKER, TEXTS, check_ranking
from harness import KEY, URL, check, failure, run

client = cohere.ClientV2(api_key=KEY, base_url=URL)


def rerank() -> None:
    answer = client.rerank(model=RANKER, query="what is it", documents=TEXTS)
    check_ranking(
        [item.relevance_score for item in answer.results],
        [item.index for item in answer.results],
        len(TEXTS),
    )
    best = client.rerank(model=RANKER, query="what is it", documents=TEXTS, top_n=1)
    check([item.index for item in best.results] == [answer.results[0].index], best)


def errors() -> None:
    wrong = {"model": "no-model", "query": "what is it", "documents": TEXTS}
    failure(cohere.NotFoundError, client.rerank, **wrong)


run(rerank, errors, embed="it asks for /v2/embed, which is not served")
