"""Open WebUI itself, asked about an uploaded file in Chromium. The server embeds the file by
Ollama's API or OpenAI's, ranks what was found, and answers."""

import os

import application
import harness as h

EMBEDDER, RANKER = os.environ["CLIENT_EMBEDDER"], os.environ["CLIENT_RANKER"]
TEXT = "The lighthouse of Port Amber was built in 1907. Its keeper is called Anna."
QUESTION = "When was the lighthouse of Port Amber built?"
MODEL = f"{h.MODEL}:latest"


def use_embedder(model: str, engine: str, base: str) -> None:
    form = {
        "RAG_EMBEDDING_ENGINE": engine,
        "RAG_EMBEDDING_MODEL": model,
        f"{engine}_config": {"url": h.URL + base, "key": h.KEY},
    }
    app.post("/api/v1/retrieval/embedding/update", form)


def ask() -> None:
    with app.chat(MODEL) as page:
        page.upload("port.txt", TEXT)
        text = page.ask(QUESTION)
        h.check("1907" in text and "1 Source" in text, text)


def embed() -> None:
    for engine, base, path in (("ollama", "", "/api/embed"), ("openai", "/v1", "/v1/embeddings")):
        use_embedder(EMBEDDER, engine, base)
        before = h.answers(path)
        ask()
        h.check(h.answers(path) >= before + 2, f"{path} for the file and the question")


def rerank() -> None:
    settings = {
        "ENABLE_RAG_HYBRID_SEARCH": True,
        "RAG_RERANKING_ENGINE": "external",
        "RAG_RERANKING_MODEL": RANKER,
        "RAG_EXTERNAL_RERANKER_URL": h.URL + "/v1/rerank",
        "RAG_EXTERNAL_RERANKER_API_KEY": h.KEY,
    }
    app.post("/api/v1/retrieval/config/update", settings)
    before = h.answers("/v1/rerank")
    ask()
    h.check(h.answers("/v1/rerank") > before, "/v1/rerank")


def errors() -> None:
    use_embedder("nobody", "ollama", "")
    with app.chat(MODEL) as page:
        page.upload("port.txt", TEXT)
        page.page.get_by_text("nobody").first.wait_for()


with application.running() as app:
    h.run(embed, rerank, errors)
