"""End-to-end tests with engines of several ranks: ``make test-ranks``."""

from __future__ import annotations

import os

import pytest

from tests.e2e.server import RANKS_VARIABLE

NOT_ON_RANKS = {
    "test_adapter.py": "adapters cannot be divided",
    "test_adapters.py": "adapters cannot be divided",
    "test_ray.py": "it has a test with ranks",
    "[drafting]": "ranks take no draft model",
    "[guessing]": "ranks have no head for later tokens",
    "[mamba]": "mlx-lm does not divide it",
    "test_a_spare_process_takes_the_place_of_a_killed_engine": "ranks have no spare process",
}
"""Parts of tests' names, and why engines of these have one rank."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if RANKS_VARIABLE not in os.environ:
        return
    for item in items:
        for part, reason in NOT_ON_RANKS.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
