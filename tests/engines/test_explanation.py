"""What `explain` says of each layer: its rule, the way to its norm, the memory."""

import math
import re

import numpy as np
import pytest
from keras import layers, ops

import tfdp
from tests.problems import PROBLEMS, sequential
from tfdp.engines.bookkeeping import BookkeepingEngine
from tfdp.engines.explanation import Explanation, table


def test_rows_of_a_table_are_aligned():
    rows = [
        Explanation("encoder/dense", "dense", "Gram", 1234567),
        Explanation("head", "my_rule", "instantiated", None),
    ]
    assert table(rows).splitlines() == [
        "layer          rule     norm          bytes per example",
        "encoder/dense  dense    Gram          1,234,567        ",
        "head           my_rule  instantiated  unknown          ",
    ]


def explained(model, **options):
    """The rows of the table as lists of words."""
    lines = tfdp.DPModel(model, **options).explain().splitlines()
    return [line.split() for line in lines[1:]]


class Cell(layers.Layer):
    """A recurrent cell that is a layer with a bias."""

    state_size = 2

    def build(self, shape):
        self.inner = layers.Dense(2, name="inner")
        self.inner.build((None, shape[-1] + 2))

    def call(self, x, states):
        h = self.inner(ops.concatenate([x, states[0]], axis=-1))
        return h, [h]


def test_many_steps_of_a_loop_that_are_alike_are_one_line():
    private = tfdp.DPModel(sequential((5, 3), layers.RNN(Cell(), unroll=True)))
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    private.fit(np.ones((8, 5, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
    lines = private.explain().splitlines()[1:]
    # Of the kernel and of the bias.
    assert len(lines) == 2
    assert all(re.match(r"rnn/cell/inner, 5 times  ", line) for line in lines), lines


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "ghost"])
def test_a_functional_model(engine):
    rows = explained(PROBLEMS["dict_losses"].build(), engine=engine)
    assert rows == [
        ["dense", "dense", "Gram", "4"],
        ["dense", "dense", "instantiated", "16"],
        ["value", "dense", "Gram", "4"],
        ["value", "dense", "instantiated", "4"],
        ["label", "dense", "Gram", "4"],
        ["label", "dense", "instantiated", "12"],
    ]


def test_a_sequential_model():
    model = sequential(
        (6, 6, 2),
        layers.Conv2D(3, 3, use_bias=False),
        layers.LayerNormalization(),
        layers.Flatten(),
        layers.Dense(2),
    )
    assert explained(model) == [
        ["conv2d", "conv", "instantiated", str(4 * 3 * 3 * 2 * 3)],
        ["layer_normalization", "layer_normalization", "instantiated", "24"],
        ["dense", "dense", "Gram", "4"],
        ["dense", "dense", "instantiated", "8"],
    ]


@pytest.mark.parametrize(
    ("norms", "way", "size"),
    [("gram", "Gram", 2 * 5 * 5), ("instantiate", "instantiated", 4 * 3)],
)
def test_the_way_to_the_norm_is_the_engine_s(norms, way, size):
    model = sequential((5, 4), layers.Dense(3, use_bias=False))
    rows = explained(model, engine=BookkeepingEngine(norms=norms))
    assert rows == [["dense", "dense", way, str(4 * size)]]


def test_what_depends_on_the_data_is_not_known():
    rows = explained(PROBLEMS["embedding_mean"].build())
    assert ["embedding", "embedding", "instantiated", "unknown"] in rows


def test_frozen_layers_are_left_out():
    rows = explained(PROBLEMS["frozen_kernel"].build())
    assert [row[2] for row in rows] == ["instantiated", "instantiated"]
    model = sequential((3,), layers.Dense(4), layers.Dense(2, name="head"))
    model.layers[0].trainable = False
    assert {row[0] for row in explained(model)} == {"head"}


def test_each_call_of_a_shared_layer_has_a_row():
    rows = explained(PROBLEMS["called_twice"].build())
    assert sum(row[0] == "shared" and row[2] == "Gram" for row in rows) == 2


@pytest.mark.slow
def test_a_subclassed_model_is_known_after_its_first_data():
    private = tfdp.DPModel(PROBLEMS["subclassed"].make_model())
    with pytest.raises(ValueError, match=r"not known yet.*`private.fit\(...\)`"):
        private.explain()
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0), "mse"
    )
    batch = PROBLEMS["subclassed"].batch(4)
    private.fit(batch.x, batch.y, batch_size=2, verbose=0)
    lines = private.explain().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *["dense"] * 2,
        *["dense_1"] * 2,
    ]


@pytest.mark.slow
def test_nested_inputs_are_known_after_their_first_data():
    problem = PROBLEMS["nested_inputs"]
    private = tfdp.DPModel(problem.build())
    before = private.explain()
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        problem.loss(),
    )
    batch = problem.batch(4)
    private.fit(batch.x, batch.y, batch_size=2, verbose=0)
    assert private.explain() == before


@pytest.mark.slow
def test_a_weight_that_is_used_elsewhere_than_in_its_layer():
    problem = PROBLEMS["tied_embedding"]
    private = tfdp.DPModel(problem.build())
    private.compile(
        tfdp.optimizers.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0),
        problem.loss(),
    )
    batch = problem.batch(4)
    private.fit(batch.x, batch.y, batch_size=2, verbose=0)
    rows = [line.split() for line in private.explain().splitlines()[1:]]
    # Newer versions of Keras have another operation than older ones.
    (operation,) = [row[1] for row in rows if row[0].endswith("embeddings")]
    assert operation in {"MatMul", "BatchMatMulV2"}
    assert {row[1] for row in rows if row[0] == "dense"} == {"dense"}


def test_weights_that_are_used_together_elsewhere_have_a_row_each():
    class OfTwo(layers.Layer):
        def build(self, shape):
            self.inner = layers.Dense(3)
            self.inner.build(shape)
            self.left, self.right = (
                self.add_weight(shape=(3, 2)),
                self.add_weight((2, 3)),
            )

        def call(self, x):
            return ops.matmul(self.inner(x), ops.matmul(self.left, self.right))

    model = sequential((3,), OfTwo())
    rows = explained(model)
    left, right = (each.path for each in (model.layers[0].left, model.layers[0].right))
    sizes = {row[0]: int(row[3]) for row in rows if row[0] != "of_two/dense"}
    assert sizes == {left: 24, right: 24}


def test_the_vectorized_engine_holds_whole_gradients():
    model = PROBLEMS["nested"].build()
    rows = explained(model, engine="vectorized")
    assert all(row[1:3] == ["vectorized", "instantiated"] for row in rows)
    sizes = [int(row[3].replace(",", "")) for row in rows]
    assert sum(sizes) == 4 * sum(math.prod(v.shape) for v in model.trainable_variables)


def test_explaining_changes_nothing():
    model = PROBLEMS["dropout"].build()
    before = [np.array(variable) for variable in model.variables]
    explained(model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_half_precision():
    """Gradients come back in float32, to rules that multiply them with inputs."""
    half, single = (
        [row[1:] for row in explained(PROBLEMS["einsum_mixed_kernel"].build(dtype))]
        for dtype in ("mixed_bfloat16", "float32")
    )
    assert half == single
