"""Libraries of which private parts are used: the hosted workflow tests both ends of the bounds."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["transformers", "uvicorn"])
def test_both_ends_of_the_bounds_are_tested(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = (
        found.specifier
        for each in project["dependencies"]
        if (found := Requirement(each)).name == name
    )
    (lower,) = (Version(each.version) for each in bounds if each.operator == ">=")
    (upper,) = (Version(each.version) for each in bounds if each.operator == "<")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    lowest, newest = (
        Version(each[name]) for each in jobs["bounds"]["strategy"]["matrix"]["include"]
    )
    assert lowest == lower
    assert (newest.major, newest.minor + 1) == (upper.major, upper.minor)
