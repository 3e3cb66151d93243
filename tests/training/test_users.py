"""Users as units: all rows of a user are drawn, clipped and protected together."""

import dataclasses
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.small import CLIP, data, logits_loss, network, noiseless, optimizer, private
from tfdp.accounting import Ledger
from tfdp.data import PoissonDataset
from tfdp.losses.batch import Batch
from tfdp.losses.objective import Objective
from tfdp.sampling import Poisson, PoissonUsers, UnknownUsers
from tfdp.sampling import scheme as scheme_module

pytestmark = pytest.mark.filterwarnings(
    "ignore:Draws made with a `seed`",
    "ignore:The privacy noise is reproducible",
)

# Users with 1 to 5 rows, not beside each other; the outlier is a row of user 1.
IDS = np.array([3, 1, 1, 2, 1, 3, 1, 4, 1, 2, 3, 5])
MOST = 4

WAYS = [
    {"engine": "bookkeeping"},
    {"engine": "ghost"},
    {"engine": "vectorized"},
    {"engine": "bookkeeping", "physical_batch_size": 2 * MOST},
    {"engine": "bookkeeping", "jit_compile": True},
]


def users(model=None, **wrap):
    jit_compile = wrap.pop("jit_compile", False)
    wrap = {"unit": "user", **wrap}
    return private(model, wrap=wrap, jit_compile=jit_compile)


def clipped(rows, ids, most, l2_norm_clip=CLIP, model=None, **wrap):
    """Clip a batch of all users; return the sum as one vector, and the norms."""
    everyone = len(set(ids.tolist()))
    drawn = PoissonDataset(
        *rows, expected_batch_size=everyone, user_ids=ids, examples_per_user=most
    )
    model = users(model, **wrap)
    batch = Batch.of(tf.nest.map_structure(tf.convert_to_tensor, drawn[0]))
    clipper = model.sessions.clipper(drawn.scheme)
    objective = Objective.of(model.model, logits_loss())
    found = clipper.clip(batch, tf.constant(l2_norm_clip, tf.float64), objective)
    assert float(found.l2_sensitivity) == l2_norm_clip
    flat = [np.ravel(gradient) for gradient in found.gradients]
    return np.concatenate(flat), found.norms.numpy(), batch


def one_by_one(batch, most, l2_norm_clip=CLIP, model=None):
    """Do the same with a loop over users."""
    model = model or network()
    total, norms = 0.0, []
    for user in range(len(batch.is_padding) // most):
        rows = slice(user * most, (user + 1) * most)
        real = ~batch.is_padding.numpy()[rows]
        x, y = batch.x.numpy()[rows][real], batch.y.numpy()[rows][real]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean([
                logits_loss()(y[i : i + 1], model(x[i : i + 1])) for i in range(len(x))
            ])
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradient = np.concatenate([np.ravel(each) for each in gradients])
        norms.append(np.linalg.norm(gradient))
        total += gradient * min(1.0, l2_norm_clip / norms[-1])
    return total, np.array(norms)


@pytest.mark.smoke
@pytest.mark.parametrize("wrap", WAYS, ids=str)
def test_sums_and_norms_are_those_of_single_users(wrap):
    keras.config.set_floatx("float64")
    found, norms, batch = clipped(data(), IDS, MOST, **wrap)
    expected, of_users = one_by_one(batch, MOST)
    assert (of_users > CLIP).any()
    assert (of_users < CLIP).any()
    np.testing.assert_allclose(norms, of_users, rtol=1e-9)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def cosine_network():
    """Like `network`, but no number at all for a row of zeros."""
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((3,)),
        keras.layers.Lambda(lambda x: x / tf.norm(x, axis=-1, keepdims=True)),
        keras.layers.Dense(4, activation="tanh"),
        keras.layers.Dense(2),
    ])


@pytest.mark.parametrize("wrap", WAYS, ids=str)
def test_rows_that_a_user_lacks_make_nothing_of_those_that_it_has(wrap):
    keras.config.set_floatx("float64")
    found, norms, batch = clipped(data(), IDS, MOST, model=cosine_network(), **wrap)
    assert batch.is_padding.numpy().any()
    expected, of_users = one_by_one(batch, MOST, model=cosine_network())
    assert (of_users > 0.8 * CLIP).any()
    np.testing.assert_allclose(norms, of_users, rtol=1e-9)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "wrap",
    [
        WAYS[0],
        {"engine": "bookkeeping", "physical_batch_size": 2000},
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in [*WAYS[1:3], {"engine": "apart"}, {"jit_compile": True}]
        ),
    ],
    ids=str,
)
def test_a_user_with_a_thousand_rows_moves_a_step_by_at_most_c(wrap):
    rows = data(1010)
    rows[0][10:] *= 100
    ids = np.r_[np.arange(10), np.full(1000, 99)]
    with_user, *_ = clipped(rows, ids, 1000, **wrap)
    others, *_ = clipped([each[:10] for each in rows], ids[:10], 1000, **wrap)
    moved = np.linalg.norm(with_user - others)
    assert 0.9 * CLIP < moved <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in [*WAYS[:3], {"physical_batch_size": 4}]
        ),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_row_a_user_is_what_rows_are(options):
    compile_options = {k: v for k, v in options.items() if k == "run_eagerly"}
    wrap = {k: v for k, v in options.items() if k != "run_eagerly"}
    rows = data()
    found = []
    for of_unit, of_data in (
        ({}, {}),
        (
            {"unit": "user"},
            {"user_ids": np.arange(12)[::-1].astype(str), "examples_per_user": 1},
        ),
    ):
        model = private(
            opt=optimizer(noise_seed=5), wrap={**wrap, **of_unit}, **compile_options
        )
        drawn = PoissonDataset(*rows, expected_batch_size=4, seed=3, **of_data)
        model.fit(drawn, epochs=2, shuffle=False, verbose=0)
        found.append((model.get_weights(), model.epsilon(1e-3)))
    for of_rows, of_users in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_array_equal(of_rows, of_users)
    assert found[0][1] == found[1][1]


def test_rows_of_a_user_are_in_a_batch_together_or_not_at_all():
    x = np.arange(len(IDS), dtype="float32")[:, np.newaxis]
    drawn = PoissonDataset(
        x, IDS, expected_batch_size=3, user_ids=IDS, examples_per_user=MOST
    )
    of_one, sizes = set(), []
    for _ in range(200):
        (rows, ids), is_padding = drawn[0]
        rows, ids, is_padding = (
            each.reshape(-1, MOST) for each in (rows, ids, is_padding)
        )
        sizes.append(len(rows))
        for numbers, of_user, marks in zip(rows, ids, is_padding, strict=True):
            [user] = set(of_user[~marks])
            assert (~marks).sum() == min(MOST, (user == IDS).sum())
            assert (IDS[numbers[~marks].astype(int)] == user).all()
            if user == 1:
                of_one.add(tuple(numbers))
    # Each of the five parts of four rows.
    assert len(of_one) == 5
    assert abs(np.mean(sizes) - 3) < 5 * np.sqrt(3 * 0.4 / 200)


@pytest.mark.slow
def test_the_ledger_and_the_statement_speak_of_users(tmp_path):
    model = users()
    options = {"batch_size": 2, "user_ids": IDS, "examples_per_user": 3, "verbose": 0}
    model.fit(*data(), **options)
    [segment] = model.ledger.segments
    assert segment.scheme == PoissonUsers(5, 2, 3)
    assert segment.count == 3
    assert model.optimizer.expected_batch_size == 2
    of_rows = tfdp.accounting.PoissonSteps(3, 1.0, 5, 2)
    assert model.epsilon(1e-2) == tfdp.accounting.Ledger((of_rows,)).epsilon(1e-2)
    statement = " ".join(model.privacy_statement(1e-2).split())
    assert "Protected is one user, that is all rows" in statement
    assert "2 of 5 users expected, with at most 3 examples each" in statement
    assert "would hold for" not in statement
    assert "Public are the number of users," in statement
    # That holds for any number of rows, and nothing is taken on trust.
    assert model.privacy_statement(1e-2, max_examples_per_user=7).split() == (
        statement.split()
    )
    report = tfdp.accounting.privacy_report(model.ledger, 1e-2)
    assert "Protected is one user" in report["unit"]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.unit == "user"
    assert again.ledger == model.ledger


@pytest.mark.slow
def test_without_a_batch_size_a_few_users_are_all_in_a_batch():
    model = users()
    model.fit(*data(), user_ids=IDS, examples_per_user=3, verbose=0)
    [segment] = model.ledger.segments
    assert segment.scheme == PoissonUsers(5, 5, 3)


@pytest.mark.slow
def test_more_users_than_there_are_are_all_of_them():
    model = users()
    options = {"user_ids": IDS, "examples_per_user": 3, "verbose": 0}
    message = r"larger than the data.*Received: batch_size=6, 5 users\. Use"
    with pytest.warns(UserWarning, match=message):
        model.fit(*data(), batch_size=6, **options)
    [segment] = model.ledger.segments
    assert segment.scheme == PoissonUsers(5, 5, 3)


@pytest.mark.slow
def test_a_budget_is_one_of_users():
    model = users()
    budget = tfdp.callbacks.PrivacyBudget(1e-2, target_epsilon=6.0)
    options = {"batch_size": 2, "user_ids": IDS, "examples_per_user": 3, "verbose": 0}
    model.fit(*data(), **options, epochs=100, callbacks=[budget])
    [segment] = model.ledger.segments
    assert model.epsilon(1e-2) <= 6.0
    longer = segment.with_count(segment.count + 1)
    assert tfdp.accounting.Ledger((longer,)).epsilon(1e-2) > 6.0


def test_the_training_function_by_itself_takes_no_rows_for_users():
    model = users()
    model.fit(*data(), batch_size=2, user_ids=IDS, examples_per_user=3, verbose=0)
    rows = iter(tf.data.Dataset.from_tensors(data()))
    with pytest.raises(ValueError, match="needs batches of users"):
        model.train_function(rows)


@pytest.mark.slow
def test_a_statement_of_both_units_says_for_whom_it_holds():
    inner = network()
    private(inner).fit(*data(), batch_size=4, verbose=0)
    of_users = users(inner)
    of_users.fit(*data(), batch_size=2, user_ids=IDS, examples_per_user=3, verbose=0)
    statement = " ".join(of_users.privacy_statement(1e-2).split())
    assert "figures of one example hold only for users who have no other" in statement
    assert "Public are the number of examples and that of users," in statement


@pytest.mark.slow
def test_metrics_are_those_of_real_rows():
    model = private(opt=noiseless(), wrap={"unit": "user"}, metrics=["accuracy"])
    before = model.evaluate(*data(), verbose=0, return_dict=True)
    options = {"batch_size": 5, "user_ids": IDS, "examples_per_user": 5}
    history = model.fit(*data(), **options, verbose=0).history
    for name, value in before.items():
        assert history[name][0] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs batches of users"),
        ({"user_ids": IDS}, r"Use `examples_per_user=8`"),
        ({"examples_per_user": 3}, r"Use `user_ids=ids`"),
        ({"user_ids": IDS[:-1], "examples_per_user": 3}, "one id for each row"),
        ({"user_ids": IDS, "examples_per_user": 0}, "examples_per_user"),
        (
            {"user_ids": IDS, "examples_per_user": 3, "batch_size": 0},
            "`batch_size` must be",
        ),
        (
            {"user_ids": IDS, "examples_per_user": 3, "validation_split": 0.5},
            r"validation_split.*`held_out = np\.isin\(user_ids, ",
        ),
        ({"user_ids": IDS, "examples_per_user": 3, "shuffle": False}, "shuffle"),
        (
            {"user_ids": IDS, "examples_per_user": 3, "class_weight": {0: 1.0, 1: 2.0}},
            "sample_weight",
        ),
    ],
    ids=str,
)
def test_what_does_not_protect_users_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        users().fit(*data(), **{"batch_size": 2, **options})


def test_other_data_and_single_steps_are_refused():
    model = users()
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(4)
    declared = tfdp.data.declare(
        batches, number_of_examples=12, expected_batch_size=4, sampling="poisson"
    )
    for refused in (
        declared,
        batches,
        PoissonDataset(*data(), expected_batch_size=4),
    ):
        with pytest.raises(ValueError, match="needs batches of users"):
            model.fit(refused, verbose=0)
    with pytest.raises(ValueError, match="belong to arrays"):
        model.fit(batches, user_ids=IDS, examples_per_user=3, verbose=0)
    model = users()
    model.compile(optimizer(expected_batch_size=4), logits_loss())
    with pytest.raises(ValueError, match="needs batches of users"):
        model.train_on_batch(*data())
    with pytest.raises(ValueError, match="needs batches of users"):
        model.train_step(tf.nest.map_structure(tf.convert_to_tensor, data()))
    assert not model.ledger.segments


def test_a_model_of_rows_refuses_users():
    with pytest.raises(ValueError, match=r"DPModel\(model, unit='user'\)"):
        private().fit(*data(), batch_size=2, user_ids=IDS, examples_per_user=3)


@pytest.mark.parametrize(
    "options", [{"unit": "person"}, {"unit": "user", "sampling": "shuffle"}], ids=str
)
def test_units_that_nobody_draws_are_refused(options):
    with pytest.raises(ValueError, match="unit"):
        tfdp.DPModel(network(), **options)


@pytest.fixture
def pairs(monkeypatch):
    """A scheme of the user's own that draws users."""
    monkeypatch.setattr(scheme_module, "_KINDS", dict(scheme_module._KINDS))

    @dataclasses.dataclass(frozen=True)
    class Pairs(Poisson):
        """Every user has two rows."""

        kind: ClassVar[str] = "pairs_of_rows"
        sampling: ClassVar[str | None] = "pairs"
        unit: ClassVar[str] = "user"
        rows_per_example: ClassVar[int] = 2

    return Pairs


@pytest.mark.slow
def test_own_schemes_of_users_are_declared(pairs):
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(4)
    declared = tfdp.data.declare(
        batches, number_of_examples=6, expected_batch_size=2, sampling="pairs"
    )
    with pytest.raises(
        ValueError, match=r"unit='example', batches of users \(P.*declare"
    ):
        private().fit(declared, verbose=0)
    with pytest.raises(ValueError, match=r"unit='user'.*declare\(.*'pairs'"):
        private(wrap={"sampling": "pairs"}).fit(*data(), batch_size=2)
    with pytest.raises(ValueError, match=r"Leave `sampling` out.*declare\(.*'pairs'"):
        users(sampling="pairs")
    model = users()  # As they say.
    model.fit(declared, verbose=0)
    assert model.ledger.segments[0].scheme == pairs(6, 2)
    with pytest.raises(
        ValueError, match=r"sampling='shuffle'\. Leave `sampling` out\.$"
    ):
        users(sampling="shuffle")


def test_passes_and_microbatches_that_cut_users_are_refused():
    options = {"batch_size": 2, "user_ids": IDS, "examples_per_user": 3}
    with pytest.raises(ValueError, match=r"whole micro.*or users.*size=6`"):
        users(physical_batch_size=4).fit(*data(), **options)
    with pytest.raises(ValueError, match="Microbatches"):
        private(opt=optimizer(num_microbatches=1), wrap={"unit": "user"}).fit(
            *data(), **options
        )
    with pytest.raises(ValueError, match="bounds examples, not users"):
        PoissonDataset(
            *data(),
            expected_batch_size=2,
            user_ids=IDS,
            examples_per_user=3,
            max_batch_size=4,
        )


@pytest.mark.parametrize(
    "is_traced", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_the_ledger_of_a_loop_speaks_of_users(is_traced):
    """A row of a user with others can move the sum by two clip norms."""
    x, y = data(8)
    model, opt = network(), optimizer(2.0, expected_batch_size=4)
    opt.build(model.trainable_variables)

    def clip(**of_users):
        return tfdp.clipped_gradients(
            model, logits_loss(), x, y, l2_norm_clip=CLIP, **of_users
        )

    def step():
        opt.apply_clipped_sum(clip(examples_per_user=2), model.trainable_variables)

    step = tf.function(step, autograph=False) if is_traced else step
    step()
    step()
    (segment,) = opt.ledger.segments
    assert (segment.scheme, segment.count) == (UnknownUsers(), 2)
    wrapped = private(model)
    assert "Protected is one user" in wrapped.privacy_statement(1e-5)
    with pytest.raises(ValueError, match="sum of examples after sums of users"):
        opt.apply_clipped_sum(clip(), model.trainable_variables)
    another = optimizer(2.0, expected_batch_size=4)
    another.apply_clipped_sum(clip(), model.trainable_variables)
    assert "had users as units" in wrapped.privacy_statement(1e-5)
    with pytest.raises(ValueError, match="sum of users after sums of examples"):
        another.apply_clipped_sum(clip(examples_per_user=2), model.trainable_variables)
    restored = Ledger.from_json(opt.ledger.to_json())
    assert restored == opt.ledger
