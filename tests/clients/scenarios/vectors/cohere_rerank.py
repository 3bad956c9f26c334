"""The rankings of Cohere's Python client."""

import cohere
from embeddings import RANKER, TEXTS, check_ranking
from harness import KEY, URL, NotApplicable, check, run

client = cohere.ClientV2(api_key=KEY, base_url=URL)


def embed() -> None:
    raise NotApplicable("it asks for /v2/embed, which is not served")


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
    try:
        client.rerank(model="no-model", query="what is it", documents=TEXTS)
    except cohere.NotFoundError:
        return
    raise AssertionError("no error")


run(embed, rerank, errors)
