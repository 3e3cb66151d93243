"""Callbacks of one's own see nothing without noise, and pay for what they ask."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.accounting.levels import folded
from tfdp.callbacks import Query, StepCallback
from tfdp.errors import NotPrivateError
from tfdp.mechanisms import mechanism

ROWS, CLIP = 40, 1.0
# None is at the clip norm, which rounding could bring on either side.
NORMS = np.linspace(0.15, 4.05, ROWS)


def few(norm, clip):
    return tf.cast(norm <= clip, tf.float64)


COUNT = Query(few, sensitivity=1.0, noise_multiplier=5.0)


class Remembers(StepCallback):
    """Takes the norm of a unit out of its query."""

    def __init__(self):
        super().__init__()
        self.seen, self.norm = tf.Variable(0.0, dtype=tf.float64), None
        self.query = Query(self.of_unit, sensitivity=1.0, noise_multiplier=5.0)

    def of_unit(self, norm, clip):
        self.norm = norm
        return tf.cast(norm <= clip, tf.float64)

    def during_step(self, step):
        step.ask(self.query)
        if (
            self.norm is not None
            and self.norm.graph is tf.compat.v1.get_default_graph()
        ):
            self.seen.assign(tf.cast(self.norm, tf.float64))


class Counts(StepCallback):
    """Keeps how many units are not clipped."""

    sets = "l2_norm_clip"

    def __init__(self, *queries):
        super().__init__()
        self.asked = queries or (COUNT,)
        self.answers = tf.Variable(tf.zeros([3, len(self.asked)], tf.float64))
        self.steps = tf.Variable(0)

    def during_step(self, step):
        answers = [step.ask(query) for query in self.asked]
        self.answers[self.steps].assign(tf.stack(answers))
        self.steps.assign_add(1)


def test_queries_run_in_a_graph_of_their_own():
    callback = Remembers()
    trained(callback)
    assert callback.seen.numpy() == 0


def trained(*callbacks, noise_multiplier=2.0, **options):
    """Units whose gradients have known norms, all of them in every step."""
    inner = keras.Sequential([
        keras.Input((1,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])
    model = tfdp.DPModel(inner)
    model.compile(
        tfdp.optimizers.DPSGD(
            1e-9, l2_norm_clip=CLIP, noise_multiplier=noise_multiplier
        ),
        lambda y_true, y_pred: keras.ops.sum(y_pred, axis=-1),
        **options,
    )
    model.fit(
        NORMS[:, None],
        np.zeros((ROWS, 1)),
        batch_size=ROWS,
        steps_per_epoch=3,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def z_of(model):
    (segment,) = model.ledger.segments
    return segment.noise_multiplier


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_answer_is_a_noised_sum_that_the_ledger_counts(options):
    counts = Counts()
    model = trained(counts, **options)
    truth = np.sum(NORMS <= CLIP)
    errors = counts.answers.numpy().ravel() - truth
    assert np.all(errors != 0)
    assert np.abs(errors).max() < 5 * 6
    assert len(set(errors)) == 3
    assert z_of(model) == pytest.approx(folded(2.0, 5.0), rel=1e-9)


def test_several_queries_have_noise_of_their_own_and_cost_together():
    other = Query(few, sensitivity=1.0, noise_multiplier=4.0)
    counts = Counts(COUNT, other)
    model = trained(counts)
    standardized = (counts.answers.numpy() - np.sum(NORMS <= CLIP)) / [5.0, 4.0]
    # Rounding alone would tell equal ones apart.
    assert np.abs(np.diff(standardized)).min() > 1e-9
    assert z_of(model) == pytest.approx(folded(folded(2.0, 5.0), 4.0), rel=1e-9)


@pytest.mark.slow
def test_queries_now_and_then_cost_now_and_then():
    rare = Query(few, sensitivity=1.0, noise_multiplier=5.0, every=2)
    counts = Counts(rare)
    model = trained(counts)
    assert np.isnan(counts.answers.numpy().ravel()).tolist() == [False, True, False]
    asked, others = sorted(model.ledger.segments, key=lambda s: s.noise_multiplier)
    assert (asked.count, others.count) == (2, 1)
    assert asked.noise_multiplier == pytest.approx(folded(2.0, 5.0), rel=1e-9)
    assert others.noise_multiplier == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize(
    "of_unit",
    [
        lambda norm, clip: 1e6 * tf.cast(norm, tf.float64),
        lambda norm, clip: tf.fill([], tf.constant(np.inf, tf.float64)),
        lambda norm, clip: tf.cast(norm, tf.float64) * np.nan,
    ],
)
def test_a_unit_moves_an_answer_by_no_more_than_was_declared(of_unit):
    query = Query(of_unit, sensitivity=0.5, noise_multiplier=1.0)
    clip, no_noise = tf.constant(CLIP, tf.float64), tf.zeros([])
    norms = tf.constant([3.0, np.inf, np.nan, 0.0])
    whole = query.answer(norms, clip, no_noise)
    for left_out in range(4):
        rest = tf.gather(norms, [n for n in range(4) if n != left_out])
        assert abs(float(whole - query.answer(rest, clip, no_noise))) <= 0.5
    assert float(query.answer(norms[:0], clip, no_noise)) == 0


@pytest.mark.parametrize(
    "keeps",
    [
        lambda norm, kept: kept.assign_add(norm),
        lambda norm, kept: tf.py_function(lambda *_: None, [norm], []),
        lambda norm, kept: tf.numpy_function(lambda *_: None, [norm], []),
        lambda norm, kept: tf.print(norm),
    ],
    ids=["variable", "py_function", "numpy_function", "print"],
)
def test_what_an_answer_is_made_of_keeps_no_norms(keeps):
    kept = tf.Variable(0.0)

    def of_unit(norm, clip):
        keeps(norm, kept)
        return few(norm, clip)

    query = Query(of_unit, sensitivity=1.0, noise_multiplier=1.0)
    clip, no_noise = tf.constant(CLIP, tf.float64), tf.zeros([])
    with pytest.raises(NotPrivateError, match=r"`of_unit` must .*Received: .*Return "):
        query.answer(tf.constant([3.0]), clip, no_noise)


@pytest.mark.parametrize("is_inside", [True, False])
def test_what_an_answer_is_made_of_reads_no_metric(is_inside):
    """It has seen the other rows of the step."""
    metric = keras.metrics.MeanSquaredError()

    def ask(_, step):
        seen = metric.result()
        step.ask(
            Query(
                lambda norm, clip: norm * (metric.result() if is_inside else seen),
                sensitivity=1.0,
                noise_multiplier=1.0,
            )
        )

    asking = type("Asking", (StepCallback,), {"during_step": ask})()
    with pytest.raises(NotPrivateError, match="reads a metric"):
        trained(asking, metrics=[metric])


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_answer_counts_though_its_step_does_not_end(run_eagerly):
    zero = tf.Variable(0.0, dtype=tf.float64)

    def ask(_, step):
        many = zero + step.ask(Query(few, sensitivity=1.0, noise_multiplier=1.0))
        tf.debugging.assert_less(many, tf.constant(-1e9, tf.float64))

    asking = type("Asking", (StepCallback,), {"during_step": ask})()
    with pytest.raises(tf.errors.InvalidArgumentError):
        trained(asking, run_eagerly=run_eagerly)
    assert asking.model.ledger.steps == 1


def test_vectors_are_bounded_as_a_whole():
    query = Query(
        lambda norm, clip: tf.fill([4], tf.cast(norm, tf.float64)),
        sensitivity=1.0,
        noise_multiplier=1.0,
        shape=(4,),
    )
    answer = query.answer(tf.constant([100.0]), tf.constant(1.0), tf.zeros([4]))
    np.testing.assert_allclose(answer, [0.5] * 4)


@pytest.mark.slow
def test_units_of_several_examples_pay_twice():
    counts = Counts()
    inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model = tfdp.DPModel(inner, sampling="shuffle")
    model.compile(
        tfdp.optimizers.DPSGD(
            0.1, l2_norm_clip=CLIP, noise_multiplier=2.0, num_microbatches=20
        ),
        "mse",
    )
    x = NORMS[:, None]
    model.fit(x, x, batch_size=ROWS, verbose=0, callbacks=[counts])
    assert z_of(model) == pytest.approx(folded(2.0, 5.0) / 2, rel=1e-9)


def test_what_was_not_announced_is_not_answered():
    class Fickle(StepCallback):
        rehearsed = False

        def during_step(self, step):
            if self.rehearsed:
                step.ask(COUNT)
            self.rehearsed = True

    with pytest.raises(
        NotPrivateError, match=r"`Fickle.during_step` asks a query that"
    ):
        trained(Fickle())


@pytest.mark.slow
def test_a_step_shows_no_norms_and_no_gradients():
    class Looks(StepCallback):
        def during_step(self, step):
            self.seen = step

    looks = Looks()
    model = trained(looks)
    public = {name for name in dir(looks.seen) if not name.startswith("_")}
    assert public == {"ask", "asks", "expected_units", "optimizer"}
    assert z_of(model) == 2.0


@pytest.mark.slow
def test_without_noise_only_by_its_name():
    class Logs(StepCallback):
        def __init__(self):
            super().__init__()
            self.nonprivate_norms = tf.Variable(tf.zeros([ROWS]))

        def nonprivate_step(self, step):
            self.nonprivate_norms.assign(step.clipped_sum.norms)

    logs = Logs()
    trained(logs)
    np.testing.assert_allclose(np.sort(logs.nonprivate_norms), NORMS, rtol=1e-5)


@pytest.mark.slow
def test_a_clip_norm_that_is_set_acts_from_the_next_step_on():
    class Halves(StepCallback):
        sets = "l2_norm_clip"

        def during_step(self, step):
            clip = step.optimizer.l2_norm_clip
            clip.assign(clip / 2)

    model = trained(Halves())
    assert float(model.optimizer.l2_norm_clip) == CLIP / 8
    assert z_of(model) == 2.0


@pytest.mark.slow
def test_fits_with_the_same_callbacks_are_traced_once():
    counts = Counts()
    model = trained(counts)
    counts.steps.assign(0)
    function = model.train_function
    x = NORMS[:, None]
    options = {"batch_size": ROWS, "steps_per_epoch": 1, "verbose": 0}
    model.fit(x, np.zeros((ROWS, 1)), callbacks=[counts], **options)
    assert model.train_function is function
    model.fit(x, np.zeros((ROWS, 1)), **options)
    assert model.train_function is not function


@pytest.mark.parametrize(
    "wrong",
    [
        {"sensitivity": 0.0},
        {"sensitivity": float("nan")},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": float("inf")},
        {"every": 0},
        {"every": 1.5},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(wrong):
    arguments = {"sensitivity": 1.0, "noise_multiplier": 1.0} | wrong
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        Query(few, **arguments)


def test_other_queries_are_another_training_function():
    counts = Counts(COUNT)
    model = trained(counts)
    counts.steps.assign(0)
    # More noise: less would be counted anyway, because it was planned.
    counts.asked = (Query(few, sensitivity=1.0, noise_multiplier=9.0),)
    x = NORMS[:, None]
    model.fit(x, x, batch_size=ROWS, steps_per_epoch=1, verbose=0, callbacks=[counts])
    found = {round(s.noise_multiplier, 9) for s in model.ledger.segments}
    assert found == {round(folded(2.0, z), 9) for z in (5.0, 9.0)}


def test_another_callback_with_the_same_queries_learns_by_itself():
    first, other = Counts(), Counts()
    model = trained(first)
    x = NORMS[:, None]
    model.fit(x, x, batch_size=ROWS, steps_per_epoch=1, verbose=0, callbacks=[other])
    assert (int(first.steps), int(other.steps)) == (3, 1)


@pytest.mark.parametrize("where", ["loop", "branch"])
def test_what_is_asked_in_loops_and_branches_is_not_answered(where):
    class Hides(StepCallback):
        def during_step(self, step):
            if where == "branch":
                yes = step.optimizer.iterations.value > 0
                tf.cond(yes, lambda: step.ask(COUNT), lambda: tf.zeros([], tf.float64))
            else:
                tf.while_loop(
                    lambda n, _: n < 10,
                    lambda n, _: (n + 1, step.ask(COUNT)),
                    (0, tf.zeros([], tf.float64)),
                )

    with pytest.raises(NotPrivateError, match=r"inside of a branch or a loop.*every"):
        trained(Hides())


class Lowers(StepCallback):
    """Sets little noise where nobody announced it."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def before_step(self, optimizer):
        if self.hook == "before_step":
            optimizer.noise_multiplier.assign(0.5)

    def during_step(self, step):
        if self.hook == "during_step":
            step.optimizer.noise_multiplier.assign(0.5)

    def scheduled_noise_multiplier(self, iteration):
        return tf.ones(tf.shape(iteration), tf.float64) * 2.0


@pytest.mark.parametrize(
    ("hook", "counts"), [("before_step", {0.5: 3}), ("during_step", {2.0: 1, 0.5: 2})]
)
def test_noise_counts_as_it_is_drawn_whatever_was_announced(hook, counts, monkeypatch):
    drawn = tf.Variable(tf.zeros([3]))
    steps = tf.Variable(0)
    add_noise = mechanism.add_noise

    def seen(clipped_sum, *, noise_multiplier, stream):
        drawn[steps].assign(tf.cast(noise_multiplier, tf.float32))
        steps.assign_add(1)
        return add_noise(clipped_sum, noise_multiplier=noise_multiplier, stream=stream)

    monkeypatch.setattr(mechanism, "add_noise", seen)
    model = trained(Lowers(hook))
    found = {s.noise_multiplier: s.count for s in model.ledger.segments}
    assert found == counts
    assert sorted(drawn.numpy()) == sorted(
        z for z, n in counts.items() for _ in range(n)
    )


@pytest.mark.slow
def test_an_answer_cannot_be_had_for_another_steps_price():
    rare = Query(few, sensitivity=1.0, noise_multiplier=5.0, every=1000)

    class Rewinds(Counts):
        def during_step(self, step):
            iterations = step.optimizer.iterations
            present = tf.identity(iterations.value)
            iterations.assign(0)
            super().during_step(step)
            iterations.assign(present)

    rewinds = Rewinds(rare)
    trained(rewinds)
    assert np.isnan(rewinds.answers.numpy()).sum() == 2


@pytest.mark.slow
def test_callbacks_go_on_where_another_takes_single_steps():
    class Single(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not batch:
                self.model.train_on_batch(NORMS[:, None], np.zeros((ROWS, 1)))

    class Halves(StepCallback):
        def before_step(self, optimizer):
            optimizer.l2_norm_clip.assign(optimizer.l2_norm_clip / 2)

    model = trained(Halves(), Single())
    # Three steps of `fit`, and the single one.
    assert float(model.optimizer.l2_norm_clip) == CLIP / 2**4
    assert model.ledger.steps == 4


# ------------------------------------------------------------- steps inside of steps


def acting(hook, act, kind=StepCallback):
    """A callback that does something with its model."""
    method = {hook: lambda self, *_, **__: act(self.model)}
    return type("Acting", (kind,), method)()


def by_train_step(model):
    model.train_step((tf.ones([1, 1]), tf.ones([1, 1])))


def by_a_sum(model):
    clipped = tfdp.clipped_gradients(
        model.model, "mse", tf.ones([1, 1]), tf.ones([1, 1]), l2_norm_clip=CLIP
    )
    model.optimizer.apply_clipped_sum(clipped, model.trainable_variables)


@pytest.mark.parametrize("take", [by_train_step, by_a_sum])
@pytest.mark.parametrize("hook", ["before_step", "during_step", "after_release"])
def test_a_step_inside_of_a_step_is_refused(hook, take):
    """It would count as one of a batch that `fit` has drawn, with the noise of that."""
    with pytest.raises(NotPrivateError, match="Only one step"):
        trained(acting(hook, take))


def test_a_mechanism_gives_no_two_models_the_same_noise():
    shared = tfdp.mechanisms.Gaussian()

    def private():
        model = tfdp.DPModel(
            keras.Sequential([keras.Input((1,)), keras.layers.Dense(9)])
        )
        optimizer = tfdp.optimizers.DPSGD(
            1.0,
            l2_norm_clip=1e-9,
            noise_multiplier=1e9,
            mechanism=shared,
            expected_batch_size=1,
        )
        model.compile(optimizer, "mse")
        return model

    one, other = private(), private()
    before = [model.get_weights()[0] for model in (one, other)]
    inside = acting("during_step", lambda _: by_train_step(other))
    one.fit(np.ones((1, 1)), np.ones((1, 1)), steps_per_epoch=1, callbacks=[inside])
    moved = [m.get_weights()[0] - w for m, w in zip((one, other), before, strict=True)]
    assert np.abs(moved[0] - moved[1]).max() > 0.1


def test_python_that_runs_in_a_graph_takes_no_steps_of_fit():
    """Of the batches that `fit` draws it knows nothing."""

    def take(model):
        tf.py_function(lambda: by_train_step(model), [], [])

    model = trained(acting("before_step", take))
    counts = {type(each.scheme).__name__: each.count for each in model.ledger.segments}
    assert counts == {"Poisson": 3, "Unknown": 3}


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_epoch_end"])
def test_callbacks_do_not_give_the_training_function_batches_of_their_own(hook):
    def give(model):
        rows = tf.data.Dataset.from_tensors((tf.ones([1, 1]), tf.ones([1, 1])))
        model.make_train_function()(iter(rows))

    with pytest.raises(NotPrivateError, match=r"Use `private.train_on_batch"):
        trained(acting(hook, give, keras.callbacks.Callback))


def test_callbacks_take_steps_between_those_of_fit():
    def take(model):
        model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))

    hook = "on_train_batch_begin"
    model = trained(acting(hook, take, keras.callbacks.Callback))
    assert model.ledger.steps == int(model.optimizer.iterations) == 6
