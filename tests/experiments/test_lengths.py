"""Laws of lengths against their closed forms and SciPy's distributions."""

import numpy as np
import pytest
from scipy import stats

from paged_jax.config import parse
from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.workloads import SyntheticWorkload

COUNT = 40_000
LAWS = {
    "lognormal": {"mean": 100.0, "sigma": 0.5, "max": 100_000},
    "uniform": {"min": 3, "max": 12},
    "zipf": {"exponent": 1.2, "min": 5, "max": 404},
    "bimodal": {"modes": [{"mean": 40.0, "sigma": 0.2}, {"mean": 4000.0, "sigma": 0.4}], "share": 0.7, "max": 100_000},
    "constant": {"value": 17},
}
"""Valid keys of each law."""


def drawn(law: str, seed: int = 0, **changes: object) -> np.ndarray:
    lengths = parse(Lengths, {**LAWS[law], "law": law, **changes})
    return np.array(lengths.draw(COUNT, np.random.default_rng(seed)))


@pytest.mark.parametrize("law", LAWS)
def test_a_seed_always_gives_the_same_whole_numbers_within_the_limits(law):
    lengths = parse(Lengths, {**LAWS[law], "law": law})
    again = lengths.draw(500, np.random.default_rng(3))
    assert lengths.draw(500, np.random.default_rng(3)) == again
    assert all(type(n) is int for n in again)
    assert lengths.shortest <= min(again) <= max(again) <= lengths.longest
    if law != "constant":
        assert lengths.draw(500, np.random.default_rng(4)) != again


def test_lognormal_has_the_mean_and_spread_that_it_names():
    lengths = drawn("lognormal")
    assert np.mean(lengths) == pytest.approx(100, rel=0.01)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.02)
    assert set(Lengths(mean=7, sigma=0, max=9).draw(5, np.random.default_rng(0))) == {7}


def test_lognormal_is_clipped_at_both_ends():
    # 10 and 1000 are one sigma (ln 10) below and above the median of 100
    sigma = float(np.log(10))
    lengths = drawn("lognormal", mean=100 * np.exp(sigma**2 / 2), sigma=sigma, min=10, max=2000)
    below = stats.norm.cdf((np.log(10.5) - np.log(100)) / sigma)
    above = stats.norm.sf((np.log(1999.5) - np.log(100)) / sigma)
    assert np.mean(lengths == 10) == pytest.approx(below, abs=0.01)
    assert np.mean(lengths == 2000) == pytest.approx(above, abs=0.01)


def test_uniform_lengths_are_equally_likely_ends_included():
    values, counts = np.unique(drawn("uniform"), return_counts=True)
    assert values.tolist() == list(range(3, 13))
    assert stats.chisquare(counts).pvalue > 0.001
    lengths = drawn("uniform", min=100, max=300)
    assert np.mean(lengths) == pytest.approx(200, rel=0.01)
    assert np.var(lengths) == pytest.approx((201**2 - 1) / 12, rel=0.03)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.2, 3.0])
def test_zipf_ranks_are_as_likely_as_scipy_says(exponent):
    lengths = drawn("zipf", exponent=exponent)
    law = stats.zipfian(exponent, 400, loc=4)  # rank 1 is length 5
    assert np.mean(lengths) == pytest.approx(law.mean(), rel=0.03)
    for length in (5, 6, 7, 14):
        assert np.mean(lengths == length) == pytest.approx(law.pmf(length), abs=0.01)
    assert np.mean(lengths == 5) / np.mean(lengths == 6) == pytest.approx(2**exponent, rel=0.2)


def test_zipf_of_exponent_0_is_uniform():
    _, counts = np.unique(drawn("zipf", exponent=0, min=1, max=10), return_counts=True)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 0.001


def test_bimodal_is_a_mixture_of_two_lognormals():
    lengths = drawn("bimodal")
    low, high = lengths[lengths < 400], lengths[lengths >= 400]  # 11 and 5 sigmas from the medians: no overlap
    assert len(low) / COUNT == pytest.approx(0.7, abs=0.01)
    assert np.mean(lengths) == pytest.approx(0.7 * 40 + 0.3 * 4000, rel=0.02)
    for part, mean, sigma in ((low, 40, 0.2), (high, 4000, 0.4)):
        assert np.mean(part) == pytest.approx(mean, rel=0.02)
        assert np.std(np.log(part)) == pytest.approx(sigma, rel=0.03)
    assert set(drawn("bimodal", max=4000)) == set(np.minimum(lengths, 4000))


def test_constant_is_one_length():
    assert set(drawn("constant")) == {17}
    lengths = Lengths(law="constant", value=17)
    assert (lengths.shortest, lengths.longest) == (17, 17)


READ = {
    "lognormal": {"mean", "sigma", "min", "max"},
    "uniform": {"min", "max"},
    "zipf": {"exponent", "min", "max"},
    "bimodal": {"modes", "share", "min", "max"},
    "constant": {"value"},
}
ANY = {
    "mean": 9.0,
    "sigma": 0.5,
    "exponent": 1.0,
    "modes": LAWS["bimodal"]["modes"],
    "share": 0.5,
    "value": 7,
    "min": 1,
    "max": 9000,
}
"""A value of each key that any law could take."""


@pytest.mark.parametrize("law", READ)
@pytest.mark.parametrize("key", ANY)
def test_a_key_is_read_or_refused(law, key):
    valid = {name: ANY[name] for name in READ[law]} | {"law": law}
    if key not in READ[law]:
        with pytest.raises(ValueError, match=f"^{key} has no effect with law '{law}': leave it out$"):
            parse(Lengths, {**valid, key: ANY[key]})
    elif key != "min":
        del valid[key]
        with pytest.raises(ValueError, match=f"^law '{law}' needs {key}: give it "):
            parse(Lengths, valid)
    else:
        del valid[key]
        assert parse(Lengths, valid).shortest == 1


@pytest.mark.parametrize(
    ("law", "changes", "sentence"),
    [
        ("lognormal", {"mean": 5.0, "min": 6}, r"the mean \(5\) must lie between min \(6\) and max \(100000\)"),
        ("lognormal", {"max": 99}, r"the mean \(100\) must lie between min \(1\) and max \(99\)"),
        ("uniform", {"min": 13}, r"min \(13\) is more than max \(12\): lower the one or raise the other"),
        ("bimodal", {"max": 3999}, r"the mean \(4000\) must lie between min \(1\) and max \(3999\)"),
        ("zipf", {"max": 20_000_000}, r"zipf has 10000000 ranks at most: lower max \(20000000\)"),
        ("zipf", {"exponent": -1.0}, "exponent: input should be greater than or equal to 0"),
        ("bimodal", {"share": 1.0}, "share: input should be less than 1"),
        ("bimodal", {"modes": [{"mean": 4.0, "sigma": 1.0}]}, "modes"),
        ("bimodal", {"modes": [{"mean": 4.0}] * 2}, r"modes.0.sigma is missing"),
        ("constant", {"value": 0}, "value: input should be greater than or equal to 1"),
        ("gamma", {}, "law: input should be 'lognormal', 'uniform', 'zipf', 'bimodal' or 'constant', got 'gamma'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(law, changes, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse(Lengths, {**LAWS.get(law, {}), "law": law, **changes})


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "zipf", "bimodal"])
def test_lengths_without_a_law_have_that_of_the_kind(kind):
    output = {"value": 5, "law": "constant"}
    spec = parse(SyntheticWorkload, {"kind": kind, "num_requests": 3, "prompt": LAWS[kind], "output": output})
    assert (spec.prompt.law, spec.output.law) == (kind, "constant")
    given = Lengths(**LAWS[kind])
    assert SyntheticWorkload(kind=kind, num_requests=3, prompt=given, output=Lengths(**output)) == spec
    other = "zipf" if kind == "uniform" else "uniform"
    with pytest.raises(ValueError, match=rf"^prompt: .* (no effect with|needs .*) ?law '{kind}'|law '{kind}' needs"):
        parse(SyntheticWorkload, {"kind": kind, "num_requests": 3, "prompt": LAWS[other], "output": output})
