"""Clipped gradients for training loops of one's own."""

import dataclasses
from typing import NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfdp import _keras, _seeds, _tree, _validate, engines
from tfdp._types import Loss, Nest, Tensor
from tfdp.ascent.losses import BAM, SAT, Ascent, check_plain
from tfdp.checks.engine import choose
from tfdp.checks.following import check_objective
from tfdp.clipping import ClippedSum, ClippedSumOfUsers, clip_as_tensor
from tfdp.engines.traced import TracedPass
from tfdp.losses.batch import Batch, check_equal_rows, number_of_rows
from tfdp.losses.objective import Objective
from tfdp.runs.histories import note_reads, recognise_copies
from tfdp.runs.recorder import revoke_all
from tfdp.training.attributes import CHECKED, attributes_of
from tfdp.training.batch_clipper import BatchClipper, keeps_static_rows
from tfdp.training.checked_model import rows_to_check
from tfdp.training.units import check_whole_units, filled_up


@_keras.without_autograph
def clipped_gradients(
    model: keras.Model,
    loss: Loss,
    x: Nest,
    y: Nest,
    sample_weight: Nest = None,
    *,
    l2_norm_clip: Tensor,
    num_microbatches: int | None = None,
    engine: str | engines.Engine = "auto",
    physical_batch_size: int | None = None,
    is_padding: Tensor | None = None,
    examples_per_user: int | None = None,
) -> ClippedSum:
    """Sum the clipped gradients of the examples of a batch.

    Works eagerly and inside `tf.function`, also with `jit_compile=True`; the pass through
    the model is the graph that was proven in all of them. The sum is neither divided nor
    noised: `optimizer.apply_clipped_sum` does both.

    Guarantees:
        See `tfdp.clipping.ClippedSum`. A unit whose gradient is not finite
        contributes nothing; an empty batch gives zeros.

    Args:
        model: A Keras model, called in training mode.
        loss: A Keras loss (name, object, list or dict, as in `compile`), a
            `tfdp.losses.BAM` of one, or a function ``(y_true, y_pred) -> (N,)``; None
            if layers add all of the loss.
        x: Inputs with leading axis N, nested as the model takes them.
        y: Targets likewise.
        sample_weight: None, or weights of the examples' losses.
        l2_norm_clip: Radius of the clip ball, a positive number or the optimizer's
            variable.
        num_microbatches: None to clip each example's gradient; m to clip the mean
            gradients of m groups of consecutive examples, which doubles the
            sensitivity. Sound for batches of one fixed size only: the number of
            examples in a group comes from the batch.
        engine: See `tfdp.DPModel`.
        physical_batch_size: None to run all rows at once, or the most to run at a
            time, in the memory of so many; whole microbatches, or users.
        is_padding: None, or bools of shape ``(N,)`` that mark rows which are nobody's:
            those that come with batches of a `tfdp.data.PoissonDataset` which have a
            bound or are of users.
        examples_per_user: None to clip each example's gradient; k to clip the mean
            gradient of each user, whose rows are k consecutive ones, padding too: that
            of the `PoissonDataset` which drew the batch. The optimizer's ledger is then
            that of users.

    Returns:
        The clipped sums in the order of ``model.trainable_variables``, with the
        norms before clipping and the l2 sensitivity.

    Raises:
        ValueError: If `l2_norm_clip` is not positive and finite, the loss is a
            `tfdp.losses.SAT`, or a `BAM` whose radius is a schedule, `physical_batch_size` holds no
            whole microbatches or users, the batch is none of whole users, padding or
            users meet microbatches, or the model has no trainable variable or has
            layers that break per-example privacy.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> clipped_sum = tfdp.clipped_gradients(
        ...     model,
        ...     "mse",
        ...     np.ones((3, 2), "float32"),
        ...     np.ones((3, 1), "float32"),
        ...     l2_norm_clip=1.0,
        ... )
        >>> [gradient.shape.as_list() for gradient in clipped_sum.gradients]
        [[2, 1], [1]]
    """
    engines.get(engine)
    data = _tree.map_tensors(tf.convert_to_tensor, (x, y, sample_weight))
    if is_padding is not None:
        is_padding = tf.ensure_shape(tf.convert_to_tensor(is_padding, tf.bool), [None])
    check_equal_rows(Batch(*data)._replace(is_padding=is_padding))
    if not model.built:
        model(data[0])
    _seeds.use_key(model, is_known=False)
    loss, ascent, radius = _uphill(loss)
    check_plain(loss)
    objective = dataclasses.replace(Objective.of(model, loss), ascent=ascent)
    clip = clip_as_tensor(l2_norm_clip, objective.variables)
    rows = number_of_rows(data)
    examples_per_unit: int | Tensor = 1
    if num_microbatches is not None:
        _check_no_padding(is_padding, examples_per_user)
        groups = _validate.positive_int("num_microbatches", num_microbatches)
        examples_per_unit = (rows + groups - 1) // groups
        # A batch without rows has a microbatch without rows, not of none.
        maximum = max if isinstance(rows, int) else tf.maximum
        examples_per_unit = maximum(examples_per_unit, 1)
    rows_per_user = 1
    if examples_per_user is not None:
        rows_per_user = _validate.positive_int("examples_per_user", examples_per_user)
        _check_whole_users(rows, rows_per_user)
    rows_per_unit = examples_per_unit * rows_per_user
    if physical_batch_size is not None:
        physical_batch_size = _whole_units(physical_batch_size, rows_per_unit)
        rows = physical_batch_size
    elif isinstance(rows, int):
        rows = filled_up(max(rows, 1), rows_per_unit)
    static_rows = rows if isinstance(rows, int) else None
    checked = _checked_once(
        engine, objective, loss, data, rows=static_rows, radius=radius
    )
    clipper = BatchClipper(
        model,
        checked.engine,
        examples_per_unit=examples_per_unit,
        rows_per_example=rows_per_user,
        physical_batch_size=physical_batch_size,
        passes=checked.passes,
    )
    batch = Batch(*data)._replace(is_padding=is_padding)
    clipped_sum = clipper.clip(batch, clip, checked.objective)
    return clipped_sum if examples_per_user is None else ClippedSumOfUsers(*clipped_sum)


def _uphill(loss: Loss) -> tuple[Loss, Ascent | None, float | None]:
    """Return the plain loss, the step uphill that was asked for, and its length."""
    if isinstance(loss, SAT):
        raise ValueError(
            "`SAT` goes along the gradient that was released last, which only a "
            f"`tfdp.DPModel` knows. Received: loss={loss!r}. Use "
            "`tfdp.DPModel(model).compile(optimizer, loss)`, or the plain loss."
        )
    if isinstance(loss, BAM):
        return loss.loss, loss.ascent_at(None), loss.radius
    return loss, None, None


def _check_no_padding(is_padding: Tensor | None, examples_per_user: int | None) -> None:
    """Refuse microbatches of examples that are not always as many."""
    if is_padding is not None or examples_per_user is not None:
        raise ValueError(
            "Microbatches of several examples need batches of fixed size, without "
            "padding: one example more would shift all groups behind it, and no "
            "clipping bounds that. Received: `num_microbatches` beside "
            f"{'`is_padding`' if examples_per_user is None else '`examples_per_user`'}. "
            "Use `num_microbatches=None`."
        )


def _check_whole_users(rows: int | Tensor, rows_per_user: int) -> None:
    """Refuse batches whose rows are not those of whole users."""
    if not isinstance(rows, int):
        tf.debugging.assert_equal(
            rows % rows_per_user, 0, "The batch is none of whole users."
        )
    elif rows % rows_per_user:
        raise ValueError(
            "A batch of users must have `examples_per_user` rows for each of them. "
            f"Received: examples_per_user={rows_per_user}, {rows} rows. Use the "
            "`examples_per_user` of the `tfdp.data.PoissonDataset` that drew the batch."
        )


def _whole_units(physical_batch_size: int, rows_per_unit: int | Tensor) -> int:
    """Return how many rows to run at a time, of whole units."""
    rows = _validate.positive_int("physical_batch_size", physical_batch_size)
    if not isinstance(rows_per_unit, int):
        raise ValueError(
            "`physical_batch_size` must hold whole microbatches, whose size is not "
            f"known here. Received: physical_batch_size={rows}, a batch of unknown "
            "size. Give `x` a static number of rows, or leave `num_microbatches` out."
        )
    check_whole_units(rows, rows_per_unit)
    return rows


# Checks that are remembered for each model.
_MOST_KNOWN = 128


class _Checked(NamedTuple):
    """What was checked.

    Attributes:
        engine: To use for it.
        objective: What is differentiated; of an equal one the first that came.
        passes: Those that were proven.
        kept: What the check was for: another object could have the same `id` later.
    """

    engine: engines.Engine
    objective: Objective
    passes: list[TracedPass]
    kept: Nest


def _checked_once(
    engine: str | engines.Engine,
    objective: Objective,
    loss: Loss,
    data: Nest,
    *,
    rows: int | None,
    radius: float | None,
) -> _Checked:
    """Refuse layers and losses that mix examples, and choose the engine.

    Args:
        engine: As in `tfdp.DPModel`.
        objective: What will be differentiated.
        loss: The loss in it.
        data: ``(x, y, sample_weight)``; in a graph, rows like it are made up.
        rows: In a pass, if that is static.
        radius: Of the ascent, if there is one.

    Returns:
        The engine to use, and what it was proven for.
    """
    model, ascent = objective.model, objective.ascent
    static_rows = rows if keeps_static_rows(ascent) else None
    key = (
        engine if isinstance(engine, str) else id(engine),
        None if ascent is None else (ascent.is_exact, ascent.mix, radius),
        _names_of_leaves(loss),
        tuple(map(id, objective.variables)),
        attributes_of(model, loss),
        # Shapes of unknown rank are all alike.
        tuple(
            (
                path,
                leaf.dtype,
                tuple(leaf.shape[1:].as_list()) if leaf.shape.rank else (),
            )
            for path, leaf in keras.tree.flatten_with_path(data)
            if leaf is not None
        ),
        static_rows,
    )
    # The model holds it, as it holds the model: a weak dictionary would never let go. Not
    # by an attribute, which Keras would track.
    known: dict[object, _Checked] = vars(model).setdefault(CHECKED, {})
    if key in known:
        return known[key]
    # What is trained comes from all that is read, also where only a part is.
    with tf.init_scope():
        if recognise_copies(model.weights):
            revoke_all()
    note_reads(model)
    passes: list[TracedPass] = []
    if all(t.shape[1:].is_fully_defined() for t in _tree.tensors(data)):
        with _keras.outside_of_graphs():
            rows_to_look_at = rows_to_check(data)
            chosen = choose(
                engine, objective, rows_to_look_at, static_rows, passes=passes
            )
    else:
        if engine == "auto":
            logging.warning(
                "tfdp takes whole gradients of each example of model `%s`: without "
                "the shapes of its inputs no other engine can be checked.",
                model.name,
            )
            engine = "vectorized"
        check_objective(objective, data)
        chosen = engines.get(engine)
    if len(known) >= _MOST_KNOWN:
        del known[next(iter(known))]
    known[key] = _Checked(chosen, objective, passes, (engine, loss))
    return known[key]


def _names_of_leaves(loss: Loss) -> str:
    """Tell a nest of losses from all others: by their names, or which objects."""
    names = keras.tree.map_structure(
        lambda leaf: leaf if isinstance(leaf, str) else id(leaf), loss
    )
    return repr(names)
