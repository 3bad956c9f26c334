"""The settings of speculation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Settings that decide how much is drafted; ``--help`` describes them."""

    tokens: int = 5  # max drafts of one sequence
    largest_batch: int = 8  # number of decoding sequences above which nothing is drafted
    min_rate: float = 0.3  # acceptance rate below which a sequence stops
    adapts: bool = True  # whether rates and costs decide; otherwise the maximum is drafted
    by_sequence: bool = True  # whether each sequence has its own rates
    protects: bool = False  # whether drafts of others must not slow down any sequence
