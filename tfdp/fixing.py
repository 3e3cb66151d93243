"""Models without batch statistics, made from models that have them."""

import math
import tempfile
from collections.abc import Iterator
from typing import TypeAlias

import keras

from tfdp import _keras, _validate
from tfdp._types import Array, Nest, Variable
from tfdp.checks.problems import Problem
from tfdp.errors import UnsupportedLayerError
from tfdp.model import DPModel
from tfdp.runs.histories import note_copy

# Of one value GroupNormalization makes zero, of two only which is larger; statistics
# of few values hide most of what was in them.
_FEWEST_VALUES = 16

# A layer, a model, or what `keras.ops` puts between layers.
_Operation: TypeAlias = keras.Operation

_CARRIED_OVER = (
    *("name", "trainable", "dtype", "activity_regularizer"),
    *("axis", "epsilon", "center", "scale"),
    *("beta_initializer", "beta_regularizer", "beta_constraint"),
    *("gamma_initializer", "gamma_regularizer", "gamma_constraint"),
)


def fix_model(model: keras.Model, groups: int = 32) -> keras.Model:
    """Copy a model with GroupNormalization in place of BatchNormalization.

    GroupNormalization [1]_ takes its statistics from groups of channels of one
    example, so it mixes no examples and keeps no data. The copy has the weights of the
    model, the scales and offsets of its normalization layers included, but not their
    moving statistics: trained weights need some further training. A frozen
    BatchNormalization (``layer.trainable = False``) stays: it breaks no privacy.

    The number of groups is the largest divisor of the number of channels, up to
    `groups`, with which a group has 16 values of an example or more, positions times
    channels, where these are known; else 1. The copy is not compiled, and shares no
    layer or variable with the model. A class that only says how layers are put
    together, derived from Sequential or made of inputs and outputs, comes back as a
    plain model of that kind.

    Args:
        model: A built model. Looked into are Sequential and functional models, nested
            ones too, and TimeDistributed; the rest is copied by its `get_config`, for
            which it must have no BatchNormalization that is not frozen.
        groups: Most groups that the channels of a layer are split into.

    Returns:
        The new model.

    Raises:
        TypeError: If `model` is no Keras model, or private already.
        ValueError: If `groups` is no whole number of at least 1, the model is not
            built, or it has BatchNormalization that is out of reach or that has only
            one value of each example.

    Example:
        >>> model = keras.Sequential([
        ...     keras.Input((8, 8, 3)),
        ...     keras.layers.Conv2D(48, 3, use_bias=False),
        ...     keras.layers.BatchNormalization(name="norm"),
        ... ])
        >>> tfdp.fix_model(model).get_layer("norm").groups
        24

    References:
        .. [1] Wu and He, "Group Normalization", ECCV 2018.
           https://arxiv.org/abs/1803.08494
    """
    groups = _validate.positive_int("groups", groups)
    _check(model)
    classes = {type(each).__name__: type(each) for each in _keras.flatten_layers(model)}
    with (
        keras.saving.custom_object_scope(classes),
        _keras.trusted_configs(),
        _keras.own_global_seed(),
    ):
        copies = _Copies(groups)
        fixed = copies.of(model)
        copies.fill()
    return fixed


def _check(model: object) -> None:
    """Refuse what cannot be fixed."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a Keras model. Received: model={model!r}. Use "
            "`tfdp.fix_model(keras.Sequential([keras.Input((8,)), ...]))`."
        )
    if isinstance(model, DPModel):
        raise TypeError(
            "`model` must not be private yet. Received: model of type DPModel. Fix the "
            "model in it: `tfdp.DPModel(tfdp.fix_model(private.model))`."
        )
    if not model.built:
        raise ValueError(
            f"Model `{model.name}` must be built, so that the numbers of channels are "
            f"known. Received: model={model!r}. Use `model.build((None, 32, 32, 3))`, "
            "or begin with `keras.Input((32, 32, 3))`."
        )
    problems = list(_problems(model))
    if problems:
        found = "".join(f"\n  * {problem}" for problem in problems)
        raise UnsupportedLayerError(
            f"Model `{model.name}` has BatchNormalization that cannot be replaced. "
            f"Received: model={model!r} with{found}"
        )


def _problems(model: keras.Model) -> Iterator[Problem]:
    within_reach = {id(layer) for layer in _within_reach(model)}
    for path, layer in _keras.layers_by_path(model):
        if not _mixes(layer):
            continue
        if id(layer) not in within_reach:
            reason = "it belongs to a layer or model with code of its own"
            fix = "Use `keras.layers.GroupNormalization(groups=...)` there"
        elif type(layer).call is not keras.layers.BatchNormalization.call:
            reason = "its class has code of its own, which would be lost"
            fix = "Use a class derived from `keras.layers.GroupNormalization`"
        elif not _number_of_groups(layer, 1):
            reason = "it has one value of each example, which alone becomes zero"
            fix = "Leave it out"
        else:
            continue
        fix += ", or freeze it: `layer.trainable = False`."
        yield Problem(path, type(layer).__name__, reason, fix)


def _within_reach(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    yield layer
    for part in _parts(layer):
        yield from _within_reach(part)


def _parts(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return the layers in it, if it can be rebuilt around others."""
    if _keras.is_only_its_layers(layer):
        return list(layer.layers)
    if type(layer) is keras.layers.TimeDistributed:
        return [layer.layer]
    return []


def _mixes(layer: object) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def _number_of_groups(layer: keras.layers.BatchNormalization, most: int) -> int:
    """Return the number of groups; 0 if there is only one value to normalize."""
    shape = list(layer.get_build_config()["input_shape"])
    channels = shape.pop(layer.axis)
    positions = math.inf if None in shape[1:] else math.prod(shape[1:])
    if channels * positions == 1:
        return 0
    return max(
        groups
        for groups in range(1, min(channels, most) + 1)
        if channels % groups == 0
        and (groups == 1 or channels // groups * positions >= _FEWEST_VALUES)
    )


class _Copies:
    """Copies of layers, each made once, however many models share it.

    Args:
        groups: Most groups of a GroupNormalization.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._pairs: dict[int, tuple[_Operation, _Operation]] = {}

    def of(self, layer: _Operation) -> _Operation:
        """Return the copy of a layer, a model, or an operation between layers."""
        if id(layer) not in self._pairs:
            self._pairs[id(layer)] = layer, self._made(layer)
        return self._pairs[id(layer)][1]

    def _made(self, layer: _Operation) -> _Operation:
        if _keras.is_only_its_layers(layer):
            # In a Sequential model it may not be given.
            call = None if isinstance(layer, keras.Sequential) else _call
            # Keras compiles a clone too, which fails for losses not registered.
            with _keras.attributes_replaced(layer, compiled=False):
                return keras.models.clone_model(
                    layer, clone_function=self.of, call_function=call
                )
        if type(layer) is keras.layers.TimeDistributed:
            config = layer.get_config() | {"layer": self.of(layer.layer)}
            return keras.layers.TimeDistributed(**config)
        if _mixes(layer):
            config = keras.layers.BatchNormalization.get_config(layer)
            kept = {name: config[name] for name in _CARRIED_OVER if name in config}
            groups = _number_of_groups(layer, self._groups)
            return keras.layers.GroupNormalization(groups, **kept)
        copy = type(layer).from_config(layer.get_config())
        if isinstance(layer, keras.layers.Lambda):
            # What Keras rebuilds does not know the globals of the user's module.
            copy.function = layer.function
        return copy

    def fill(self) -> None:
        """Give the copies the weights, and what is to be trained of them."""
        # Models come before what is in them, since setting theirs sets all below.
        for original, copy in reversed(self._pairs.values()):
            if not isinstance(original, keras.layers.Layer):
                continue
            if _parts(original):
                copy.trainable = original.trainable
            elif _mixes(original):
                for name in ("gamma", "beta"):
                    if getattr(original, name) is not None:
                        _assign(getattr(original, name), getattr(copy, name))
            else:
                _fill_alike(original, copy)


def _call(layer: _Operation, *args: Nest, **kwargs: Nest) -> Nest:
    """Call a copy as the original was called."""
    if type(layer) is keras.layers.GroupNormalization:
        kwargs.pop("mask", None)  # It takes none; BatchNormalization does.
    return layer(*args, **kwargs)


def _fill_alike(original: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Fill a copy of the same class."""
    if original.built and not copy.built:
        copy.build_from_config(original.get_build_config())
    layers = (_keras.flatten_layers(each) for each in (original, copy))
    for source, target in zip(*layers, strict=True):
        target.trainable = source.trainable
        # Lets layers derive what else they keep, such as Normalization.
        store: dict[str, Array] = {}
        source.save_own_variables(store)
        target.load_own_variables(store)
        if hasattr(source, "save_assets"):
            with tempfile.TemporaryDirectory() as folder:
                source.save_assets(folder)
                target.load_assets(folder)
    # In what is saved LoRA is merged, and the seeds are missing.
    for source, target in zip(original.variables, copy.variables, strict=True):
        _assign(source, target)


def _assign(source: Variable, target: Variable) -> None:
    target.assign(source)
    target.trainable = source.trainable
    note_copy(source, target)
