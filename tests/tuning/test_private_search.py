"""Searches with real models: what leaves, what it costs, and what stays inside."""

import gc
import json
import logging
import math
import sys
import warnings
import weakref

import keras
import pytest

import tfdp
from tests import small
from tfdp.accounting import BestOf, Ledger, PoissonSteps, compose
from tfdp.tuning import Geometric, Poisson, PrivateSearch, TruncatedNegativeBinomial

DELTA = 1e-3
X, Y = small.data(60, outlier=False)
PUBLIC = small.data(20, outlier=False)
STEPS = PoissonSteps(6, 1.0, 60, 20)
SPACE = {"rate": [0.1, 0.3]}
FIT = {"batch_size": 20, "epochs": 2, "public_data": PUBLIC}


class Released(tfdp.callbacks.PrivateEvaluation):
    """Releases a metric once, and logs numbers that a test has chosen."""

    def __init__(self, values):
        super().__init__(["accuracy"], every=2, noise_multiplier=20.0)
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        logs["private_accuracy"] = self.values[epoch]


def build(settings, noise_multiplier=1.0, **options):
    optimizer = tfdp.optimizers.DPSGD(
        settings.get("rate", 0.1), l2_norm_clip=0.5, noise_multiplier=noise_multiplier
    )
    return small.private(opt=optimizer, metrics=["accuracy"], **options)


def search_of(build=build, tries=None, number=None, **options):
    """A search; with a number, of that many tries."""
    tries = tries or Geometric(3)
    if number is not None:
        object.__setattr__(tries, "draw", lambda: number)
    defaults = {"space": SPACE, "score": "val_accuracy", "delta": DELTA, "verbose": 0}
    return PrivateSearch(build, tries=tries, **defaults | options)


def scores_in_turn(values):
    """Callbacks for tries one after the other, each with a score."""
    left = list(values)

    def callbacks(settings):
        # The first one is for the look at what is planned.
        value = left.pop(0)
        return [Released([0.0, value])]

    return callbacks


@pytest.fixture(scope="module")
def searched():
    """A search of three tries, its model, what it built, and the ledger of a copy."""
    built, names = [], []

    def building(settings):
        private = build(settings)
        built.append(weakref.ref(private))
        names.append(tuple(weight.path for weight in private.model.weights))
        return private

    search = search_of(
        building, number=3, score="private_accuracy", space={"rate": [0.3]}
    )
    callbacks = scores_in_turn([math.nan, 0.2, 0.7, 0.7])
    winner = search.fit(X, Y, batch_size=20, epochs=2, callbacks=callbacks)
    gc.collect()
    copy = small.private(keras.models.clone_model(winner.model))
    copy.model.set_weights(winner.model.get_weights())
    return search, winner, built, copy.ledger, names


@pytest.mark.slow
def test_the_winner_has_the_cost_of_the_search(searched):
    search, winner, *_ = searched
    (segment,) = winner.ledger.segments
    ((steps, release),) = segment.scheme.candidates
    assert (steps, release.released, release.count) == (STEPS, "private_accuracy", 1)
    assert winner.ledger == search.ledger
    alone = Ledger((STEPS, release)).epsilon(DELTA, "RDP")
    assert winner.epsilon(DELTA) == search.ledger.epsilon(DELTA) > alone
    assert "the best of a secret number of tries" in winner.privacy_statement(1e-3)
    assert winner.recorder.all_steps == 6


def test_the_first_of_the_best_wins_and_the_others_are_gone(searched):
    search, winner, built, *_ = searched
    assert search.score == 0.7
    assert search.settings == {"rate": 0.3}
    # One look, and three tries of which the second was the first of the best.
    assert [each() is not None for each in built] == [False, False, True, False]
    assert built[2]() is winner


def test_names_do_not_number_the_tries(searched):
    _, winner, _, _, names = searched
    assert set(names) == {tuple(weight.path for weight in winner.model.weights)}


def test_logs_stay_inside(searched):
    _, winner, *_ = searched
    assert winner.history is None
    assert all(value == 0 for value in winner.get_metrics_result().values())
    state = winner._model_ledger.state()
    assert "best_of" in state
    assert state.count('"steps"') == 1


@pytest.mark.slow
def test_later_training_adds_to_it(searched, tmp_path):
    search, winner, *_ = searched
    before = winner.ledger
    winner.save(tmp_path / "winner.keras")
    winner.save_weights(tmp_path / "winner.weights.h5")
    loaded = keras.models.load_model(tmp_path / "winner.keras")
    assert loaded.ledger == before
    loaded.fit(X, Y, batch_size=20, epochs=1, verbose=0)
    assert loaded.ledger == before.add(STEPS.with_count(3))
    assert loaded.epsilon(DELTA) > search.ledger.epsilon(DELTA)
    # Both come from one search.
    assert compose(winner.ledger).segments == before.segments


def test_copies_of_the_winner_have_the_cost_of_the_search(searched):
    _, winner, _, of_copy, _ = searched
    assert of_copy == winner.ledger


@pytest.mark.slow
def test_it_exports_with_the_cost_of_the_search(searched, tmp_path):
    search, winner, *_ = searched
    report = tfdp.export.export_private_model(winner, tmp_path / "1", delta=DELTA)
    assert report["epsilon"] == search.ledger.epsilon(DELTA)
    assert report["segments"][0]["kind"] == "best_of"
    assert report["steps"] == 6


@pytest.mark.slow
def test_the_text_does_not_depend_on_the_number_of_tries(capfd):
    texts = []
    for number in (1, 2):

        def loud(settings):
            sys.stdout.write("a try")
            warnings.warn("a try", stacklevel=1)
            logging.getLogger().warning("a try")
            return []

        search = search_of(number=number, verbose=1, space={"rate": [0.1]})
        search.fit(X, Y, **FIT | {"epochs": 1}, callbacks=loud)
        texts.append(capfd.readouterr())
    assert texts[0] == texts[1]
    assert "is secret" in texts[0].out
    assert "-differentially private" in texts[0].out


@pytest.mark.slow
def test_no_tries_leave_nothing():
    search = search_of(tries=Poisson(3), number=0, space={"rate": [0.1]})
    with pytest.warns(UserWarning, match="The number of tries was 0"):
        assert search.fit(X, Y, **FIT) is None
    assert search.settings is None
    assert search.score is None
    once = search.ledger
    assert once.epsilon(DELTA) > Ledger((STEPS,)).epsilon(DELTA)
    # A search that is over counts for the next one of the same object.
    with pytest.warns(UserWarning, match="The number of tries was 0"):
        search.fit(X, Y, **FIT)
    assert search.ledger == compose(once, once).merged()
    assert search.ledger.epsilon(DELTA) > once.epsilon(DELTA)


@pytest.mark.exhaustive
def test_what_never_had_a_number_loses():
    search = search_of(number=2, space={"rate": [0.1]}, score="private_accuracy")
    callbacks = scores_in_turn([0, math.nan, -5.0])
    assert search.fit(X, Y, batch_size=20, epochs=2, callbacks=callbacks) is not None
    assert search.score == -5.0


@pytest.mark.exhaustive
def test_less_may_be_better():
    search = search_of(
        number=2, space={"rate": [0.1]}, score="private_accuracy", mode="min"
    )
    callbacks = scores_in_turn([0, 2.0, 1.0])
    search.fit(X, Y, batch_size=20, epochs=2, callbacks=callbacks)
    assert search.score == 1.0


class Interrupts(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_search_that_is_cut_short_counts_as_what_ran(tmp_path):
    project = tfdp.accounting.Project(tmp_path / "data.json")
    begun = []

    def callbacks(settings):
        begun.append(settings)
        return [Interrupts()] if len(begun) == 3 else []

    search = search_of(number=4, space={"rate": [0.1]}, project=project)
    with pytest.raises(KeyboardInterrupt):
        search.fit(X, Y, **FIT, callbacks=callbacks)
    # One look, one whole try, and one that had begun, which counts with all its steps.
    assert search.ledger == Ledger((STEPS.with_count(12),))
    assert project.ledger == search.ledger
    assert project.unsettled == []
    # What ran before counts for the next one, too.
    object.__setattr__(search._tries, "draw", lambda: 1)
    winner = search.fit(X, Y, **FIT)
    assert STEPS.with_count(12) in winner.ledger.segments
    assert isinstance(winner.ledger.segments[-1].scheme, BestOf)
    assert project.ledger == winner.ledger


@pytest.mark.slow
def test_candidates_count_with_the_dearest_of_the_grid():
    def dear(settings):
        return build(settings, noise_multiplier=settings["noise"])

    space = {"noise": [1.0, 2.0], "batch_size": [20, 30]}
    search = search_of(dear, number=1, space=space)
    winner = search.fit(
        X, Y, batch_size=lambda s: s["batch_size"], epochs=1, public_data=PUBLIC
    )
    candidates = winner.ledger.segments[0].scheme.candidates
    assert set(candidates) == {
        (PoissonSteps(steps, noise, 60, size),)
        for noise in (1.0, 2.0)
        for steps, size in [(3, 20), (2, 30)]
    }
    assert winner.ledger.segments[0].noise_multiplier == 1.0


@pytest.mark.exhaustive
def test_samplers_draw_settings():
    seen = []

    def sampler(random):
        return {"rate": 10 ** random.uniform(-2, 0)}

    def building(settings):
        seen.append(settings["rate"])
        return build(settings)

    search = search_of(building, number=1, space=sampler)
    winner = search.fit(X, Y, **FIT)
    assert 0.01 <= search.settings["rate"] <= 1
    assert seen[-1] == search.settings["rate"]
    assert winner.ledger.segments[0].scheme.candidates == ((STEPS,),)


@pytest.mark.slow
def test_settings_of_samplers_must_cost_the_same():
    search = search_of(
        lambda settings: build(settings, noise_multiplier=settings["noise"]),
        number=2,
        space=lambda random: {"noise": random.uniform(1, 2)},
    )
    with pytest.raises(ValueError, match="must all cost the same"):
        search.fit(X, Y, **FIT)
    assert search.ledger == Ledger()


@pytest.mark.parametrize(
    "score", ["accuracy", "loss", "nonprivate_accuracy", "epsilon"]
)
def test_exact_scores_of_private_rows_are_refused(score):
    with pytest.raises(ValueError, match="an exact metric of the private rows"):
        search_of(score=score)


def test_validation_rows_must_be_said_to_be_public():
    search = search_of(lambda settings: pytest.fail("built"))
    with pytest.raises(ValueError, match="nobody has said to be public"):
        search.fit(X, Y, batch_size=20)
    for name, value in [
        ("validation_data", (X, Y)),
        ("validation_split", 0.1),
        ("verbose", 2),
    ]:
        with pytest.raises(ValueError, match="is not for tries"):
            search.fit(X, Y, **FIT, **{name: value})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"build": None}, TypeError, "`build` must be a function"),
        ({"tries": 10}, TypeError, "`tries`"),
        ({"delta": 0}, ValueError, "`delta`"),
        ({"delta": math.nan}, ValueError, "`delta`"),
        ({"score": 3}, TypeError, "`score`"),
        ({"score": "val_x"}, ValueError, "where a name does not tell"),
        ({"mode": "most"}, ValueError, "`mode`"),
        ({"space": {"rate": []}}, ValueError, "`space`"),
        ({"space": {"rate": "abc"}}, ValueError, "`space`"),
        ({"space": 3}, TypeError, "`space`"),
        ({"project": 3}, TypeError, "`project`"),
        ({"project": "typo.json"}, ValueError, "must be a file that exists"),
    ],
)
def test_arguments_are_checked(options, error, match):
    with pytest.raises(error, match=match):
        search_of(**options)


def refused(match, error=ValueError, build=build, fit=None, **options):
    """Check that a search refuses before anything has run."""
    search = search_of(build, number=1, **{"space": {"rate": [0.1]}} | options)
    with pytest.raises(error, match=match):
        search.fit(X, Y, **FIT | (fit or {}))
    assert search.ledger == Ledger()


def test_what_build_must_return():
    refused("must return a compiled", TypeError, lambda settings: small.network())
    refused(
        "must return a compiled",
        TypeError,
        lambda settings: tfdp.DPModel(small.network()),
    )


@pytest.mark.slow
def test_seeds_are_refused():
    def seeded(settings):
        return small.private(opt=small.optimizer(noise_seed=3))

    refused("Tries must be independent", tfdp.errors.NotPrivateError, seeded)


@pytest.mark.slow
def test_no_noise_is_refused():
    def without(settings):
        return small.private(opt=small.noiseless())

    refused("would not be differentially private", tfdp.errors.NotPrivateError, without)


def test_bins_are_refused():
    def bins(settings):
        return build(settings, wrap={"sampling": "balls_in_bins"})

    refused("accounted by Rényi differential privacy", build=bins)


@pytest.mark.slow
def test_callbacks_are_made_for_each_try_and_write_nothing(tmp_path):
    refused(
        "must be a function that makes new ones", fit={"callbacks": [Released([0, 0])]}
    )
    writer = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    for callbacks in ([writer], [[writer]], keras.callbacks.CallbackList([writer])):
        refused(
            "only the best model may leave",
            fit={"callbacks": lambda _, given=callbacks: given},
        )
    project = tfdp.accounting.Project(
        tmp_path / "p.json", delta=DELTA, target_epsilon=9.0
    )
    budget = tfdp.callbacks.PrivacyBudget(project=project)
    refused("must not count one by one", fit={"callbacks": lambda _: [budget]})


def test_private_rows_are_not_public():
    refused("`public_data` must be other rows", fit={"public_data": (X[:9], Y[:9])})


def test_exact_decisions_inside_of_tries_are_refused():
    stopping = keras.callbacks.EarlyStopping("accuracy", restore_best_weights=True)
    refused(
        "`EarlyStopping` would decide by a metric of the private rows",
        fit={"callbacks": lambda _: [Released([0, 0]), [stopping]]},
    )


def test_other_private_rows_are_refused_before_a_try():
    def callbacks(settings):
        other = small.data(20, outlier=False)
        return [
            tfdp.callbacks.PrivateEvaluation(
                ["accuracy"], noise_multiplier=20.0, x=other[0], y=other[1]
            )
        ]

    refused("costs other private rows is not known", fit={"callbacks": callbacks})


@pytest.mark.slow
def test_scores_that_no_epoch_has_are_refused_before_a_try():
    def callbacks(settings):
        return [
            tfdp.callbacks.PrivateEvaluation(
                ["accuracy"], noise_multiplier=20.0, every=5
            )
        ]

    refused(
        "no callback releases in any epoch",
        fit={"callbacks": callbacks},
        score="private_accuracy",
    )


class LooksPrivate(keras.callbacks.Callback):
    """Logs an exact metric under the name of one that is released with noise."""

    def on_epoch_end(self, epoch, logs=None):
        logs["private_accuracy"] = logs["accuracy"]


def test_a_score_that_nothing_releases_is_refused():
    search = search_of(number=1, space={"rate": [0.1]}, score="private_accuracy")
    with pytest.raises(ValueError, match="which no callback releases"):
        search.fit(X, Y, batch_size=20, epochs=2, callbacks=lambda _: [LooksPrivate()])
    assert not search.ledger.segments


def test_steps_of_unknown_number_are_refused():
    def sized(settings):
        return small.private(opt=small.optimizer(expected_batch_size=10))

    def data(settings):
        return ((X[:10], Y[:10]) for _ in range(100))

    search = search_of(sized, number=1, space={})
    with pytest.raises(ValueError, match="must be known before it begins"):
        search.fit(data, public_data=PUBLIC)


def drawn():
    return tfdp.data.PoissonDataset(X, Y, expected_batch_size=20)


def test_tries_do_not_share_what_counts_its_draws():
    data = drawn()
    search = search_of(number=1, space={"rate": [0.1]})
    with pytest.raises(ValueError, match="x with the same PoissonDataset"):
        search.fit(data, epochs=2, public_data=PUBLIC)
    assert (search.ledger, data.epoch) == (Ledger(), 1)


@pytest.mark.slow
def test_what_the_winner_remembers_does_not_number_the_tries():
    states = []
    for number in (1, 2):
        search = search_of(number=number, space={"rate": [0.1]})
        winner = search.fit(lambda settings: drawn(), epochs=1, public_data=PUBLIC)
        state = json.loads(winner.recorder.state())
        states.append({key: state[key] for key in state.keys() - {"runs"}})
    assert states[0] == states[1]
    assert states[0]["sampled_epochs"] == 0


@pytest.mark.slow
def test_tries_may_not_know_of_each_other():
    network = small.network()

    def same(settings):
        return small.private(network, metrics=["accuracy"])

    search = search_of(same, number=2, space={"rate": [0.1]})
    with pytest.raises(ValueError, match="must not know of each other"):
        search.fit(X, Y, **FIT)
    assert search.ledger == Ledger((STEPS.with_count(12),))


@pytest.mark.slow
def test_a_try_may_not_run_more_than_it_planned():
    class More(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.train_on_batch(X[:20], Y[:20])

    def sized(settings):
        return small.private(opt=small.optimizer(expected_batch_size=20))

    search = search_of(sized, number=1, space={}, score="val_loss")
    with pytest.raises(ValueError, match="must run what its `fit` had planned"):
        search.fit(X, Y, **FIT, callbacks=lambda _: [More()])
    assert search.ledger.epsilon(DELTA) > Ledger((STEPS,)).epsilon(DELTA)


@pytest.mark.slow
def test_weights_of_a_private_model_count_once(tmp_path):
    base = build({})
    base.fit(X, Y, batch_size=20, epochs=1, verbose=0)
    base.save(tmp_path / "base.keras")

    def tuned(settings):
        model = keras.models.load_model(tmp_path / "base.keras").model
        return small.private(model, metrics=["accuracy"])

    search = search_of(tuned, number=2)
    winner = search.fit(X, Y, **FIT)
    first, second = winner.ledger.segments
    assert first == STEPS.with_count(3)
    assert second.scheme == BestOf(search._tries, [[STEPS]])


@pytest.mark.exhaustive
def test_a_budget_may_end_tries():
    def callbacks(settings):
        return [tfdp.callbacks.PrivacyBudget(delta=DELTA, target_epsilon=2.0)]

    search = search_of(number=2, space={"rate": [0.1]})
    winner = search.fit(X, Y, **FIT | {"epochs": 20}, callbacks=callbacks)
    # Planned is what would run without it; and the budget of the model is spent.
    assert winner.ledger.segments[0].scheme.candidates == ((STEPS.with_count(60),),)
    with pytest.raises(tfdp.errors.PrivacyBudgetError):
        winner.fit(X, Y, batch_size=20, epochs=1, verbose=0)


def test_laws_are_public_names():
    assert tfdp.tuning.TruncatedNegativeBinomial is TruncatedNegativeBinomial
    assert tfdp.tuning.PrivateSearch is PrivateSearch
