"""PrivacyBudget: epsilon in the logs, and no step beyond the target."""

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tests import forks
from tfdp.accounting import Ledger, PoissonSteps, ShuffledPasses, UnamplifiedSteps
from tfdp.errors import NotPrivateError, PrivacyBudgetError

DELTA = 1e-3
ROWS = 12


@pytest.fixture
def rows(rng):
    return rng.normal(size=(ROWS, 3)).astype("float32"), rng.integers(0, 2, ROWS)


def private(
    sampling="shuffle", noise_multiplier=64.0, num_microbatches=None, **options
):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    wrapped = tfdp.DPModel(model, sampling=sampling)
    wrapped.compile(
        tfdp.optimizers.DPSGD(
            0.1,
            l2_norm_clip=1.0,
            noise_multiplier=noise_multiplier,
            num_microbatches=num_microbatches,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    return wrapped


def fit(model, rows, *callbacks, batch_size=4, epochs=9, **options):
    model.fit(
        *rows,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
        **options,
    )


def passes(count, noise_multiplier=64.0, **options):
    return ShuffledPasses(count, noise_multiplier, ROWS, 4, **options)


def budget_of(*segments):
    """A budget that has room for these."""
    return tfdp.callbacks.PrivacyBudget(DELTA, Ledger(segments).epsilon(DELTA))


class Loads(keras.callbacks.Callback):
    """Loads a file after every epoch: no limit stands then."""

    def __init__(self, path, last=None):
        super().__init__()
        self.path, self.last = path, last

    def on_epoch_end(self, epoch, logs=None):
        keras.models.load_model(self.path)
        if epoch == self.last:
            self.model.stop_training = True


@pytest.mark.slow
@pytest.mark.parametrize("last", [None, 1])
def test_who_has_ended_a_training_is_known_whatever_was_loaded(rows, tmp_path, last):
    path = tmp_path / "other.keras"
    other = private(sampling="poisson")
    fit(other, rows, epochs=1)
    other.save(path)
    model = private()
    # The budget ends it after four passes, or somebody after two.
    fit(model, rows, budget_of(passes(4)), Loads(path, last), epochs=9)
    begun = 4 if last is None else last + 1
    assert model.ledger.segments == (passes(begun),)
    assert model.ledger.cut_short == (() if last is None else (passes(9 - begun),))


class Lowers(keras.callbacks.Callback):
    """Stops a training after it has lowered the noise."""

    def __init__(self, noise_multiplier):
        super().__init__()
        self.noise_multiplier = noise_multiplier

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer._noise_multiplier.assign(self.noise_multiplier)
        raise KeyboardInterrupt


@pytest.mark.parametrize("noise_multiplier", [0.0, -1.0, np.nan])
def test_noise_that_is_lowered_before_a_stop_spends_no_budget(rows, noise_multiplier):
    model = private()
    # What is no noise at all is refused in the end, too.
    with pytest.raises((KeyboardInterrupt, ValueError)):
        fit(model, rows, budget_of(passes(20)), Lowers(noise_multiplier))
    assert model.ledger.cut_short == (passes(8),)


class LogsMore(tfdp.callbacks.PrivacyBudget):
    """A budget that does something else beside."""


@pytest.mark.parametrize("kind", [tfdp.callbacks.PrivacyBudget, LogsMore])
def test_a_training_has_one_budget(rows, kind):
    budgets = budget_of(passes(2)), kind(DELTA)
    with pytest.raises(
        ValueError, match=r"Only one `PrivacyBudget`.*Leave all but one"
    ):
        fit(private(), rows, *budgets)


def test_who_stops_a_training_with_a_budget_owes_no_more_than_that(rows):
    model = private()
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: setattr(model, "stop_training", True)
    )
    fit(model, rows, budget_of(passes(4)), stop, epochs=1000)
    assert model.ledger.segments == (passes(1),)
    assert model.ledger.cut_short == (passes(3),)


@pytest.mark.slow
def test_a_spent_budget_binds_everywhere(rows, tmp_path):
    model = private()
    budget = budget_of(passes(2), UnamplifiedSteps(3, 128.0))
    fit(model, rows, budget)
    assert model.ledger.segments == (passes(2),)
    assert not model.ledger.cut_short
    assert int(model.optimizer.iterations) == 6
    model.optimizer.noise_multiplier = 128.0
    for _ in range(3):
        model.train_on_batch(*rows)
    spent, weights = model.ledger, model.get_weights()
    assert spent.segments == (passes(2), UnamplifiedSteps(3, 128.0))
    assert spent.epsilon(DELTA) <= budget.target_epsilon

    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    loaded.optimizer.expect_batch_size(4)
    for each in (model, loaded):
        with pytest.raises(PrivacyBudgetError, match="Received"):
            each.train_on_batch(*rows)
        with pytest.raises(PrivacyBudgetError):
            fit(each, rows)
        with pytest.raises(PrivacyBudgetError):
            fit(each, rows, budget)
        assert each.ledger == spent
        for old, new in zip(weights, each.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)

    # A larger one goes on.
    larger = budget_of(*spent.segments, passes(2, 128.0))
    fit(loaded, rows, larger)
    assert set(loaded.ledger.segments) == {*spent.segments, passes(2, 128.0)}


def test_units_of_several_examples_cost_two_clips(rows):
    model = private(num_microbatches=2)
    counted = passes(2, 32.0, examples_per_unit=2)
    fit(model, rows, budget_of(counted), epochs=4)
    assert model.ledger.segments == (counted,)


def change_noise(model, when, noise_of):
    """Sets the noise when a batch or an epoch begins, by its number."""

    def change(number, logs):
        model.optimizer.noise_multiplier = noise_of(number)

    return keras.callbacks.LambdaCallback(**{when: change})


@pytest.mark.slow
def test_less_noise_in_mid_training_shrinks_what_is_left(rows):
    model = private()
    change = change_noise(
        model, "on_epoch_begin", lambda epoch: 32.0 if epoch else 64.0
    )
    fit(model, rows, change, budget_of(passes(1), passes(2, 32.0)))
    assert model.ledger.segments == (passes(1), passes(2, 32.0))


def test_less_noise_inside_a_pass_does_not_overspend(rows):
    model = private()
    change = change_noise(
        model, "on_train_batch_begin", lambda batch: 64.0 if batch < 2 else 16.0
    )
    fit(model, rows, change, budget_of(passes(2)))
    assert int(model.optimizer.iterations) == 2
    assert model.ledger.segments == (passes(1),)


@pytest.mark.slow
def test_less_noise_in_several_steps_at_once_does_not_overspend(rows):
    model = private("poisson", steps_per_execution=5)
    change = change_noise(model, "on_train_batch_begin", lambda batch: 32.0)
    steps = PoissonSteps(2, 32.0, ROWS, 4)
    fit(model, rows, change, budget_of(steps), batch_size=4, steps_per_epoch=5)
    assert model.ledger.segments == (steps,)


@pytest.mark.filterwarnings("ignore:Training without noise")
def test_no_budget_has_room_for_a_step_without_noise(rows):
    model = private(noise_multiplier=0.0)
    with pytest.raises(PrivacyBudgetError):
        fit(model, rows, budget_of(passes(2)))
    assert not model.ledger.segments


def test_a_plain_model_is_refused(rows):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(NotPrivateError):
        fit(model, rows, budget_of(passes(2)))


@pytest.mark.parametrize("value", [0, 1, -1, float("nan"), float("inf"), 1e9])
def test_bad_deltas_are_refused(value):
    with pytest.raises(ValueError, match="Received: delta="):
        tfdp.callbacks.PrivacyBudget(value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_bad_targets_are_refused(value):
    with pytest.raises(ValueError, match="Received: target_epsilon="):
        tfdp.callbacks.PrivacyBudget(DELTA, value)


# ------------------------------------------------------------------- of a project


@pytest.fixture
def project(tmp_path):
    return tfdp.accounting.Project(
        tmp_path / "data.json", delta=DELTA, target_epsilon=1.0
    )


class Looks(keras.callbacks.Callback):
    """Remembers what a project says while a training runs, and may end it."""

    def __init__(self, project, stop=False):
        super().__init__()
        self.project, self.stop = project, stop

    def on_train_batch_end(self, batch, logs=None):
        self.seen = self.project.ledger
        self.model.stop_training = self.stop


def poisson(count):
    return PoissonSteps(count, 64.0, ROWS, 4)


@pytest.mark.slow
def test_a_training_reserves_its_steps_and_gives_back_what_it_did_not_use(
    rows, project
):
    budget = tfdp.callbacks.PrivacyBudget(project=project)
    assert (budget.delta, budget.target_epsilon) == (DELTA, 1.0)
    looks = Looks(project)
    model = private("poisson")
    fit(model, rows, budget, looks, epochs=2)
    assert looks.seen == Ledger((poisson(6),))
    assert project.ledger == model.ledger == Ledger((poisson(6),))
    # Later calls reserve, too; other steps have nothing to take from.
    fit(model, rows, looks, epochs=1)
    assert looks.seen == project.ledger == Ledger((poisson(9),))
    with pytest.raises(PrivacyBudgetError, match="Only `fit` reserves a part"):
        model.train_on_batch(*rows)
    with pytest.raises(KeyError):
        fit(model, rows, Fails(), epochs=3)
    assert project.ledger == model.ledger == Ledger((poisson(9),))


class Fails(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise KeyError


@pytest.mark.slow
def test_all_models_of_a_project_share_its_budget(rows, project):
    first, second = private("poisson", 4.0), private("poisson", 4.0)
    budget = tfdp.callbacks.PrivacyBudget(project=project.path)
    fit(first, rows, budget, epochs=1)
    fit(second, rows, tfdp.callbacks.PrivacyBudget(project=project), epochs=99)
    step = PoissonSteps(1, 4.0, ROWS, 4)
    assert 3 < second.ledger.steps < 99 * 3
    assert project.epsilon() <= 1.0 < project.ledger.add(step).epsilon(DELTA)
    assert first.epsilon(DELTA) < second.epsilon(DELTA) < 1.0
    with pytest.raises(PrivacyBudgetError, match="the project has spent its budget"):
        fit(first, rows, epochs=1)
    # What a budget has ended owes nothing more.
    assert project.ledger.segments == (step.with_count(second.ledger.steps + 3),)


@pytest.mark.slow
def test_who_is_stopped_counts_with_what_it_had_reserved(rows, project):
    model = private("poisson", 4.0)
    budget = tfdp.callbacks.PrivacyBudget(project=project)
    looks = Looks(project, stop=True)
    fit(model, rows, budget, looks, epochs=99)
    assert model.ledger.steps == 1
    assert project.ledger == model.ledger.planned().merged() == looks.seen
    assert project.epsilon() <= 1.0


@pytest.mark.slow
def test_less_noise_than_was_reserved_is_refused(rows, project):
    class Lower(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                self.model.optimizer.noise_multiplier = 8.0

    model = private("poisson")
    fit(model, rows, tfdp.callbacks.PrivacyBudget(project=project), Lower(), epochs=2)
    assert model.ledger == Ledger((poisson(1),))


@pytest.mark.slow
def test_a_smaller_budget_of_the_model_binds_too(rows, project):
    model = private("poisson", 4.0)
    budget = tfdp.callbacks.PrivacyBudget(DELTA, 0.5, project=project)
    fit(model, rows, budget, epochs=99)
    assert 0.4 < model.epsilon(DELTA) <= 0.5
    assert project.ledger == model.ledger


@pytest.mark.slow
def test_files_keep_the_numbers_of_the_budget(rows, project, tmp_path):
    model = private("poisson")
    fit(model, rows, tfdp.callbacks.PrivacyBudget(project=project), epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    budget = loaded.recorder.budget
    assert (budget.delta, budget.target_epsilon, budget.project) == (DELTA, 1.0, None)
    # Not a budget of its own of the same size.
    for _ in range(2):
        with pytest.raises(PrivacyBudgetError, match="it again"):
            fit(loaded, rows, epochs=1)
        loaded.save(tmp_path / "again.keras")
        loaded = keras.models.load_model(tmp_path / "again.keras")
    fit(loaded, rows, tfdp.callbacks.PrivacyBudget(project=project), epochs=1)
    # What was saved and has gone on counts once.
    assert project.ledger == loaded.ledger == Ledger((poisson(6),))


def test_projects_must_have_a_budget(tmp_path):
    with pytest.raises(ValueError, match="`project` must be a file that exists"):
        tfdp.callbacks.PrivacyBudget(project=tmp_path / "none.json")
    with pytest.raises(TypeError, match="`delta` must be a number"):
        tfdp.callbacks.PrivacyBudget()


@pytest.mark.parametrize("one", [{"delta": DELTA}, {"target_epsilon": 1.0}])
def test_a_budget_beside_a_project_has_both_numbers(project, one):
    with pytest.raises(ValueError, match="Give both, or none"):
        tfdp.callbacks.PrivacyBudget(**one, project=project)


@pytest.mark.slow
def test_another_model_of_the_project_may_train_the_same_weights(rows, project):
    first = private("poisson")
    fit(first, rows, tfdp.callbacks.PrivacyBudget(project=project), epochs=1)
    second = tfdp.DPModel(first.model)
    second.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=64.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    with pytest.raises(PrivacyBudgetError, match="Only `fit` reserves"):
        fit(second, rows, epochs=1)
    fit(second, rows, tfdp.callbacks.PrivacyBudget(project=project), epochs=1)
    assert project.ledger == second.ledger == Ledger((poisson(6),))


PROGRAM = """
import os, sys
import keras, numpy as np
import tfdp

class Die(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if sys.argv[1] == "die" and self.model.recorder.steps == 6:
            os.kill(os.getpid(), 9)

x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
model = tfdp.DPModel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=8.0)
model.compile(optimizer, loss="mse")
budget = tfdp.callbacks.PrivacyBudget(project="data.json")
callbacks = [budget, Die()]
if sys.argv[1] != "one":
    callbacks.append(keras.callbacks.BackupAndRestore("backup"))
model.fit(x, x[:, :1], batch_size=10, epochs=3, callbacks=callbacks, verbose=0)
"""


@pytest.mark.slow
def test_processes_at_once_and_one_that_is_killed_and_goes_on(tmp_path):
    project = tfdp.accounting.Project(
        tmp_path / "data.json", delta=DELTA, target_epsilon=3.0
    )

    def start(how):
        (tmp_path / how).mkdir()
        return forks.start(PROGRAM, how, output=tmp_path / how, cwd=tmp_path)

    def exit_code(process):
        process.join()
        return process.exitcode

    both = [start("one"), start("die")]
    assert [exit_code(process) for process in both] == [0, -9]
    step = PoissonSteps(1, 8.0, 40, 10)
    # Of the one that was killed all that it had planned.
    assert project.ledger == Ledger((step.with_count(24),))
    assert len(project.unsettled) == 1
    assert exit_code(start("go on")) == 0
    # It has lost what came after its backup, and that counts.
    assert project.unsettled == []
    assert project.ledger == Ledger((step.with_count(12 + 4 + 2 + 8),))
