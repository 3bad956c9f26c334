"""The calls that Open WebUI makes for the texts of documents: vectors, of which several requests
are under way at once, through OpenAI's or Ollama's API, and the order of what was found."""

import asyncio
from typing import Any

import httpx
from embeddings import EMBEDDER, RANKER, TEXTS, check_ranking, check_vectors
from harness import KEY, URL, check, run

HEADERS = {
    "authorization": f"Bearer {KEY}",
    "X-OpenWebUI-User-Name": "A%20user",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "user@localhost",
    "X-OpenWebUI-User-Role": "user",
}


async def asked(path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(base_url=URL, headers=HEADERS, timeout=120) as client:
        answers = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
    for answer in answers:
        check(answer.status_code == 200, answer.text)
    return [answer.json() for answer in answers]


def embed() -> None:
    bodies = [{"input": [text], "model": EMBEDDER} for text in TEXTS]
    answers = asyncio.run(asked("/v1/embeddings", bodies))
    vectors = [item["embedding"] for answer in answers for item in answer["data"]]
    check_vectors(vectors, len(TEXTS))
    body = {"input": TEXTS, "model": EMBEDDER, "truncate": True}
    (answer,) = asyncio.run(asked("/api/embed", [body]))
    check_vectors(answer["embeddings"], len(TEXTS))
    pairs = zip(vectors[0], answer["embeddings"][0], strict=True)
    check(max(abs(a - b) for a, b in pairs) < 1e-6, "another vector")


def rerank() -> None:
    body = {"model": RANKER, "query": "what", "documents": TEXTS, "top_n": len(TEXTS)}
    (answer,) = asyncio.run(asked("/v1/rerank", [body]))
    found = answer["results"]
    scores = [each["relevance_score"] for each in found]
    check_ranking(scores, [each["index"] for each in found], len(TEXTS))


def errors() -> None:
    with httpx.Client(base_url=URL, headers=HEADERS, timeout=60) as client:
        answer = client.post("/v1/embeddings", json={"input": ["a " * 5000], "model": EMBEDDER})
        check(answer.status_code == 400, answer.text)
        answer = client.post("/api/embed", json={"input": TEXTS, "model": "nobody"})
        check(answer.status_code == 404 and "nobody" in answer.json()["error"], answer.text)


run(embed, rerank, errors)
