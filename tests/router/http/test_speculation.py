"""Figures of drafts, as `/v1/spec_decode/metrics` and Prometheus show those of heartbeats."""

from __future__ import annotations

from shared.wire import DraftCounts, DraftStats, EngineStats
from tests.router.conftest import Server, eventually
from tests.router.scripted_engine import ScriptedEngine


def test_figures_are_sums_over_sources_and_engines(server: Server, engine: ScriptedEngine) -> None:
    path = "/v1/spec_decode/metrics"
    assert server.client.get("/v1/models").json()["data"][0]["draft_saved_s"] is None
    nothing = server.client.get(path).json()
    assert nothing["models"][0]["engines"] == []
    assert nothing["total"]["acceptance_rate"] is None
    other = server.start_engine(name="engine-1")
    ngram = DraftStats(sources={"ngram": DraftCounts(4, 20, 10, -0.25, 0.5)})
    both = {"ngram": DraftCounts(1, 5, 0), "grammar": DraftCounts(5, 15, 10, 2.0)}
    engine.behaviour.stats = EngineStats(drafts=ngram)
    other.behaviour.stats = EngineStats(
        drafts=DraftStats(sources=both, rates={"grammar/0": 0.9}, step_s={"1": 0.02})
    )
    eventually(lambda: server.client.get(path).json()["total"]["drafted_tokens"] == 40)
    shown = server.client.get(path).json()
    total = {"proposals": 10, "drafted_tokens": 40, "accepted_tokens": 20, "saved_s": 1.75}
    total |= {"spent_s": 0.5, "acceptance_rate": 0.5, "accepted_per_proposal": 2.0}
    assert shown["total"] == total
    assert server.client.get("/v1/models").json()["data"][0]["draft_saved_s"] == 1.8
    (model,) = shown["models"]
    first, second = sorted(model["engines"], key=lambda each: each["name"])
    assert (first["total"]["saved_s"], second["acceptance"]) == (-0.25, {"grammar/0": 0.9})
    assert second["step_s"] == {"1": 0.02}
    assert second["sources"]["ngram"]["acceptance_rate"] == 0.0
    label = '{engine="engine-1",model="tiny",source="grammar"}'
    for name, value in (
        *(("accepted_draft_tokens_total", 10), ("draft_tokens_total", 15)),
        *(("draft_proposals_total", 5), ("draft_saved_seconds", 2)),
    ):
        assert server.metric(f"{name}{label} ") == value
    label = '{engine="engine-0",model="tiny",source="ngram"}'
    assert server.metric(f"draft_seconds_total{label} ") == 0.5
