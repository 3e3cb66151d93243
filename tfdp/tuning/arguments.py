"""What tries get as arguments of `fit`: nothing that would tell of other tries."""

import keras

from tfdp._types import Config, Nest
from tfdp.data.declared import DeclaredDataset
from tfdp.data.sources import have_common_rows
from tfdp.training.fit_callbacks import flattened
from tfdp.tuning.scores import check_callbacks
from tfdp.tuning.spaces import Settings

_OWN_ARGUMENTS = {
    "validation_data": "public_data=(x_public, y_public)` if the rows are public, or `score='private_accuracy'",
    "validation_split": "score='private_accuracy'",
    "verbose": "PrivateSearch(..., verbose=0)",
}
# Of `fit`, as a search calls them.
_DATA = {"x": "x", "validation_data": "public_data"}


def check_arguments(arguments: Config) -> None:
    """Refuse arguments of `fit` that tries cannot have.

    Args:
        arguments: As a search got them.

    Raises:
        ValueError: If there are some.
    """
    for name, instead in _OWN_ARGUMENTS.items():
        if name in arguments:
            raise ValueError(
                f"`{name}` is not for tries: what is said or decided by it would not be "
                f"covered. Received: {name}={arguments[name]!r:.60}. Use `{instead}`."
            )
    if arguments.get("callbacks") and not callable(arguments["callbacks"]):
        raise ValueError(
            "`callbacks` must be a function that makes new ones for every try: they "
            f"remember what they have seen. Received: {arguments['callbacks']!r}. Use "
            "`callbacks=lambda settings: [...]`."
        )


def arguments_of(
    settings: Settings, arguments: Config, last: keras.callbacks.Callback
) -> Config:
    """Return the arguments of `fit` for a try.

    Args:
        settings: Of the try.
        arguments: As the search got them.
        last: A callback to run behind all others.

    Raises:
        ValueError: If callbacks would let something out.
    """
    given = {name: _value(settings, value) for name, value in arguments.items()}
    callbacks = flattened(given.pop("callbacks", None))
    check_callbacks(callbacks)
    return {**given, "callbacks": [*callbacks, last], "verbose": 0}


def check_data(settings: Settings, arguments: Config, given: Config) -> None:
    """Refuse data that would know of all tries, and private rows said to be public.

    Args:
        settings: Of a try.
        arguments: As the search got them.
        given: What `arguments_of` has made of them.

    Raises:
        ValueError: If tries would share an object that remembers what was drawn, or
            the public rows share memory with those of the training.
    """
    for key, name in _DATA.items():
        remembers = _remembering(given[key])
        if remembers is None:
            continue
        if _remembering(_value(settings, arguments[key])) is remembers:
            raise ValueError(
                "Tries must not share data that remember what was drawn from them: that "
                f"tells how many tries there were. Received: {name} with the same "
                f"{type(remembers).__name__} for every try. Use a function that makes a "
                f"new one, `{name}=lambda settings: tfdp.data.PoissonDataset(...)`, or "
                "arrays."
            )
    _check_public(given["x"], given["validation_data"])


def _check_public(x: Nest, public: Nest) -> None:
    """Refuse public inputs that are those of the training."""
    if public is None:
        return
    public_x, _, _ = keras.utils.unpack_x_y_sample_weight(public)
    if have_common_rows(x, public_x):
        raise ValueError(
            "`public_data` must be other rows than those that tries train on: scores of "
            "these would be exact metrics of private rows. Received: arrays that share "
            "memory with those of `fit`. Use rows that are public, `search.fit(x, y, "
            "public_data=(x_public, y_public))`, or `score='private_accuracy'`."
        )


def _value(settings: Settings, argument: Nest) -> Nest:
    """Return what an argument is in a try."""
    return argument(dict(settings)) if callable(argument) else argument


def _remembering(data: Nest) -> Nest:
    """Return the object that counts what is drawn; None for arrays and pipelines."""
    if isinstance(data, DeclaredDataset):
        data = data.dataset
    is_counting = isinstance(data, keras.utils.PyDataset) or hasattr(data, "__next__")
    return data if is_counting else None
