"""The published formulas, with the figures of their documentation."""

import math

import pytest

from router.decisions.readout import (
    calibrated,
    choice_confidence,
    expected_level,
    mean,
    score_confidence,
)
from router.errors import InternalError


def test_confidence_of_a_choice_is_how_far_it_is_above_chance() -> None:
    assert choice_confidence([0.98, 0.02]) == pytest.approx(0.96)
    assert choice_confidence([0.25] * 4) == 0
    assert choice_confidence([1.0]) == choice_confidence([0.0, 1.0]) == 1
    assert choice_confidence([1 / 3] * 3) >= 0


def test_score_and_confidence_are_those_of_the_example_of_llama_cpp() -> None:
    levels = [0.0023, 0.116, 0.6753, 0.2064]
    assert expected_level(levels) == pytest.approx(2.0858, abs=1e-4)
    assert score_confidence(levels) == pytest.approx(0.673, abs=1e-3)


def test_confidence_of_a_score_is_relative_to_evenly_likely_levels() -> None:
    assert score_confidence([0.1, 0.6, 0.3]) == pytest.approx(0.4)
    assert expected_level([0.1, 0.6, 0.3]) == pytest.approx(1.2)
    assert score_confidence([1.0]) == score_confidence([0, 0, 1.0]) == 1
    assert score_confidence([0.5, 0, 0, 0.5]) == 0


def test_probabilities_add_up_to_one_and_their_mass_does_not_depend_on_the_temperature() -> None:
    logprobs = [math.log(0.6), math.log(0.2)]
    for temperature, first in ((1.0, 0.75), (0.5, 0.9), (1e-9, 1.0), (100.0, 0.5027)):
        found, mass = calibrated(logprobs, temperature)
        assert sum(found) == pytest.approx(1) and mass == pytest.approx(0.8)
        assert found[0] == pytest.approx(first, abs=1e-4)
    assert calibrated([-math.inf, -1.0], 1.0)[0] == [0.0, 1.0]


@pytest.mark.parametrize("logprobs", [[-math.inf] * 2, [math.nan, -1.0], [-1.0, math.nan]])
def test_a_model_without_numbers_is_an_error(logprobs: list[float]) -> None:
    with pytest.raises(InternalError):
        calibrated(logprobs, 1.0)


def test_rotations_are_averaged() -> None:
    assert mean([[0.8, 0.2], [0.4, 0.6]]) == pytest.approx([0.6, 0.4])
