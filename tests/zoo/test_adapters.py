"""Architectures with adapters: a sample of what `python -m zoo.adapters` tries."""

from __future__ import annotations

import pytest

from zoo.adapters import AdapterReport, examine, table


@pytest.mark.parametrize(
    ("name", "experts", "batching"),
    [
        *(("afm7", False, "ragged"), ("dbrx", True, "ragged")),
        *(("deepseek_v3", True, "dense"), ("falcon_h1", False, "ragged")),
    ],
)
def test_rows_with_different_adapters_and_without_are_right(
    name: str, experts: bool, batching: str
) -> None:
    """A model's own kind of linear layer, experts of which each has layers, latents, and state."""
    report = examine(name)
    assert report is not None and report.right, report
    assert report.layers and (report.experts, report.batching) == (experts, batching)


def test_what_is_wrong_is_listed_by_name() -> None:
    reports = [
        AdapterReport(name="plain", layers=1),
        AdapterReport(name="mixed", layers=1, experts=True),
        AdapterReport(name="broken", layers=1, error="moving: logits differ"),
    ]
    found = table(reports)
    assert found.startswith("2 architectures take adapters")
    assert "mixed" in found and "* broken: moving: logits differ" in found and "plain" not in found
