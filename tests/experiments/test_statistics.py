import math

import pytest

from paged_jax.experiments.statistics import estimate, noise, paired_difference, t_quantile, variation

# two-sided 95 % points of Student's t, as every table prints them
T_TABLE = [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (120, 1.9799)]


@pytest.mark.parametrize(("df", "t"), T_TABLE)
def test_t_quantile(df, t):
    assert t_quantile(df) == pytest.approx(t, abs=5e-5)


def test_t_quantile_at_another_confidence_and_without_degrees_of_freedom():
    assert t_quantile(5, 0.99) == pytest.approx(4.0321, abs=5e-5)
    with pytest.raises(ValueError, match="df must be at least 1"):
        t_quantile(0)


def test_estimate_by_hand():
    # mean 4, sd 2, n 3: half width 4.3027 * 2 / sqrt(3)
    e = estimate([2.0, 4.0, 6.0])
    assert e.mean == 4
    assert e.half_width == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    assert (e.low, e.high) == (e.mean - e.half_width, e.mean + e.half_width)
    assert math.isnan(estimate([3.0]).half_width)


def test_pairing_cancels_what_workloads_have_in_common():
    baseline, values = [10.0, 20.0, 30.0], [11.0, 22.0, 33.0]
    d = paired_difference(values, baseline)
    assert d.mean == 2
    assert d.half_width == pytest.approx(4.3027 * 1 / math.sqrt(3), rel=1e-4)
    assert estimate(values).half_width > 10 * d.half_width


def test_noise_and_variation_are_told_apart():
    by_seed = [[9.0, 11.0], [19.0, 21.0], [28.0, 32.0]]
    # variances within seeds 2, 2 and 8; means 10, 20 and 30
    assert noise(by_seed) == pytest.approx(2.0)
    # variance of the means 100, of which the noise of two repeats is 2^2 / 2
    assert variation(by_seed) == pytest.approx(math.sqrt(98))
    assert variation([[10.0], [20.0], [30.0]]) == pytest.approx(10.0)  # one repeat: the noise is not known
    # means 10 and 11 with variance 0.5, all of which noise explains: 8 / 2
    assert variation([[8.0, 12.0], [9.0, 13.0]]) == 0
    assert math.isnan(noise([[1.0], [2.0]]))
    assert math.isnan(variation([[1.0, 2.0]]))
