from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.tier import Tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    tier = Tier(tmp_path / "blocks")
    yield tier
    tier.close()
