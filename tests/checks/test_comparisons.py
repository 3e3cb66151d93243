"""Losses that compare the rows of a batch are refused, and no others."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdp
from tfdp.checks import comparisons
from tfdp.checks.following import check_objective
from tfdp.errors import UnsupportedLayerError, UnsupportedLossError
from tfdp.losses.objective import Objective

pytestmark = pytest.mark.keras_private

ROWS, D, POSITIONS = 6, 4, 5


class Towers(keras.Model):
    """Makes two vectors and a score of each row, and a matrix of its positions."""

    def __init__(self, loss):
        super().__init__()
        self.query, self.item = layers.Dense(D), layers.Dense(D)
        self.score, self.position = layers.Dense(1), layers.Dense(2)
        self.loss_of = loss

    def call(self, x):
        return {
            "query": self.query(x),
            "item": self.item(x),
            "score": self.score(x),
            "positions": self.position(ops.expand_dims(x, 1) + ops.eye(POSITIONS, 3)),
        }

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        return self.loss_of(y, y_pred)


def data():
    rng = np.random.default_rng(0)
    y = {
        "label": rng.integers(D, size=ROWS),
        "target": rng.normal(size=(ROWS, 1)).astype("float32"),
        "mask": (rng.uniform(size=(ROWS, POSITIONS)) < 0.7).astype("float32"),
    }
    return rng.normal(size=(ROWS, 3)).astype("float32"), y, None


def objective_of(loss):
    model = Towers(loss)
    model(data()[0])
    model.compile()
    return Objective.of_compute_loss(model)


def cross_entropy(labels, scores):
    losses = keras.losses.sparse_categorical_crossentropy(
        labels, scores, from_logits=True
    )
    return ops.mean(losses)


# ------------------------------------------------------------- what compares the rows


def two_towers(y, p):
    scores = ops.matmul(p["query"], ops.transpose(p["item"]))
    return cross_entropy(ops.arange(ops.shape(scores)[0]), scores)


def both_ways(y, p):
    scores = tf.einsum("id,jd->ij", p["query"], p["item"]) / 0.1
    labels = tf.range(tf.shape(scores)[0])
    return 0.5 * (
        cross_entropy(labels, scores) + cross_entropy(labels, tf.transpose(scores))
    )


def of_static_size(y, p):
    scores = ops.matmul(p["query"], ops.transpose(p["item"]))
    return ops.mean(ops.log_softmax(scores) * np.eye(scores.shape[0]))


def views_of_a_batch(y, p):
    z = ops.concatenate([p["query"], p["item"]], axis=0)
    z = ops.normalize(z, axis=-1)
    number = ops.shape(z)[0]
    scores = ops.matmul(z, ops.transpose(z)) / 0.1 - 1e9 * ops.eye(number)
    return cross_entropy((ops.arange(number) + number // 2) % number, scores)


def of_repeated_rows(y, p):
    number = ops.shape(p["query"])[0]
    first = tf.repeat(p["query"], number, axis=0)
    second = tf.tile(p["query"], [number, 1])
    return -ops.mean(ops.log(ops.sum(ops.square(first - second), axis=1) + 1.0))


def hard_triplets(y, p):
    squares = ops.sum(ops.square(p["query"]), axis=1, keepdims=True)
    away = squares + ops.transpose(squares)
    away -= 2.0 * ops.matmul(p["query"], ops.transpose(p["query"]))
    is_same = ops.equal(y["label"][:, None], y["label"][None, :])
    furthest = ops.max(ops.where(is_same, away, 0.0), axis=1)
    nearest = ops.min(ops.where(is_same, 1e9, away), axis=1)
    return ops.mean(ops.relu(furthest - nearest + 1.0))


def labels_of_pairs(y, p):
    labels = ops.cast(y["label"], "float32")
    return ops.mean(ops.relu(ops.abs(labels - labels[:, None]) - p["score"]))


def of_the_same_class(y, p):
    z = ops.normalize(p["query"], axis=-1)
    away = z[:, None, :] - z[None, :, :]
    is_same = ops.cast(y["label"][:, None] == y["label"][None, :], away.dtype)
    logits = -ops.sum(ops.square(away), axis=-1)
    return -ops.mean(is_same * ops.log_softmax(logits, axis=1))


def discrepancy(y, p):
    def kernel(a, b):
        return ops.exp(-ops.sum(ops.square(a[:, None] - b[None]), axis=-1))

    a, b = p["query"], p["item"]
    return ops.mean(kernel(a, a)) + ops.mean(kernel(b, b)) - 2 * ops.mean(kernel(a, b))


def covariance(z):
    z = z - ops.mean(z, axis=0, keepdims=True)
    return ops.matmul(ops.transpose(z), z)


def coral(y, p):
    return ops.sum(ops.square(covariance(p["query"]) - covariance(p["item"])))


def products(y, p):
    table = ops.matmul(ops.transpose(p["query"]), p["item"])
    table /= ops.cast(ops.shape(p["query"])[0], table.dtype)
    return ops.sum(ops.square(table - ops.eye(D)))


def correlation(y, p):
    a, b = (each - ops.mean(each) for each in (p["score"], y["target"]))
    return 1 - ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b))


def variance(y, p):
    return ops.mean(ops.relu(1.0 - ops.std(p["query"], axis=0)))


def risks(y, p):
    order = tf.argsort(y["target"][:, 0], direction="DESCENDING")
    score = tf.gather(p["score"][:, 0], order)
    return -tf.reduce_mean(score - tf.math.cumulative_logsumexp(score))


def pairs_of_scores(y, p):
    score, target = p["score"][:, 0], y["target"][:, 0]
    away = (score[:, None] - score[None]) * ops.sign(target[:, None] - target[None])
    return ops.mean(ops.softplus(-away))


def list_of_rows(y, p):
    target = tf.nn.softmax(y["target"], 0)
    return -ops.sum(target * tf.nn.log_softmax(p["score"], 0))


def hardest(y, p):
    errors = ops.square(p["score"] - y["target"])[:, 0]
    return ops.mean(ops.top_k(errors, ops.shape(errors)[0])[0] ** 2)


def shifted(y, p):
    return ops.mean(p["query"] * ops.roll(p["item"], 1, axis=0))


def reversed_rows(y, p):
    return ops.mean(p["query"] * p["item"][::-1])


def neighbours(y, p):
    return ops.mean(ops.square(p["query"][1:] - p["query"][:-1]))


def shuffled(y, p):
    return ops.mean(p["query"] * tf.random.shuffle(p["item"]))


def taken_anew(y, p):
    order = keras.random.shuffle(ops.arange(ops.shape(p["item"])[0]))
    return ops.mean(p["query"] * ops.take(p["item"], order, axis=0))


def in_a_function(y, p):
    return tf.function(two_towers, autograph=False)(y, p)


def in_a_loop(y, p):
    loss = tf.constant(0.0)
    return tf.while_loop(
        lambda n, _: n < 2, lambda n, s: (n + 1, s + two_towers(y, p)), (0, loss)
    )[1]


def in_a_branch(y, p):
    return tf.cond(tf.random.uniform([]) < 0.5, lambda: two_towers(y, p), lambda: 0.0)


def circle(y, p):
    return keras.losses.Circle()(y["label"], p["query"])


def advantages(y, p):
    target = y["target"]
    gain = (target - ops.mean(target)) / (ops.std(target) + 1e-6)
    return -ops.mean(p["score"] * gain)


COMPARING = [
    *(two_towers, both_ways, of_static_size, views_of_a_batch, of_repeated_rows),
    *(
        hard_triplets,
        of_the_same_class,
        discrepancy,
        coral,
        products,
        correlation,
        variance,
        risks,
    ),
    *(pairs_of_scores, list_of_rows, hardest, shifted, reversed_rows),
    labels_of_pairs,
    *(
        neighbours,
        shuffled,
        taken_anew,
        in_a_function,
        in_a_loop,
        in_a_branch,
        circle,
        advantages,
    ),
]


@pytest.mark.parametrize("loss", COMPARING)
def test_what_compares_rows_is_refused(loss):
    with pytest.raises(UnsupportedLossError, match=r"in-batch.*test_comparisons\.py:"):
        check_objective(objective_of(loss), data())


# ----------------------------------------------------------------- what adds them up


def squared(y, p):
    return ops.mean(ops.square(p["score"] - y["target"]))


def of_own_count(y, p):
    errors = ops.square(p["score"] - y["target"])
    return ops.sum(errors) / ops.cast(ops.shape(errors)[0], errors.dtype)


def times_count(y, p):
    return squared(y, p) * ops.cast(ops.shape(p["score"])[0], "float32") / 256.0


def with_constants(y, p):
    beta, mean = 0.5, ops.mean(ops.square(p["query"] - p["item"]))
    return 1.0 + ops.maximum(beta * mean, 0.0) + squared(y, p) / 3


def over_masks(y, p):
    errors = ops.mean(ops.square(p["positions"]), axis=-1) * y["mask"]
    of_row = ops.sum(errors, axis=1) / ops.maximum(ops.sum(y["mask"], axis=1), 1.0)
    return ops.mean(of_row)


def up_to_the_longest(y, p):
    mask = ops.cast(tf.sequence_mask(y["label"] + 1), "float32")
    return ops.mean(ops.sum(mask, axis=1) * squares(y, p))


def kept_rows(y, p):
    return ops.sum(tf.boolean_mask(squares(y, p), y["target"][:, 0] < 9.0))


def squares(y, p):
    return ops.square(p["score"] - y["target"])[:, 0]


def two_heads(y, p):
    both = ops.concatenate([p["query"], p["item"]], axis=0)
    labels = ops.concatenate([y["label"], y["label"]], axis=0)
    return cross_entropy(labels, both)


def repeated_labels(y, p):
    both = ops.concatenate([p["query"], p["item"]], axis=0)
    return cross_entropy(ops.tile(y["label"], [2]), both)


def taken_apart_again(y, p):
    number = ops.shape(p["query"])[0]
    both = ops.softmax(ops.concatenate([p["query"], p["item"]], axis=0))
    return ops.mean(ops.square(both[:number] - both[number:]))


def products_of_weights(y, p):
    weights = ops.exp(-ops.square(y["target"]))
    return tf.tensordot(weights[:, 0], squares(y, p), 1)


def less_the_entropy(y, p):
    entropy = ops.mean(ops.sum(ops.softmax(p["query"]) ** 2, axis=-1))
    return ops.mean(squares(y, p) - 0.1 * entropy)


def divergence(y, p):
    mean, log_variance = p["query"], p["item"]
    kl = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
    return ops.mean(squares(y, p) + 0.5 * ops.sum(kl, axis=1))


def between_positions(y, p):
    z = p["positions"]
    return ops.mean(ops.logsumexp(ops.einsum("ntd,nsd->nts", z, z), axis=-1))


def flat_positions(y, p):
    flat = ops.reshape(p["positions"], (-1, 2))
    return cross_entropy(ops.zeros(ops.shape(flat)[0], "int32"), flat)


def of_centred_positions(y, p):
    z = p["positions"]
    return ops.mean(ops.square(z - ops.mean(z, axis=1, keepdims=True)))


def own_candidates(y, p):
    scores = ops.einsum("nd,ntd->nt", p["query"][:, :2], p["positions"])
    return cross_entropy(ops.zeros_like(y["label"]), scores)


def of_a_catalogue(y, p):
    return cross_entropy(y["label"], p["query"] @ ops.transpose(ops.eye(D)))


def connectionist(y, p):
    return keras.losses.CTC()(ops.ones_like(y["target"], "int32"), p["positions"])


def step_by_step(y, p):
    def step(n, total):
        return n + 1, total + ops.mean(ops.square(p["positions"][:, n]))

    return tf.while_loop(lambda n, _: n < POSITIONS, step, (0, tf.constant(0.0)))[1]


def along_positions(y, p):
    z = ops.transpose(p["positions"], (1, 0, 2))
    total = tf.scan(lambda h, each: 0.5 * h + each, z, tf.zeros_like(z[0]))
    return ops.mean(ops.square(total))


def label_by_place(y, p):
    flat = ops.reshape(ops.log_softmax(p["query"]), (-1,))
    places = ops.arange(ops.shape(p["query"])[0], dtype="int32") * D
    return -ops.mean(ops.take(flat, places + ops.cast(y["label"], "int32")))


def label_by_pairs(y, p):
    places = ops.arange(ops.shape(p["query"])[0], dtype="int32")
    pairs = tf.stack([places, tf.cast(y["label"], tf.int32)], axis=-1)
    return -tf.reduce_mean(tf.gather_nd(tf.nn.log_softmax(p["query"]), pairs))


def label_along_axis(y, p):
    losses = ops.log_softmax(p["query"])
    return -ops.mean(ops.take_along_axis(losses, y["label"][:, None], axis=1))


def diagonal(y, p):
    scores = tf.matmul(p["query"], p["item"], transpose_b=True)
    return -tf.reduce_mean(tf.linalg.diag_part(scores))


def penalty(y, p):
    with tf.GradientTape() as tape:
        tape.watch(p["query"])
        score = tf.reduce_sum(tf.tanh(p["query"] @ tf.ones([D, 1])) ** 2, axis=1)
    slope = tf.sqrt(tf.reduce_sum(tape.gradient(score, p["query"]) ** 2, axis=1))
    return tf.reduce_mean((slope - 1.0) ** 2)


def without_nan(y, p):
    losses = ops.where(ops.isnan(squares(y, p)), 0.0, squares(y, p))
    return ops.where(ops.mean(losses) > 1e6, 0.0, ops.mean(losses))


def mapped(y, p):
    def of_row(row):
        a, b = row
        order = tf.argsort(a)
        return tf.reduce_sum(tf.gather(a, order) * b) + tf.reduce_max(
            a[:, None] - a[None] + tf.tensordot(a, b, 1)
        )

    return ops.mean(tf.vectorized_map(of_row, (p["query"], p["item"])))  # noqa: TID251


def inside_one_row(y, p):
    scores = ops.einsum("ntd,nsd->nts", p["positions"], p["positions"][:, ::-1])
    scores -= ops.mean(scores, axis=(1, 2), keepdims=True)
    labels = ops.zeros_like(scores[..., 0]) + ops.arange(POSITIONS, dtype=scores.dtype)
    return cross_entropy(labels, scores)


def focal(y, p):
    return keras.losses.CategoricalFocalCrossentropy(from_logits=True)(
        ops.one_hot(y["label"], D), p["query"]
    )


def cosine(y, p):
    return keras.losses.CosineSimilarity()(p["query"], p["item"])


def dice(y, p):
    return keras.losses.Dice()(y["mask"], ops.sigmoid(p["positions"][..., 0]))


def in_batch_of_none(y, p):
    raise_if_many(p["query"])
    return squared(y, p)


def raise_if_many(z):
    if z.shape[0] != 1:
        raise ValueError("One row is what this loss is for.")


HONEST = [
    *(
        squared,
        of_own_count,
        times_count,
        with_constants,
        over_masks,
        up_to_the_longest,
        kept_rows,
    ),
    *(
        two_heads,
        repeated_labels,
        taken_apart_again,
        products_of_weights,
        less_the_entropy,
        divergence,
    ),
    *(between_positions, flat_positions, of_centred_positions, own_candidates),
    *(
        of_a_catalogue,
        pytest.param(connectionist, marks=pytest.mark.slow),
        step_by_step,
        along_positions,
        label_by_place,
    ),
    *(label_by_pairs, label_along_axis, diagonal, penalty, without_nan),
    *(mapped, inside_one_row, focal, cosine, in_batch_of_none),
]


@pytest.fixture
def warnings(monkeypatch):
    found = []
    comparisons.warn_of_change.cache_clear()
    monkeypatch.setattr(
        comparisons.logging, "warning", lambda text, *args: found.append(text % args)
    )
    return found


@pytest.mark.parametrize("loss", HONEST)
def test_what_adds_up_rows_is_as_before(loss, warnings):
    check_objective(objective_of(loss), data())
    assert not warnings


# ------------------------------------------------------- what is another in one row


def root(y, p):
    return ops.sqrt(squared(y, p))


def log_of_mean(y, p):
    return ops.log(squared(y, p) + 1.0)


def roots_of_columns(y, p):
    return ops.mean(ops.sqrt(ops.mean(ops.square(p["query"] - p["item"]), axis=0)))


def free_bits(y, p):
    """What each unit is off, but for what is free."""
    return ops.sum(ops.maximum(ops.mean(ops.square(p["query"]), axis=0), 0.1))


def all_pixels(y, p):
    z, target = ops.sigmoid(p["positions"][..., 0]), y["mask"]
    return 1 - ops.sum(z * target) ** 2 / ops.sum(z + target)


def by_weights_of_rows(y, p):
    weights = ops.exp(-ops.square(y["target"][:, 0]))
    return ops.sum(weights * squares(y, p)) / ops.sum(weights)


def share_of_each_class(y, p):
    target = ops.cast(y["label"] > 1, "float32")
    share = ops.mean(target)
    weights = ops.where(target > 0.5, 1 - share, share)
    return ops.mean(weights * squares(y, p))


def of_counted_classes(y, p):
    target = ops.one_hot(y["label"], D)
    score = ops.softmax(p["query"])
    right = 2 * ops.sum(target * score, axis=0)
    return 1 - ops.mean(right / (ops.sum(target + score, axis=0) + 1e-6))


def flat_pixels_sorted(y, p):
    return ops.mean(ops.sort(ops.reshape(p["positions"], (-1,))) ** 2)


def flat_target(y, p):
    # A batch makes (N, N) of them; in a row they are what is meant.
    return ops.mean(ops.square(ops.cast(y["label"], "float32") - p["score"]))


def over_all_masks(y, p):
    errors = ops.mean(ops.square(p["positions"]), axis=-1) * y["mask"]
    return ops.sum(errors) / ops.maximum(ops.sum(y["mask"]), 1.0)


def overlap_of_the_batch(y, p):
    z, target = ops.sigmoid(p["positions"][..., 0]), y["mask"]
    return 1 - 2 * ops.sum(z * target) / (ops.sum(z) + ops.sum(target))


def worst_of_the_batch(y, p):
    return ops.max(squares(y, p))


def marginal(y, p):
    mean = ops.mean(ops.softmax(p["query"]), axis=0)
    return ops.sum(mean * ops.log(mean))


CHANGED = [
    *(root, log_of_mean, roots_of_columns, free_bits, all_pixels, by_weights_of_rows),
    *(share_of_each_class, of_counted_classes, flat_pixels_sorted, flat_target),
    *(marginal, over_all_masks, overlap_of_the_batch, dice, worst_of_the_batch),
]


@pytest.mark.parametrize("loss", CHANGED)
def test_what_is_another_loss_in_one_row_is_said_once(loss, warnings):
    objective = objective_of(loss)
    for _ in range(2):
        check_objective(objective, data())
    [said] = warnings
    assert "test_comparisons.py:" in said
    assert "each example alone" in said


# ------------------------------------------------------------------ where else it is


def summed_pairs(y, p):
    return ops.mean(ops.logsumexp(ops.matmul(p, ops.transpose(y)), axis=-1))


class OfPairs(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return summed_pairs(y_true, y_pred)


class CalledWithPairs(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return summed_pairs(y_true, y_pred)


def private(loss, **options):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(D)])
    model = tfdp.DPModel(model, **options)
    optimizer = tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)
    model.compile(optimizer, loss=loss)
    return model


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "apart", "vectorized"])
@pytest.mark.parametrize(
    "loss",
    [summed_pairs, OfPairs(), CalledWithPairs()],
    ids=["function", "call", "__call__"],
)
def test_a_loss_of_compile_that_compares_rows_is_refused(loss, engine):
    model = private(loss, engine=engine)
    with pytest.raises(UnsupportedLossError, match="in-batch"):
        model.fit(np.ones((8, 3)), np.ones((8, D)), batch_size=4, verbose=0)
    assert not model.ledger.segments


def test_a_loss_of_each_row_that_compares_it_is_refused_with_what_to_do():
    model = private(lambda y, p: ops.logsumexp(p @ ops.transpose(y), axis=-1))
    with pytest.raises(UnsupportedLossError, match="its own negatives"):
        model.fit(np.ones((8, 3)), np.ones((8, D)), batch_size=4, verbose=0)


class AddsPairs(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.exp(-ops.square(ops.matmul(x, ops.transpose(x))))))
        return x


def test_a_loss_that_a_layer_adds_and_that_compares_rows_says_what_to_do():
    model = keras.Sequential([
        keras.Input((3,)),
        layers.Dense(D),
        AddsPairs(name="end"),
    ])
    rows = np.ones((8, 3)), np.ones((8, D)), None
    with pytest.raises(UnsupportedLayerError, match=r"`end`.*its own negatives"):
        check_objective(Objective.of(model, "mse"), rows)


def in_halves(y, p):
    first, second = tf.split(p["query"], 2)
    return ops.mean(ops.square(first - second))


def in_triples(y, p):
    triples = ops.reshape(p["query"], (-1, 3, D))
    return ops.mean(ops.square(triples[:, 0] - triples[:, 1]))


def of_a_known_size(y, p):
    scores = ops.matmul(p["query"], ops.transpose(p["item"]))
    return cross_entropy(ops.arange(ROWS), scores[:ROWS])


@pytest.mark.parametrize("loss", [in_halves, in_triples, of_a_known_size])
def test_a_loss_that_one_row_does_not_have_is_refused_with_what_to_do(loss):
    with pytest.raises(UnsupportedLossError, match=r"for one row.*its own negatives"):
        check_objective(objective_of(loss), data())


class Retrieval(keras.Model):
    """What the refusal says: a positive item and the negatives of each row."""

    def __init__(self):
        super().__init__()
        self.query, self.item = layers.Dense(D), layers.Dense(D)

    def call(self, x):
        return {"query": self.query(x["query"]), "items": self.item(x["items"])}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        scores = ops.einsum("nd,nkd->nk", y_pred["query"], y_pred["items"])
        return cross_entropy(ops.zeros(ops.shape(scores)[0], "int32"), scores)


@pytest.mark.slow
def test_what_the_refusal_says_trains():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(256, 3)).astype("float32")
    items = rng.normal(size=(256, 4, 3)).astype("float32")
    items[:, 0] = query
    keras.utils.set_random_seed(0)
    model = tfdp.DPModel(Retrieval())
    optimizer = tfdp.optimizers.DPAdam(0.05, l2_norm_clip=1.0, noise_multiplier=0.5)
    model.compile(optimizer)
    x = {"query": query, "items": items}
    history = model.fit(x, batch_size=64, epochs=10, verbose=0).history["loss"]
    assert history[-1] < 0.6 * history[0]
