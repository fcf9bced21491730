from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.estimation import GaussianProcess


class DenseGaussianProcess:
    """VIP Algorithm 1 as printed: the kernel of all prompts, partitioned into batch and rest."""

    def __init__(self, embeddings, bandwidth, prior_mean, clip):
        squared = ((embeddings[:, None] - embeddings[None]) ** 2).sum(axis=2)
        self.kernel = np.exp(-squared / (2 * bandwidth**2))
        self.mean, self.clip = np.full(len(embeddings), prior_mean), clip

    def observe(self, rows, rates):
        rest = np.setdiff1d(np.arange(len(self.mean)), rows)
        rates = np.clip(rates, self.clip, 1 - self.clip)
        latent = np.log(rates / (1 - rates))
        gain = self.kernel[np.ix_(rest, rows)] @ np.linalg.inv(self.kernel[np.ix_(rows, rows)])
        self.mean[rest] = self.mean[rest] + gain @ (latent - self.mean[rows])
        self.mean[rows] = latent

    def predict(self):
        return 1 / (1 + np.exp(-self.mean))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_equals_the_papers_formulation(dtype):
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(300, 16)).astype(dtype)
    process = GaussianProcess(embeddings, bandwidth=2.0, prior_mean=-1.0, clip=0.05)
    dense = DenseGaussianProcess(embeddings.astype(float), 2.0, -1.0, 0.05)
    for _ in range(12):
        rows = rng.choice(300, 25, replace=False)
        rates = rng.integers(0, 9, 25) / 8
        process.observe(rows, rates)
        dense.observe(rows, rates)
        assert process.predict(np.arange(300)) == pytest.approx(dense.predict(), abs=1e-6)


def test_prompts_beyond_the_first_block_follow_as_well():
    points = np.random.default_rng(0).normal(size=(5000, 3))
    some = np.r_[0:50, 2040:2060, 4090:4110, 4990:5000]
    many, few = GaussianProcess(points, bandwidth=1.0), GaussianProcess(points[some], bandwidth=1.0)
    for rows in (np.arange(5), np.arange(45, 60)):
        rates = np.linspace(0.1, 0.9, rows.size)
        many.observe(some[rows], rates)
        few.observe(rows, rates)
    assert many.predict(some) == pytest.approx(few.predict(np.arange(some.size)), abs=1e-9)
    assert np.median(np.abs(few.predict(np.arange(some.size)) - 0.5)) > 0.01


def test_bandwidth_is_the_median_distance():
    points = np.random.default_rng(1).normal(size=(50, 3)) + 100
    from scipy.spatial.distance import pdist

    assert GaussianProcess(points).bandwidth == pytest.approx(np.median(pdist(points)), rel=1e-9)


def test_the_bandwidth_of_many_prompts_is_that_of_a_sample():
    points = np.random.default_rng(2).normal(size=(3000, 4))
    process = GaussianProcess(points)
    whole = np.sqrt(np.median(((points[:1500, None] - points[None, 1500:]) ** 2).sum(axis=2)))
    assert process.bandwidth == pytest.approx(whole, rel=0.01) and process.bandwidth != whole
    assert GaussianProcess(points).bandwidth == process.bandwidth  # a resumed run has the same


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_bandwidth_follows_the_scale_of_the_embeddings(scale):
    points = np.random.default_rng(1).normal(size=(50, 3))
    assert GaussianProcess(scale * points).bandwidth == pytest.approx(scale * GaussianProcess(points).bandwidth)


@pytest.mark.parametrize("points", [[[3.0, 1.0]], [[3.0, 1.0]] * 4])
def test_without_two_different_prompts_the_bandwidth_is_1(points):
    assert GaussianProcess(points).bandwidth == 1.0


def test_a_common_offset_of_each_dimension_costs_no_digits():
    points = np.random.default_rng(1).normal(size=(50, 3))
    far = GaussianProcess(points + np.array([1e7, -1e7, 0.0]))
    assert far.bandwidth == pytest.approx(GaussianProcess(points).bandwidth, rel=1e-6)


def test_near_twins_are_solved_without_jitter():
    """At a distance of 1e-4 the smaller squared pivot is 1e-8; a jitter of 1e-8 would halve the slope between them."""
    points = np.array([[0.0], [1e-4], [1.0]])
    process = GaussianProcess(points, bandwidth=1.0)
    dense = DenseGaussianProcess(points, 1.0, 0.0, 0.02)
    for each in (process, dense):
        each.observe(np.array([0, 1]), np.array([0.5, 0.50001]))
    assert process.mean[2] == pytest.approx(dense.mean[2], rel=1e-4) and abs(process.mean[2]) > 0.1


def test_jitter_grows_only_until_the_matrix_can_be_factored():
    """From 1e-20, which float64 cannot add to 1, ten times as much in each try; much jitter would hide the evidence."""
    process = GaussianProcess(np.zeros((3, 2)), bandwidth=1.0, jitter=1e-20)
    process.observe([0, 1], [0.8, 0.9])
    assert process.mean[2] == pytest.approx(np.log([4.0, 9.0]).mean(), abs=0.1)


def test_a_batch_is_predicted_at_what_was_observed_and_neighbours_follow():
    points = np.array([[0.0], [0.1], [5.0]])
    process = GaussianProcess(points, bandwidth=1.0)
    assert process.predict([0, 1, 2]).tolist() == [0.5, 0.5, 0.5]
    process.observe([0], [1.0])
    near, far = process.predict([1, 2])
    assert process.predict([0])[0] == pytest.approx(0.98) and near > 0.95 and abs(far - 0.5) < 1e-4


@given(st.integers(0, 2**32 - 1), st.sampled_from(["copies", "nearly", "random", "constant", "far"]))
@settings(max_examples=60)
def test_never_a_nan(seed, kind):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(40, 5))
    if kind == "copies":
        points = np.repeat(points[:8], 5, axis=0)
    elif kind == "nearly":
        points = np.repeat(points[:8], 5, axis=0) + 1e-9 * points
    elif kind == "constant":
        points[:] = 1.0
    elif kind == "far":
        points *= 1e8
    process = GaussianProcess(points)
    for _ in range(5):
        rows = rng.choice(40, int(rng.integers(1, 41)))  # with repetition
        process.observe(rows, rng.integers(0, 2, rows.size))
        predictions = process.predict(np.arange(40))
        assert np.isfinite(process.mean).all() and predictions.min() >= 0 and predictions.max() <= 1


def test_prompts_with_one_embedding_share_their_evidence():
    points = np.vstack([np.zeros((3, 2)), [[3.0, 0.0]]])
    process = GaussianProcess(points, bandwidth=1.0)
    process.observe([0, 1], [0.2, 0.8])  # the same place, twice: on average a half
    assert process.predict([2])[0] == pytest.approx(0.5, abs=1e-3)


def test_one_prompt_twice_in_a_batch_counts_at_its_mean():
    points = np.random.default_rng(0).normal(size=(6, 2))
    twice, once = GaussianProcess(points), GaussianProcess(points)
    twice.observe([1, 3, 1], [0.2, 0.9, 0.6])
    once.observe([1, 3], [0.4, 0.9])
    assert twice.predict(np.arange(6)) == pytest.approx(once.predict(np.arange(6)), abs=1e-12)


def test_a_state_that_is_loaded_while_the_mean_still_moves_is_the_state():
    points = np.random.default_rng(0).normal(size=(20_000, 8))
    process = GaussianProcess(points, bandwidth=2.0)
    process.observe(np.arange(100), np.linspace(0, 1, 100))
    state = process.state_dict()
    process.observe(np.arange(100, 400), np.ones(300))
    process.load_state_dict(state)
    process.observe([7], [0.5])
    again = GaussianProcess(points, bandwidth=2.0)
    again.load_state_dict(state)
    again.observe([7], [0.5])
    assert np.array_equal(process.mean, again.mean)


def test_noise_keeps_near_twins_from_tilting_everything_else():
    points = np.array([[0.0], [0.01], [1.0]])
    predictions = {}
    for noise in (0.0, 0.5):
        process = GaussianProcess(points, bandwidth=1.0, noise=noise)
        process.observe([0, 1], [0.4, 0.6])  # possible with eight rollouts each
        predictions[noise] = process.predict([2])[0]
    assert predictions[0.0] > 0.99 and abs(predictions[0.5] - 0.5) < 0.05


def test_a_prompt_is_predicted_at_its_observed_rate_with_noise_too():
    process = GaussianProcess(np.array([[0.0], [1.0]]), noise=0.5)
    process.observe([0], [0.75])
    assert process.predict([0])[0] == pytest.approx(0.75)


def test_a_prompt_twice_in_a_batch_is_observed_with_half_the_noise():
    points, latent = np.array([[0.0], [1.0]]), np.log(9.0)
    once, twice = (GaussianProcess(points, bandwidth=1.0, noise=0.5) for _ in range(2))
    once.observe([0], [0.9])
    twice.observe([0, 0], [0.9, 0.9])
    kernel = np.exp(-0.5)
    assert once.mean[1] == pytest.approx(kernel * latent / 1.5)
    assert twice.mean[1] == pytest.approx(kernel * latent / 1.25)


def test_softplus_link_predicts_variances():
    points = np.random.default_rng(0).normal(size=(5, 2))
    process = GaussianProcess(points, link="softplus")
    process.observe([0, 1], [0.7, 900.0])
    assert process.predict([0, 1]) == pytest.approx([0.7, 900.0])
    process.observe([0], [0.0])
    assert 0 < process.predict([0])[0] <= 0.02 + 1e-12


def test_state_survives_json_and_other_embeddings_are_refused():
    points = np.random.default_rng(0).normal(size=(20, 4))
    one, other = GaussianProcess(points), GaussianProcess(points)
    one.observe([1, 7], [0.1, 0.9])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.predict(np.arange(20)).tolist() == one.predict(np.arange(20)).tolist()
    rounded = {**one.state_dict(), "bandwidth": one.bandwidth * (1 + 3e-7)}  # another machine's last digits
    other.load_state_dict(rounded)
    with pytest.raises(ValueError, match="bandwidth"):
        other.load_state_dict({**rounded, "bandwidth": one.bandwidth * (1 + 3e-6)})
    with pytest.raises(ValueError, match="prompts"):
        GaussianProcess(points[:5]).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="bandwidth"):
        GaussianProcess(points, bandwidth=9.0).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="link"):
        GaussianProcess(points, link="softplus").load_state_dict(one.state_dict())


def test_clip_is_the_least_reward_variance_on_any_scale():
    process = GaussianProcess(np.eye(3), bandwidth=1e-3, link="softplus", clip=50.0)  # for instance of grades up to 100
    process.observe([0, 1], [1.0, 400.0])
    assert process.predict([0, 1]).tolist() == pytest.approx([50, 400])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": np.nan}, "bandwidth"),
        ({"clip": 0.5}, "clip"),
        ({"clip": 0.0}, "clip"),
        ({"prior_mean": np.inf}, "prior_mean"),
        ({"noise": -0.1}, "noise"),
        ({"link": "probit"}, "link"),
        ({"jitter": 0.0}, "jitter"),
    ],
)
def test_impossible_configurations_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        GaussianProcess(np.eye(3), **options)


@pytest.mark.parametrize(
    ("rows", "rates", "named"),
    [([0, 3], [0.5, 0.5], "rows"), ([-1], [0.5], "rows"), ([0], [1.5], "success_rates"), ([0], [0.5, 0.5], "succ")],
)
def test_impossible_observations_are_refused(rows, rates, named):
    with pytest.raises(ValueError, match=named):
        GaussianProcess(np.eye(3)).observe(rows, rates)
