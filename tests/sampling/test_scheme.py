"""A new way of drawing batches is one class, which everything else then knows."""

import dataclasses
import json
import math
from typing import ClassVar

import dp_accounting
import keras
import numpy as np
import pytest

import tfdp
from tfdp.accounting import Ledger, Segment, privacy_statement
from tfdp.accounting.segments import segment_from_dict, segment_to_dict
from tfdp.sampling import (
    BallsInBins,
    Poisson,
    Scheme,
    Shuffled,
    Unknown,
    poisson_indices,
    samplings,
)

ROWS, BATCH = 60, 6


@dataclasses.dataclass(frozen=True)
class InTurn(Scheme):
    """Poisson draws from one fixed part of the examples after the other.

    Every epoch begins with the first part, so epochs are what counts, each as whole.
    """

    kind: ClassVar[str] = "in_turn_passes"
    sampling: ClassVar[str] = "in_turn"
    counts: ClassVar[str] = "passes"

    number_of_examples: int
    expected_batch_size: int
    parts: int = 3

    @property
    def sampling_probability(self):
        return min(1.0, self.parts * self.expected_batch_size / self.number_of_examples)

    def draw(self, key, epoch, index, repetition=0):
        part = np.arange(self.number_of_examples)[index % self.parts :: self.parts]
        chosen = poisson_indices(
            key,
            (epoch, index, repetition),
            number_of_examples=len(part),
            sampling_probability=self.sampling_probability,
        )
        return part[chosen]

    def event(self, count, noise_multiplier):
        steps = math.ceil(self.number_of_examples / self.expected_batch_size)
        return super().event(count * math.ceil(steps / self.parts), noise_multiplier)

    def words(self, count, noise):
        return f"{count} passes, {noise}, Poisson draws from {self.parts} parts in turn"


def private(sampling="in_turn", noise_multiplier=2.0):
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model = tfdp.DPModel(inner, sampling=sampling)
    model.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=noise_multiplier),
        "mse",
    )
    return model


def fit(model, **options):
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    return model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, **options)


@pytest.mark.slow
def test_a_new_scheme_trains_is_counted_saved_told_and_bounded(tmp_path):
    model = private()
    fit(model, epochs=2)
    expected = Segment(InTurn(ROWS, BATCH), 2, 2.0)
    assert model.ledger.segments == (expected,)
    # A row can take part in four of the ten steps of an epoch.
    eight = dp_accounting.pld.PLDAccountant().compose(
        dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(2.0)), 8
    )
    assert model.epsilon(1e-3) == pytest.approx(eight.get_epsilon(1e-3), rel=1e-3)
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").ledger == model.ledger
    statement = model.privacy_statement(1e-3)
    assert "2 passes, noise multiplier 2, Poisson draws from 3 parts" in statement
    budget = tfdp.callbacks.PrivacyBudget(1e-3, target_epsilon=model.epsilon(1e-3) + 1)
    fit(model, epochs=1000, callbacks=[budget])
    [segment] = model.ledger.segments
    longer = segment.with_count(segment.count + 1)
    assert Ledger((longer,)).epsilon(1e-3) > budget.target_epsilon
    assert model.epsilon(1e-3) <= budget.target_epsilon


@pytest.mark.parametrize("steps", [None, 1, 4, 7])
def test_no_row_can_be_in_more_steps_than_are_counted(steps):
    model = private()
    for epochs in (1, 2):
        fit(model, epochs=epochs, steps_per_epoch=steps)
    scheme = InTurn(ROWS, BATCH)
    # Epochs begin anew with the part of the first rows.
    in_epoch = [index % scheme.parts for index in range(steps or 10)]
    most = 3 * max(in_epoch.count(part) for part in range(scheme.parts))
    [segment] = model.ledger.segments
    assert segment.scheme.event(segment.count, 2.0).count >= most


def test_its_draws_are_those_of_its_scheme():
    scheme = InTurn(ROWS, BATCH)
    batches = [scheme.draw(5, 1, index) for index in range(300)]
    for index, batch in enumerate(batches):
        assert set(batch % 3) <= {index % 3}
    assert np.mean([len(batch) for batch in batches]) == pytest.approx(BATCH, rel=0.1)


@pytest.mark.slow
def test_a_composed_event_costs_what_its_parts_cost():
    class InTwoHalves(InTurn):
        kind = "two_halves"
        sampling = None

        def event(self, count, noise_multiplier):
            half = super().event(count // 2, noise_multiplier)
            return dp_accounting.ComposedDpEvent([half, half])

    halves = Ledger((Segment(InTwoHalves(ROWS, BATCH), 12, 2.0),))
    whole = Ledger((Segment(InTurn(ROWS, BATCH), 12, 2.0),))
    for accountant in ("PLD", "RDP"):
        assert halves.epsilon(1e-5, accountant) == pytest.approx(
            whole.epsilon(1e-5, accountant), rel=1e-3
        )


# ----------------------------------------------------------- those that tfdp has


@pytest.mark.parametrize("name", samplings())
def test_named_schemes_are_made_of_two_numbers(name):
    scheme = samplings()[name](100, 10)
    assert (scheme.number_of_examples, scheme.expected_batch_size) == (100, 10)


def test_tables_compare_with_what_draws_as_many_examples():
    assert Poisson(100, 8).redrawn(13) == {
        "Poisson-sampled": (Poisson(100, 8), 13),
        "shuffled": (Shuffled(100, 8), 2),
    }
    assert Shuffled(100, 8).redrawn(2) == {
        "Poisson-sampled": (Poisson(100, 8), 25),
        "shuffled": (Shuffled(100, 8), 2),
    }
    assert list(Shuffled(100, 8, 4).redrawn(2)) == ["shuffled"]
    assert BallsInBins(100, 8).redrawn(2) == Shuffled(100, 8).redrawn(2)
    assert Unknown().redrawn(2) == {}


def test_ledgers_of_earlier_versions_load():
    text = json.dumps({
        "segments": [
            {
                "kind": "poisson_steps",
                "steps": 3,
                "noise_multiplier": 1.5,
                "number_of_examples": 100,
                "expected_batch_size": 8,
            },
            {
                "kind": "shuffled_passes",
                "passes": 2,
                "noise_multiplier": 1.5,
                "number_of_examples": 100,
                "expected_batch_size": 8,
                "examples_per_unit": 4,
            },
            {
                "kind": "unamplified_steps",
                "steps": 5,
                "noise_multiplier": 1.5,
                "examples_per_unit": 2,
            },
        ],
        "cut_short": [],
        "noise_seed_fixed": False,
        "sampling_seed_fixed": True,
    })
    ledger = Ledger.from_json(text)
    assert ledger.segments == (
        Segment(Poisson(100, 8), 3, 1.5),
        Segment(Shuffled(100, 8, 4), 2, 1.5),
        Segment(Unknown(2), 5, 1.5),
    )
    newer = {"ended_by_release": False, "saw_other_rows": False}
    assert json.loads(ledger.to_json()) == json.loads(text) | newer


def test_orders_of_passes_are_cut_into_batches():
    scheme = Shuffled(10, 4)
    batches = [scheme.draw(3, 1, index) for index in range(3)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(10))


def test_what_nobody_can_draw_raises():
    with pytest.raises(NotImplementedError):
        Unknown().draw(0, 0, 0)
    assert segment_from_dict(segment_to_dict(Segment(Unknown(), 1, 1.0))).count == 1
    assert "unknown batches" in privacy_statement(
        Ledger((Segment(Unknown(), 1, 9.0),)), 1e-5
    )


def test_a_kind_belongs_to_one_scheme():
    before = samplings()
    with pytest.raises(
        ValueError, match=r"`kind` of a scheme must be its own.*`Poisson`"
    ):

        class Impostor(Poisson):
            kind = "poisson_steps"

    assert samplings() == before

    class OnTheWay(Scheme):
        """A step between, which no file names."""

    assert samplings() == before


def test_a_scheme_that_files_would_take_for_another_is_in_no_segment():
    class Half(Poisson):
        @property
        def sampling_probability(self):
            return super().sampling_probability * 2

    with pytest.raises(ValueError, match=r"needs a `kind` of its own"):
        Segment(Half(100, 10), 1, 1.0)
