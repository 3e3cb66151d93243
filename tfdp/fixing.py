"""Models without batch statistics, made from models that have them."""

import contextlib
import inspect
import math
import tempfile
from collections.abc import Iterator
from typing import NoReturn, TypeAlias

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

    Layers and models with code of their own are copied by their `get_config`, and what
    they keep as BatchNormalization is replaced in the copy. Their code still makes
    BatchNormalization: a copy of theirs is not loaded from a ``.keras`` file, but made
    again by `fix_model`, and given its weights by `load_weights`.

    Args:
        model: A built model.
        groups: Most groups that the channels of a layer are split into.

    Returns:
        The new model.

    Raises:
        TypeError: If `model` is no Keras model, or private already.
        UnsupportedLayerError: If a layer cannot be copied, or it has BatchNormalization of
            only one value of each example.
        ValueError: If `groups` is no whole number of at least 1, or the model is not built.

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
    _check_type(model)
    classes = {type(each).__name__: type(each) for each in _keras.flatten_layers(model)}
    with (
        keras.saving.custom_object_scope(classes),
        _keras.trusted_configs(),
        _keras.own_global_seed(),
    ):
        _check_layers(model)
        copies = _Copies(groups)
        fixed = copies.of(model)
        copies.fill()
    return fixed


def _check_type(model: object) -> None:
    """Refuse what is no model that can be fixed."""
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
    # A class without a `build` of its own is said to be built before its layers are.
    normalizing = [each for each in _keras.flatten_layers(model) if _mixes(each)]
    if not all(each.built for each in (model, *normalizing)):
        raise ValueError(
            f"Model `{model.name}` must be built, so that the numbers of channels are "
            f"known. Received: model={model!r}. Call it on some rows, `model(x[:1])`, "
            "or begin with `keras.Input((32, 32, 3))`."
        )


def _check_layers(model: keras.Model) -> None:
    """Refuse layers that cannot be replaced."""
    problems = list(_problems(model))
    if problems:
        found = "".join(f"\n  * {problem}" for problem in problems)
        raise UnsupportedLayerError(
            f"Model `{model.name}` has BatchNormalization that cannot be replaced. "
            f"Received: model={model!r} with{found}"
        )


def _problems(model: keras.Model) -> Iterator[Problem]:
    owners = {
        id(layer): owner
        for owner in _within_reach(model)
        if not _parts(owner)
        for layer in _keras.flatten_layers(owner)
    }
    obstacles: dict[int, str] = {}
    for path, layer in _keras.layers_by_path(model):
        if not _mixes(layer):
            continue
        owner = owners[id(layer)]
        if owner is not layer and id(owner) not in obstacles:
            obstacles[id(owner)] = _obstacle(owner)
        if obstacles.get(id(owner)):
            reason = (
                f"it belongs to a {type(owner).__name__}, which its `get_config` does "
                f"not copy ({obstacles[id(owner)]})"
            )
            fix = (
                "Return all arguments of its `__init__` from `get_config`, use "
                "`keras.layers.GroupNormalization(groups=...)` there"
            )
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


def _obstacle(layer: keras.layers.Layer) -> str:
    """Say what keeps a layer with code of its own from being copied, if anything."""
    try:
        _copied(layer)
    except Exception as error:  # noqa: BLE001 (whatever the layer's own code raises)
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _copied(layer: _Operation) -> _Operation:
    """Make a layer by the config of another one, with what that holds."""
    # Recurrent layers give all of it to their cells.
    is_recurrent = isinstance(layer, keras.layers.RNN)
    owner = layer.cell if is_recurrent else layer
    held = _held(owner)
    # While the config is made, what has a place in every config.
    stand_ins = {
        name: keras.activations.linear if inspect.isfunction(value) else None
        for name, value in held.items()
    }
    with _keras.attributes_replaced(owner, **stand_ins):
        copy = _made_of_config(layer)
    for name, value in held.items():
        setattr(copy.cell if is_recurrent else copy, name, value)
    return copy


def _held(layer: _Operation) -> dict[str, object]:
    """Return what was given to a layer and is the copy's, too, by names.

    Not all of it can be made of a config: lambdas, and what nobody has registered.
    """
    given = {
        name
        for each in map(vars, type(layer).__mro__)
        if "__init__" in each
        for name in inspect.signature(each["__init__"]).parameters
    }
    return {
        name: value
        for name, value in vars(layer).items()
        if name in given and (inspect.isfunction(value) or isinstance(value, _HELD))
    }


_HELD = (keras.Initializer, keras.Regularizer, keras.constraints.Constraint)


def _made_of_config(layer: _Operation) -> _Operation:
    taken = inspect.signature(type(layer)).parameters
    given = _keras.arguments_of(layer)
    # A config may leave out what would then be a default.
    config = {name: given[name] for name in taken if name in given} | layer.get_config()
    try:
        return type(layer).from_config(config)
    except TypeError:
        # Not every class takes the name, the dtype, and whether it is to be trained.
        copy = type(layer)(**{k: v for k, v in config.items() if k in taken})
    copy.name = layer.name
    return copy


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
            return _group_normalization(layer, self._groups)
        try:
            return _copied(layer)
        except Exception as error:
            raise UnsupportedLayerError(
                "`fix_model` must copy each layer of a model by its config. Received: layer="
                f"{layer!r}, of which that fails ({_first_line(error)}). Return all "
                "arguments of its `__init__` from `get_config`."
            ) from error

    def fill(self) -> None:
        """Give the copies the weights, and what is to be trained of them."""
        # Models come before what is in them, since setting theirs sets all below.
        for original, copy in reversed(self._pairs.values()):
            if not isinstance(original, keras.layers.Layer):
                continue
            if _parts(original):
                copy.trainable = original.trainable
            elif _mixes(original):
                _assign_scales(original, copy)
            else:
                _fill_alike(original, copy, self._groups)


def _call(layer: _Operation, *args: Nest, **kwargs: Nest) -> Nest:
    """Call a copy as the original was called."""
    if type(layer) is keras.layers.GroupNormalization:
        kwargs.pop("mask", None)  # It takes none; BatchNormalization does.
    return layer(*args, **kwargs)


def _group_normalization(
    layer: keras.layers.BatchNormalization, most: int
) -> keras.layers.GroupNormalization:
    config = keras.layers.BatchNormalization.get_config(layer)
    kept = {name: config[name] for name in _CARRIED_OVER if name in config}
    return keras.layers.GroupNormalization(_number_of_groups(layer, most), **kept)


def _replace(
    layer: keras.layers.BatchNormalization, copy: keras.layers.Layer, most: int
) -> None:
    """Turn the copy of a BatchNormalization into a GroupNormalization."""
    other = _group_normalization(layer, most)
    with contextlib.ExitStack() as scopes:
        for name in layer.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        other.build(layer.get_build_config()["input_shape"])
    _keras.become(copy, other)
    _assign_scales(layer, copy)


def _assign_scales(
    layer: keras.layers.BatchNormalization, copy: keras.layers.GroupNormalization
) -> None:
    for name in ("gamma", "beta"):
        if getattr(layer, name) is not None:
            _assign(getattr(layer, name), getattr(copy, name))


def _build_alike(original: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Build what is built in the original."""
    must_build = original.built and not copy.built
    # These build what is in them, or make it only then.
    if must_build and type(copy).build not in (
        keras.layers.Layer.build,
        keras.Model.build,
    ):
        copy.build_from_config(original.get_build_config())
    for pair in zip(*map(_keras.layers_in, (original, copy)), strict=False):
        _build_alike(*pair)
    copy.built = original.built


def _fill_alike(
    original: keras.layers.Layer, copy: keras.layers.Layer, groups: int
) -> None:
    """Fill a copy of the same class, and replace what is in it."""
    _build_alike(original, copy)
    sources, targets = map(_keras.flatten_layers, (original, copy))
    if len(sources) != len(targets):
        _refuse_copy(
            original, f"{len(targets) - 1} layers in it, for {len(sources) - 1}"
        )
    replaced = set()
    for source, target in zip(sources, targets, strict=True):
        _check_alike(source, target)
        if _mixes(source):
            _replace(source, target, groups)
            replaced |= {id(v) for v in [*source.variables, *target.variables]}
            continue
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
    kept = (
        [variable for variable in each.variables if id(variable) not in replaced]
        for each in (original, copy)
    )
    for source, target in zip(*kept, strict=True):
        _assign(source, target)


def _check_alike(source: keras.layers.Layer, copy: keras.layers.Layer) -> None:
    """Refuse a copy that was not made with the same numbers and texts."""
    given = inspect.signature(type(source)).parameters
    for name, value in vars(source).items():
        other = vars(copy).get(name)
        if isinstance(value, bool | int | float | str):
            is_alike = name[0] == "_" or name in _OF_EACH or value == other
        else:
            # Of other arguments no more is known than whether there is one.
            is_alike = name not in given or (value is None) == (other is None)
        if not is_alike:
            _refuse_copy(source, f"{name}={other!r}, for {value!r}")


# What a copy has of its own, or gets later.
_OF_EACH = ("name", "built", "trainable")


def _refuse_copy(layer: keras.layers.Layer, has: str) -> NoReturn:
    raise UnsupportedLayerError(
        "`fix_model` must copy each layer of a model by its config. Received: layer="
        f"{layer!r}, whose copy has {has}. Return all arguments of its `__init__` from "
        "`get_config`."
    )


def _assign(source: Variable, target: Variable) -> None:
    target.assign(source)
    target.trainable = source.trainable
    note_copy(source, target)
