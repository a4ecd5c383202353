from __future__ import annotations

import pytest

from kvroute.sim.timing import TimingModel


def test_an_iteration_never_beats_reading_the_weights() -> None:
    assert TimingModel().iteration_s(1, 0, 0) == pytest.approx(0.014)
    assert TimingModel().iteration_s(0, 0, 0) == pytest.approx(0.014)


def test_prefill_attention_and_decode_context_add_up() -> None:
    # 8,000 tokens of a new prompt while sequences with 100,000 tokens of context decode.
    expected = 0.005 + 8000 * 40e-6 + 0.75e-9 * 8000 * 4000 + 20e-9 * 100_000

    assert TimingModel().iteration_s(8000, 8000 * 4000, 100_000) == pytest.approx(expected)


def test_the_scale_multiplies_everything_and_0_takes_no_time() -> None:
    whole = TimingModel().iteration_s(500, 1e6, 10)

    assert TimingModel(scale=0.1).iteration_s(500, 1e6, 10) == pytest.approx(whole / 10)
    assert TimingModel(scale=0).iteration_s(500, 1e6, 10) == 0
