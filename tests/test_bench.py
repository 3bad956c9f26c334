"""The two sides of the comparisons without servers, on a tiny model."""

from pathlib import Path

import pytest

from bench.side import SIDES, side
from tests.tiny_models import make_tiny


@pytest.mark.parametrize("name", SIDES)
def test_a_side_answers_each_call_with_seconds(name: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    with side(name, str(tmp_path)) as one:
        assert one.call("prefill", 32, 16) > 0
        assert one.call("decode", [20, 20], 2) > 0
        assert one.call("generate", [40, 7], 2) > 0
