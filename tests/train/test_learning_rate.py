import math

import pytest

from train.config.sections import OptimizerSection
from train.learning_rate import learning_rate


def rates(count: int, num_rollout: int = 10, **settings) -> list[float]:
    config = OptimizerSection(lr=2.0, **settings)
    return [learning_rate(i, config, num_rollout) for i in range(count)]


def test_constant_after_an_even_warm_up_that_wastes_no_rollout():
    assert rates(6, lr_warmup_iters=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_decay_ends_after_the_last_rollout_and_stays_there():
    expected = [2.0 - 1.5 * i / 10 for i in range(10)] + [0.5, 0.5]
    assert rates(12, lr_decay_style="linear", min_lr=0.5) == pytest.approx(expected)


def test_cosine_decay_follows_half_a_wave_after_the_warm_up():
    expected = [1.0, 2.0] + [1 + math.cos(math.pi * i / 8) for i in range(8)] + [0.0]
    assert rates(11, lr_decay_style="cosine", lr_warmup_iters=2) == pytest.approx(expected)


def test_the_decay_has_a_length_of_its_own():
    assert rates(6, lr_decay_style="linear", lr_decay_iters=4) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0])


def test_a_warm_up_as_long_as_the_decay_ends_at_the_peak_then_the_minimum():
    assert rates(4, lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=2) == [1.0, 2.0, 2.0, 0.0]
