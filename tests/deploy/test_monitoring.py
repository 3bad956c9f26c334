"""Dashboards and alerts of deploy/monitoring: what they ask for is what the server exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/mlx-lm-server.json").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)"
)

_OF_PROMETHEUS = {"up": {"job", "instance"}}
_OF_EACH_TARGET = {"instance", "job"}
_WORDS = {"by", "unless", "on", "and", "or", "label_values"}
_ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*?) \|", re.MULTILINE)


def exported() -> dict[str, set[str]]:
    """Return the labels of each series, by its name, as docs/metrics.md lists them.

    `tests/test_docs.py` checks that this list is what the router exports.
    """
    found = dict(_OF_PROMETHEUS)
    for name, kind, labels in _ROW.findall((ROOT / "docs/metrics.md").read_text()):
        own = set(re.findall(r"`(\w+)`", labels)) | _OF_EACH_TARGET
        if kind == "histogram":
            found[f"{name}_bucket"] = own | {"le"}
            found[f"{name}_sum"] = found[f"{name}_count"] = own
        else:
            found[name] = own
    return found


def names_and_labels(query: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each metric, and the labels that ``query`` selects or groups by.

    A name is what is no function, no word of the language and in no braces or brackets.
    """
    grouping = [
        label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(", ")
    ]
    plain = re.sub(r"\bby \([^)]*\)|\[[^]]*\]", "", query)
    for name, selector in re.findall(r"\b([a-z]\w+)\b(?!\s*\()(?:\{([^}]*)\})?", plain):
        if name in _WORDS:
            continue
        labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
        for label in {*labels, *grouping}:
            yield name, label
        yield name, "instance"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Return the queries of all panels and variables."""
    variables = [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    asked = [one["query"].removeprefix("label_values(").partition(",")[0] for one in variables]
    return asked + [target["expr"] for panel in panels() for target in panel["targets"]]


def test_panels_and_alerts_ask_for_metrics_that_are_exported() -> None:
    known = exported()
    assert len(known) > 60
    for query in (*queries(), *(rule["expr"] for rule in ALERTS)):
        found = list(names_and_labels(query))
        assert found, query
        for name, label in found:
            assert name in known, f"{name} is not exported: {query}"
            assert label in known[name], f"{name} has no label {label}: {query}"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('sum by (model) (rate(a_total{b=~"c"}[5m]))', {"model", "b", "instance"}),
        ("a_total unless max by (model) (a_total) == 1", {"model", "instance"}),
    ],
)
def test_names_and_labels_are_found(query: str, expected: set[str]) -> None:
    assert set(names_and_labels(query)) == {("a_total", label) for label in expected}


def test_the_dashboard_shows_what_it_promises() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        *("Latency", "Throughput", "Batch and queue", "KV cache", "Speculation"),
        *("Restarts and health", "Keys"),
    ]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(places) == len(set(places))
    used = "".join(queries())
    assert 'model=~"$model"' in used and 'key=~"$key"' in used


def test_what_compose_mounts_is_there() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        service = services[name]
        assert service["profiles"] == ["monitoring", "mac"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        files = [each.split(":")[0] for each in service["volumes"] if each.startswith("./")]
        assert files and all((ROOT / file).exists() for file in files)
    source = yaml.safe_load((MONITORING / "grafana/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    for name in ("router", "engine", "kvstore"):
        assert services[name]["profiles"] == ["cpu", "monitoring"]
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()
    other = services["router-for-native-engines"]
    assert other["profiles"] == ["mac"]
    assert other["networks"]["default"]["aliases"] == ["router"]  # as Prometheus knows it


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    cases = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    tried = [each for case in cases for each in case["alert_rule_test"]]
    firing = {each["alertname"] for each in tried if "exp_alerts" in each}
    assert firing == {rule["alert"] for rule in ALERTS}


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", MONITORING / "alerts_test.yml")
    assert "13 rules found" in promtool("check", "config", MONITORING / "prometheus.yml")


@needs_promtool
def test_the_queries_of_panels_are_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)
