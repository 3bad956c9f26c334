"""Fixtures that tests of the zoo share with those of the engine."""

from tests.engine.conftest import wrap

__all__ = ["wrap"]
