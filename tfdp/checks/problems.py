"""What to say of what lets the rows of a model, or of a loss, meet."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import keras

from tfdp import _keras
from tfdp.checks.alone import LEAVES_TO_THE_NEXT, NO_GRADIENT
from tfdp.checks.calls import Calls
from tfdp.checks.captures import READS_METRIC
from tfdp.checks.comparisons import COMPARISONS, MEETING, OWN_COMPARISONS
from tfdp.checks.effects import MEMORY
from tfdp.checks.found import LOSS, Found
from tfdp.checks.graph import LOOPS
from tfdp.checks.node import BY_PLACE
from tfdp.errors import UnsupportedLayerError


class _Flaw(NamedTuple):
    reason: str
    fix: str


_BATCH_STATISTICS = _Flaw(
    "its batch statistics mix the examples, and its moving statistics keep data "
    "without noise",
    "`tfdp.fix_model(model)` replaces it by GroupNormalization, or freeze it: "
    "`layer.trainable = False`.",
)
_SPECTRAL = _Flaw(
    "it overwrites the kernel in every forward pass, also between the passes of one "
    "private step",
    "Use the layer that it wraps, with "
    "`kernel_constraint=keras.constraints.MaxNorm(...)`.",
)
_MIXING = _Flaw(
    "in it, rows of a batch meet: {}",
    "Compute every row from itself alone: reduce over `axis=-1`, never over axis 0.",
)
_LOSS_OF_ROWS = (
    "Or let the model compute the loss, which is then asked for each example alone: "
    "`class MyModel(keras.Model): def compute_loss(self, x=None, y=None, y_pred=None, "
    "sample_weight=None, **_): return keras.losses.CTC()(y, y_pred)`, with "
    "`MyModel(inputs, outputs)` for `keras.Model(inputs, outputs)`."
)
_LOOP = _MIXING._replace(
    fix=f"{_MIXING.fix} Where each row is taken by itself, as by `keras.ops.map(f, x)`, "
    "write `keras.ops.vectorized_map(f, x)`."
)
_LOOP_OF_MAP = _MIXING._replace(
    fix="TensorFlow's map takes a loop for what it cannot do for all rows at once. "
    "Without a map, `keras.ops.einsum('nij,njk->nik', a, b)` multiplies each row by a "
    "matrix of its own; so does, for a convolution by a kernel of its own, "
    "`keras.ops.einsum('nhwp,npk->nhwk', keras.ops.image.extract_patches(x, 3, "
    "padding='same'), kernels)`."
)
_MIXTURE = _MIXING._replace(
    fix="What it makes of two images has a gradient that both have a part in. Leave it "
    "out: `tfdp.DPModel(model, augmentation=keras.layers.RandomFlip('horizontal'))` makes "
    "views of each image.",
)
_OF_IMAGES = _MIXING._replace(
    fix="As a layer of the model, `keras.Sequential([layer, model])`, it takes each image "
    "by itself, if `engine='auto'`.",
)
# By the names that TensorFlow gives to what it makes of others.
_OTHERWISE = {
    "bincount": "`tf.math.bincount(x, minlength=10, maxlength=10, axis=-1)` counts up to a "
    "length that no row decides.",
    "Repeat": "`keras.ops.take(x, numpy.repeat(numpy.arange(3), [1, 2, 1]), axis=1)` repeats "
    "entries as often as numbers say that all rows share.",
}
_LOSS_OF_LAYER = (
    "A mean over the rows is for the end: `self.add_loss(ops.mean(losses))`, where "
    "`losses` has one value for each row."
)
_LOSS_OF_LABELS = (
    "`keras.ops.ctc_loss(labels, logits, lengths_of_labels, lengths_of_logits)` has one, "
    "without a loop."
)
_UNKNOWN_STEPS = _Flaw(
    "where the number of time steps is unknown, Keras takes that of the rows for it",
    "Give it rows of one length: `keras.Input((steps, ...))`, and batches of that "
    "shape, `tf.ensure_shape(x, (None, steps, ...))`.",
)
_STATEFUL = _Flaw(
    "`stateful=True` hands the state in which a row ends to the row in its place in the "
    "next batch, and keeps it without noise",
    "Give it whole sequences as rows, and let each begin anew: `layer.stateful = False`.",
)
_MEMORY = _Flaw(
    "its state {} changes with the data that pass through, and keeps them without "
    "noise",
    "Assign no variable from data in `call`; compute it before training from public "
    "data, as `keras.layers.Normalization.adapt` does.",
)
_OUTSIDE = _Flaw(
    "what it keeps from one row to the next is not known: {}",
    "Use TensorFlow's operations, or, for a function that keeps nothing, "
    "`tf.numpy_function(..., stateful=False)`.",
)
_KNOWN_DRAWS = _Flaw(
    "without one row, others would have other draws than those that everybody knows: {}",
    "Draw with `self.seed_generator = keras.random.SeedGenerator()` and "
    "`keras.random.normal(shape, seed=self.seed_generator)`, to which tfdp adds a secret.",
)
_UNPROVEN = _Flaw(
    "nobody knows whether rows of a batch meet in it: {}",
    "`engine='auto'` runs every row by itself.",
)
_COUNTING = _Flaw(
    "in it, {}",
    "`engine='auto'` runs every row by itself, where that number is 1. This is right "
    "where a row only looks for entries of its own; what is divided by it, say, is as in "
    "a batch of one row. Where another number is meant, write it: `x / 32`. Where numbers "
    "in the data pick a row's own entries, give that axis a fixed length, "
    "`keras.Input((20, 3))`; and clip them, if they pick among those of all rows: "
    "`keras.ops.clip(numbers, 0, 19)`.",
)


# In place of a layer's class.
_VARIABLE = "variable"


@dataclasses.dataclass(frozen=True)
class Problem:
    """A layer that breaks per-example privacy.

    Attributes:
        path: Names of the layers that lead to it from the model, joined by ``/``;
            the name of the model if it is the model itself.
        layer_class: Name of its class.
        reason: What it does.
        fix: What to do instead.
        is_certain: False where the matter is only that nothing is proven: such a
            model trains with the engine that runs every row by itself.
    """

    path: str
    layer_class: str
    reason: str
    fix: str
    is_certain: bool = True

    @property
    def is_of_gradients(self) -> bool:
        """Whether the matter is what the gradients of a variable are made of."""
        return self.layer_class == _VARIABLE

    @property
    def counts_rows(self) -> bool:
        """Whether all that is the matter is that it asks how many rows there are."""
        return self.fix == _COUNTING.fix

    def __str__(self) -> str:
        """Return all of it in one line."""
        reason = self.reason.removesuffix(".")
        return f"`{self.path}` ({self.layer_class}): {reason}. {self.fix}"


def layer_problems(
    model: keras.Model, calls: Calls, found: list[Found]
) -> list[Problem]:
    """Say of each layer what is the matter with it."""
    by_layer: dict[int, list[Found]] = {}
    of_variables = []
    for each in found:
        if not isinstance(each.layer, str):
            by_layer.setdefault(id(each.layer or model), []).append(each)
        elif each.layer != LOSS:
            reason = (
                "what its gradients are made of is no row's: "
                f"{each.operation} {each.cause.why}"
            )
            of_variables.append(
                Problem(each.layer, _VARIABLE, reason, _UNPROVEN.fix, is_certain=False)
            )
    of_layers = [
        Problem(path, type(layer).__name__, *flaw, is_certain)
        for path, layer in calls.layers
        for flaw, is_certain in _flaws(layer, calls, by_layer.get(id(layer), []))
    ]
    return of_layers + of_variables


def _flaws(
    layer: keras.layers.Layer, calls: Calls, found: list[Found]
) -> Iterator[tuple[_Flaw, bool]]:
    """Say what is the matter with one layer, and whether it is for certain."""
    # These are named before anything is found, to tell of the fix that they have.
    if id(layer) in calls.training:
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            yield _BATCH_STATISTICS, True
            return
        if isinstance(layer, keras.layers.SpectralNormalization):
            yield _SPECTRAL, True
    names = dict.fromkeys(each.cause.variable for each in found if each.cause.variable)
    others = [each for each in found if not each.cause.variable]
    if others:
        # What is certain first, then what changes values. On the way back rows are
        # counted only because of what is on the way forward.
        worst = max(
            others,
            key=lambda each: (
                each.cause.is_certain,
                each.counts_rows and not each.is_of_gradient,
                each.cause.why == BY_PLACE,
            ),
        )
        # Keras measures decibels against the loudest of the batch, and bends and equalizes
        # images all alike. What a user means by them is what a row by itself gets.
        is_of_rows = type(layer) is keras.layers.MelSpectrogram
        is_of_rows = is_of_rows or _keras.changes_images(layer)
        is_certain = worst.cause.is_certain and not is_of_rows
        flaw = _flaw_of(layer, calls, worst)
        what = f"{worst.operation} {worst.cause.why}"
        yield flaw._replace(reason=flaw.reason.format(what)), is_certain
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        yield _MEMORY._replace(reason=_MEMORY.reason.format(listed)), True
    if id(layer) in calls.stateful:
        yield _STATEFUL, True


def _flaw_of(layer: keras.layers.Layer, calls: Calls, found: Found) -> _Flaw:
    """Say what is the matter with an operation of a layer."""
    cause = found.cause
    if cause.is_certain:
        flaw = _MIXING
        # What TensorFlow makes of something else has the name of that before its own.
        of = (
            cause.outer.name.rpartition("/")[0].rpartition("/")[2].rstrip("_0123456789")
        )
        if _keras.mixes_images(layer):
            flaw = _MIXTURE
        elif _keras.changes_images(layer):
            flaw = _OF_IMAGES
        elif cause.outer.type in LOOPS:
            flaw = _LOOP_OF_MAP if "/pfor/" in cause.outer.name else _LOOP
        elif of in _OTHERWISE:
            flaw = _MIXING._replace(fix=_OTHERWISE[of])
    else:
        flaw = _COUNTING if found.counts_rows else _UNPROVEN
    flaw = {MEMORY: _OUTSIDE, BY_PLACE: _KNOWN_DRAWS}.get(cause.why, flaw)
    if cause.is_certain and isinstance(layer, keras.layers.TimeDistributed):
        flaw = _UNKNOWN_STEPS
    if cause.is_certain and id(layer) in calls.adding_losses:
        flaw = flaw._replace(fix=f"{flaw.fix} {_loss_of_layer(found)}")
    return flaw


def loss_problems(found: list[Found]) -> list[Problem]:
    """Say what lets the loss of one row depend on others, or keeps data."""
    problems = []
    for each in found:
        if each.layer != LOSS and each.layer is not None:
            continue
        cause, fix = each.cause, ""
        if cause.variable:
            reason = (
                "A loss must keep no data: what it assigns is not noised. Received: "
                f"changed `{cause.variable}` in {each.operation}. Use metrics "
                "(`compile(metrics=...)`) to count things."
            )
        elif cause.why == NO_GRADIENT:
            reason = (
                "A loss that is computed row after row must have a gradient there. "
                f"Received: {each.operation}, which {cause.why}."
            )
        elif cause.why in COMPARISONS or (cause.is_certain and cause.why in MEETING):
            reason = (
                "A loss must not be an in-batch one, which compares the rows of a batch: "
                "it is asked for each example alone, where nothing is left of it, and "
                f"only the noise would train. Received: {each.operation}, which "
                f"{cause.why}. {OWN_COMPARISONS}"
            )
        elif each.counts_rows and not cause.is_certain:
            reason = (
                "A loss must not depend on how many examples there are. Received: "
                f"{each.operation}, which {cause.why}."
            )
            fix = _COUNTING.fix
        elif cause.why == READS_METRIC:
            reason = (
                "A loss must read no metric: what that has counted of other rows is not "
                f"noised. Received: {each.operation}, which {cause.why}. Read what is public "
                "or noised, such as `optimizer.iterations`."
            )
        elif cause.why.startswith(LEAVES_TO_THE_NEXT):
            reason = (
                "A loss that is asked for one example after the other must keep nothing. "
                f"Received: {each.operation}, which {cause.why}. Change variables in a "
                "callback, and use seeds to draw only: `keras.random.uniform((), "
                "seed=self.seed_generator)`."
            )
        elif cause.why == MEMORY:
            reason = (
                "A loss must keep nothing from one example to the next. Received: "
                f"{each.operation}, which {cause.why}. Draw with a "
                "`keras.random.SeedGenerator`: candidates of a sampled softmax with "
                "`keras.random.randint((7,), 0, classes, seed=self.seed_generator)`."
            )
        else:
            reason = (
                "The loss of an example must not depend on other examples. Received: "
                f"{each.operation}, which {cause.why}. `keras.losses.Circle` compares "
                "the rows of a batch, and a loss that is normalized over the batch "
                "shares its divisor. Use a loss that compares each example with its "
                "own target, e.g. `keras.losses.CategoricalCrossentropy()`. "
                f"{_LOSS_OF_ROWS}"
            )
        problems.append(Problem(LOSS, "loss", reason, fix, cause.is_certain))
    return problems


def _loss_of_layer(found: Found) -> str:
    """Say which loss a layer may add in the place of one that lets rows meet."""
    if found.cause.why in MEETING:
        return OWN_COMPARISONS
    is_loop = found.cause.outer.type in LOOPS
    return f"{_LOSS_OF_LAYER} {_LOSS_OF_LABELS}" if is_loop else _LOSS_OF_LAYER


def raise_if(model: keras.Model, problems: list[Problem]) -> None:
    """Raise one error that names all problems of a model, if there are some."""
    if problems:
        found = "".join(f"\n  * {problem}" for problem in problems)
        raise UnsupportedLayerError(
            f"Model `{model.name}` must treat every example of a batch alone and keep "
            f"no data. Received: model={model!r} with{found}"
        )
