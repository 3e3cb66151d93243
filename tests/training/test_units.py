"""How batches are cut: units that are clipped together, rows that run together."""

import pytest
import tensorflow as tf

from tests.small import data, optimizer, private
from tfdp.sampling import (
    BallsInBins,
    FixedBins,
    Poisson,
    PoissonUsers,
    Shuffled,
    Unknown,
)
from tfdp.training.batch_clipper import BatchClipper
from tfdp.training.units import filled_up, with_sizes


@pytest.mark.smoke
def test_poisson_with_microbatches_of_several_examples_is_refused():
    model = private(opt=optimizer(num_microbatches=2))
    with pytest.raises(ValueError, match="fixed size"):
        model.fit(*data(), batch_size=4)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (Poisson(100, 10), "'poisson' sampling.*=None`, or .*sampling='shuffle'"),
        (BallsInBins(100, 10), "'balls_in_bins' sampling.*=None`, or "),
        (FixedBins(100, 10, 10, 1), "'fixed_bins_passes' sampling.*=None`, or"),
        (
            PoissonUsers(100, 10, 3),
            r"'poisson_user_steps' sampling.*`num_microbatches=None`\.$",
        ),
    ],
    ids=["poisson", "bins", "files", "users"],
)
def test_refused_microbatches_name_the_sampling_and_what_works(scheme, words):
    with pytest.raises(ValueError, match=words):
        sizes(scheme, optimizer(num_microbatches=2))


def test_an_unknown_batch_size_is_refused():
    with pytest.raises(ValueError, match="expected_batch_size"):
        private().fit(tf.data.Dataset.from_tensor_slices(data()).batch(4))
    with pytest.raises(ValueError, match="expected_batch_size"):
        private().train_on_batch(*data())


def test_contradicting_batch_sizes_are_refused():
    with pytest.raises(ValueError, match="contradicts"):
        private(opt=optimizer(expected_batch_size=5)).fit(*data(), batch_size=4)


def sizes(scheme, opt=None, **options):
    clipper = BatchClipper(None, None, **options)
    cut = with_sizes(clipper, scheme, opt or optimizer())
    return cut.examples_per_unit, cut.physical_batch_size


def test_batches_run_whole_unless_somebody_wants_passes():
    opt = optimizer()
    assert sizes(Poisson(100, 10), opt) == (1, None)
    assert opt.expected_batch_size == 10
    assert sizes(Poisson(100, 10), physical_batch_size=3) == (1, 3)


def test_microbatches_are_those_of_the_expected_batch():
    grouped = {"num_microbatches": 3}
    assert sizes(Shuffled(100, 10), optimizer(**grouped)) == (4, None)
    known = optimizer(expected_batch_size=6, **grouped)
    assert sizes(Unknown(), known) == (2, None)


def test_xla_gets_passes_that_few_batches_exceed():
    assert sizes(Poisson(1000, 100), jit_compile=True) == (1, 120)
    unknown = optimizer(expected_batch_size=100)
    assert sizes(Unknown(), unknown, jit_compile=True) == (1, 120)
    assert sizes(Poisson(1000, 100), jit_compile=True, physical_batch_size=7) == (1, 7)


def test_xla_gets_passes_of_just_the_batches_whose_size_is_fixed():
    grouped = optimizer(num_microbatches=30)
    assert sizes(Shuffled(1000, 100), jit_compile=True) == (1, 100)
    assert sizes(Shuffled(1000, 100), grouped, jit_compile=True) == (4, 100)


def test_xla_gets_passes_of_the_share_of_a_replica():
    class Four:
        number = 4

    # The draw varies, and is cut evenly.
    four = {"jit_compile": True, "replicas": Four()}
    assert sizes(Poisson(1000, 100), **four) == (1, 30)
    assert sizes(PoissonUsers(1000, 100, 3), **four) == (1, 90)
    assert sizes(Shuffled(1000, 100), **four) == (1, 25)


def test_passes_cut_no_unit_in_two():
    grouped = optimizer(num_microbatches=3)
    assert sizes(Shuffled(99, 12), grouped, physical_batch_size=8) == (4, 8)
    with pytest.raises(ValueError, match=r"whole micro.*size=6, 4 ex.*size=8`"):
        sizes(Shuffled(99, 12), grouped, physical_batch_size=6)


@pytest.mark.parametrize(("rows", "filled"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_rows_are_filled_up_to_whole_units(rows, filled):
    assert filled_up(rows, 4) == filled
