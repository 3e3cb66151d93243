"""Every example in one batch of an epoch, by a coin of its own."""

import math

import numpy as np
import pytest
from scipy import stats

from tfdp.accounting import Ledger, compose, privacy_statement
from tfdp.accounting.accountant import epsilon
from tfdp.accounting.segments import Segment, segment_from_dict, segment_to_dict
from tfdp.accounting.users import user_epsilon
from tfdp.sampling import BallsInBins, FixedBins, Shuffled, samplings
from tfdp.sampling.balls_in_bins import RandomAllocationDpEvent, bins_of_epoch

N, B, BINS = 1000, 50, 20
SCHEME = BallsInBins(N, B)
FIXED = FixedBins(N, B, BINS, bins=7)


def batches(epoch, key=5, scheme=SCHEME, repetition=0):
    return [scheme.draw(key, epoch, i, repetition) for i in range(BINS)]


def bin_of_rows(epoch, **options):
    drawn = batches(epoch, **options)
    found = np.empty(N, int)
    for index, rows in enumerate(drawn):
        found[rows] = index
    return found


def test_every_row_is_in_one_batch_of_an_epoch():
    for epoch in range(3):
        rows = batches(epoch)
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(N))
        assert all(np.all(np.diff(each) > 0) for each in rows)


@pytest.mark.statistical
def test_sizes_are_binomial():
    sizes = [len(rows) for epoch in range(500) for rows in batches(epoch)]
    binomial = stats.binom(N, 1 / BINS)
    edges = binomial.ppf(np.linspace(0, 1, 11)[1:-1])
    found = np.bincount(np.searchsorted(edges, sizes), minlength=10)
    expected = np.diff(np.concatenate([[0], binomial.cdf(edges), [1]]))
    # Sizes of an epoch add up to N: a little less than independent.
    assert stats.chisquare(found, expected * len(sizes)).pvalue > 1e-4


@pytest.mark.statistical
def test_rows_and_epochs_are_independent():
    bins = np.array([bin_of_rows(epoch) for epoch in range(300)])
    pairs = [
        (bins[:, :500].ravel(), bins[:, 500:].ravel()),  # two rows
        (bins[:-1].ravel(), bins[1:].ravel()),  # two epochs
        (bins.ravel(), np.roll(bins, 1, axis=1).ravel()),  # neighbours
    ]
    for one, other in pairs:
        table = np.zeros((BINS, BINS))
        np.add.at(table, (one, other), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-4
    assert stats.chisquare(np.bincount(bins.ravel())).pvalue > 1e-4


def test_keys_epochs_and_repetitions_have_coins_of_their_own():
    names = [
        {"epoch": 1},
        {"epoch": 2},
        {"epoch": 1, "key": 6},
        {"epoch": 1, "repetition": 1},
    ]
    found = [bin_of_rows(**name) for name in names]
    for place, one in enumerate(found):
        for other in found[:place]:
            assert np.mean(one == other) < 0.1
    np.testing.assert_array_equal(found[0], bin_of_rows(1))


def test_empty_batches_are_possible():
    sizes = [len(BallsInBins(4, 1).draw(1, 0, i)) for i in range(4)]
    assert sum(sizes) == 4
    assert 0 in [len(BallsInBins(4, 1).draw(1, e, 0)) for e in range(30)]


@pytest.mark.parametrize(
    ("n", "size", "expected"), [(60_000, 256, 235), (10, 10, 1), (7, 3, 3)]
)
def test_it_has_as_many_batches_as_fit_takes_steps(n, size, expected):
    scheme = samplings()["balls_in_bins"](n, size)
    assert scheme == BallsInBins(n, size, expected)
    assert scheme.steps_per_epoch == expected


def test_another_number_of_batches_must_have_the_size():
    assert BallsInBins(60_000, 256).in_epochs_of(234).batches_per_epoch == 234
    with pytest.raises(ValueError, match=r"every row once.*Use `batch_size=6000`"):
        BallsInBins(60_000, 256).in_epochs_of(10)


def test_events():
    [passes] = {SCHEME.event(3, 2.0)}
    assert passes.event == RandomAllocationDpEvent(BINS, 2.0)
    assert passes.count == 3
    assert SCHEME.rdp_event(3, 2.0).event.noise_multiplier == 2.0
    assert FIXED.event(4, 2.0) == RandomAllocationDpEvent(BINS, 1.0)


@pytest.mark.parametrize(
    "scheme",
    [
        SCHEME,
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in (FIXED, BallsInBins(N, B, 19))
        ),
    ],
)
def test_segments_are_saved_and_told(scheme):
    segment = Segment(scheme, 3, 2.0)
    assert segment_from_dict(segment_to_dict(segment)) == segment
    ledger = Ledger((segment,))
    assert Ledger.from_json(ledger.to_json()) == ledger
    statement = " ".join(privacy_statement(ledger, 1e-4).split())
    assert "3 passes, noise multiplier 2" in statement
    assert ("drawn once (number 7)" in statement) == (scheme is FIXED)
    figure = f"{ledger.epsilon(1e-4):.3f}"
    assert f"({figure}, 0.0001)-differentially private" in statement


# ------------------------------------------------------------- bins that stay


def test_fixed_bins_count_as_one_allocation_with_less_noise():
    whole = epsilon([Segment(FIXED, 9, 3.0)], 1e-5)
    alone = epsilon([Segment(BallsInBins(N, B), 1, 1.0)], 1e-5)
    assert whole == pytest.approx(alone, rel=1e-9)
    assert whole > 1.2 * epsilon([Segment(BallsInBins(N, B), 9, 3.0)], 1e-5)


def test_bins_that_are_read_very_often_hide_nothing():
    """As shuffled passes, which always count in full."""
    assert FIXED.event(225, 3.0) == RandomAllocationDpEvent(BINS, 0.2)
    assert FIXED.event(226, 3.0) == Shuffled(N, B).event(226, 3.0)


def test_trainings_on_the_same_bins_are_one():
    parts = [Segment(FIXED, 4, 3.0), Segment(FIXED, 5, 3.0)]
    together = epsilon([Segment(FIXED, 9, 3.0)], 1e-5)
    ledger = Ledger((parts[0],)).add(parts[1])
    for found in (
        epsilon(parts, 1e-5),
        ledger.epsilon(1e-5),
        compose(*(Ledger((part,)) for part in parts)).epsilon(1e-5),
        Ledger.from_json(ledger.to_json()).epsilon(1e-5),
    ):
        assert found == pytest.approx(together, rel=1e-9)


def test_noises_on_the_same_bins_are_one():
    """Releases of one batch: their inverse variances add up."""
    parts = [Segment(FIXED, 4, 2.0), Segment(FIXED, 1, 1.0)]
    [one] = {epsilon(parts, 1e-5), epsilon(parts[::-1], 1e-5)}
    joined = Segment(FIXED, 1, 1 / math.sqrt(2))
    assert one == pytest.approx(epsilon([joined], 1e-5), rel=1e-9)
    assert epsilon(parts, 1e-5, "RDP") == pytest.approx(
        epsilon([Segment(FIXED, 2, 1.0)], 1e-5, "RDP"), rel=1e-9
    )
    assert epsilon([*parts, Segment(FIXED, 1, 0.0)], 1e-5) == math.inf


@pytest.mark.slow
def test_other_bins_add_up():
    other = FixedBins(N, B, BINS, bins=8)
    two = epsilon([Segment(FIXED, 4, 3.0), Segment(other, 5, 3.0)], 1e-5)
    assert two < epsilon([Segment(FIXED, 9, 3.0)], 1e-5)
    apart = [epsilon([Segment(each, 4, 3.0)], 1e-5) for each in (FIXED, other)]
    assert two > max(apart)


@pytest.mark.slow
def test_trainings_on_the_same_bins_are_one_for_users_too():
    parts = (Segment(FIXED, 4, 4.0), Segment(FIXED, 5, 3.0))
    text = privacy_statement(Ledger(parts), 1e-5, max_examples_per_user=1)
    figure = f"({epsilon(parts, 1e-5):.3f}, 1e-05)"
    assert f"all of them together, it is {figure}" in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [SCHEME, FIXED])
def test_users_with_several_rows_cost_at_most_as_if_all_were_in_one_batch(scheme):
    segment, options = Segment(scheme, 2, 9.0), {"max_examples_per_user": 3}
    whole = [Segment(BallsInBins(N, N), 2, 3.0)]
    found = user_epsilon(segment, 1e-5, accountant="RDP", **options)
    assert found == pytest.approx(epsilon(whole, 1e-5, "RDP"), rel=1e-3)
    found = user_epsilon(segment, 1e-5, accountant="PLD", **options)
    assert 3 * epsilon([segment], 1e-5) < found < epsilon(whole, 1e-5)
    text = privacy_statement(
        Ledger((segment, Segment(scheme, 3, 8.0))), 1e-5, max_examples_per_user=3
    )
    assert "at most 3 rows" in text


# --------------------------------------------------------------------- an audit


def proven_epsilon(are_fresh, epochs, noise_multiplier, batches, trials=2000):
    """What the best attack on what epochs release of one example proves, at 95 %."""
    rng = np.random.default_rng(3)
    normal = rng.normal(size=(2, trials, epochs, batches)) * noise_multiplier
    for trial in range(trials):
        for epoch in range(epochs):
            name = (epoch if are_fresh else 0, 0)
            rows, ends = bins_of_epoch(trial, name, 2 * batches, batches)
            place = int(np.flatnonzero(rows == 0)[0])
            normal[0, trial, epoch, np.searchsorted(ends, place, "right") - 1] += 1
    if are_fresh:
        logs = (normal - 0.5) / noise_multiplier**2
        scores = np.logaddexp.reduce(logs, axis=3).sum(axis=2)
    else:
        logs = (normal - 0.5).sum(axis=2) / noise_multiplier**2
        scores = np.logaddexp.reduce(logs, axis=2)
    half = trials // 2

    def bound(threshold, with_it, without):
        hits, alarms = (with_it > threshold).sum(), (without > threshold).sum()
        least = stats.beta.ppf(0.025, hits, half - hits + 1)
        most = stats.beta.ppf(0.975, alarms + 1, half - alarms)
        return np.log(max(np.nan_to_num(least) - 1e-5, 1e-12) / most)

    # One half chooses the threshold.
    first, second = scores[:, :half], scores[:, half:]
    thresholds = np.quantile(first[0], np.linspace(0.05, 0.95, 19))
    best = max(thresholds, key=lambda each: bound(each, *first))
    return bound(best, *second)


@pytest.mark.slow
@pytest.mark.statistical
def test_an_attack_proves_less_than_is_claimed_unless_bins_are_reused():
    """Bins that stay are counted as fresh in the second case."""
    setting = {"epochs": 30, "noise_multiplier": 2.0, "batches": 50}
    claimed = epsilon([Segment(BallsInBins(100, 2), 30, 2.0)], 1e-5)
    assert 0.1 < proven_epsilon(are_fresh=True, **setting) < claimed
    fixed = epsilon([Segment(FixedBins(100, 2, 50, bins=1), 30, 2.0)], 1e-5)
    assert claimed < proven_epsilon(are_fresh=False, **setting) < fixed
