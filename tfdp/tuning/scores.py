"""What tries are compared by: something that is private already, or public."""

import math
from collections.abc import Iterable

import keras

from tfdp.accounting import Segment
from tfdp.training.fit_callbacks import exact_decisions

_PRIVATE, _PUBLIC = "private_", "val_"
# Write what is of one try alone, each time somewhere.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    # Older versions of Keras have none.
    getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.ModelCheckpoint),
)


def check_score(score: str, *, has_public_rows: bool) -> None:
    """Refuse a score that has seen private rows without noise.

    Args:
        score: Its name in the history of a training.
        has_public_rows: Whether there are rows that were said to be public.

    Raises:
        TypeError: If it is no text.
        ValueError: If it is an exact metric of private rows.
    """
    if not isinstance(score, str):
        raise TypeError(
            "`score` must be the name of a metric in the history of a training. "
            f"Received: score={score!r}. Use `score='private_accuracy'`."
        )
    if score.startswith(_PRIVATE) or (score.startswith(_PUBLIC) and has_public_rows):
        return
    of = "rows that nobody has said to be public"
    if not score.startswith(_PUBLIC):
        of = "the private rows"
    raise ValueError(
        f"`score` must be private or public: an exact metric of {of} would decide what "
        f"leaves, and no noise covers that. Received: score={score!r}. Use a "
        "metric that `tfdp.callbacks.PrivateEvaluation` releases, "
        "`score='private_accuracy'`, or one of public rows, `score='val_accuracy'` with "
        "`search.fit(..., public_data=(x_public, y_public))`."
    )


def check_callbacks(callbacks: list[keras.callbacks.Callback]) -> None:
    """Refuse callbacks that let out what must stay inside of a search.

    Those are callbacks that write, and those that decide by exact metrics: the model that
    leaves would tell of the private rows what no noise covers.

    Args:
        callbacks: Of a try, all in one list.

    Raises:
        ValueError: If there is one.
    """
    for callback in callbacks:
        if isinstance(callback, _WRITERS):
            raise ValueError(
                f"`{type(callback).__name__}` would write what one try alone has made: "
                "only the best model may leave a search. Received: callbacks with "
                f"{callback!r}. Leave it out, and save what `search.fit` returns."
            )
    for each in exact_decisions(callbacks):
        metric = each.metric.removeprefix(_PRIVATE)
        other = (
            "Monitor a metric that `tfdp.callbacks.PrivateEvaluation` releases in every "
            f"try, `monitor='private_{metric}'`, or one of public rows, `monitor="
            f"'val_{metric}'` with `search.fit(..., public_data=(x_public, y_public))`."
        )
        raise ValueError(
            f"`{each.callback}` would decide by a metric of the private rows, and the "
            f"epsilon of a search does not cover that. Received: {each.received}. "
            f"{each.fix or other}"
        )


def check_is_released(score: str, planned: Iterable[Segment]) -> None:
    """Refuse a score that only looks private: that no release is planned of.

    Args:
        score: Its name.
        planned: What a try will have run.

    Raises:
        ValueError: If the name is that of a private score, and nothing releases it.
    """
    names = [
        name for each in planned if each.count for name in each.released.split(", ")
    ]
    if score.startswith(_PRIVATE) and score not in names:
        raise ValueError(
            "A private score must be released with noise in every try. Received: "
            f"score={score!r}, which no callback releases in any epoch. Use "
            "`callbacks=lambda settings: [tfdp.callbacks.PrivateEvaluation(['accuracy'], "
            "noise_multiplier=20.0)]`, with an `every` of at most `epochs`."
        )


def value_of(
    score: str, history: dict[str, list[float]], direction: int, *, is_complete: bool
) -> float:
    """Return how good a training was, the more the better.

    Args:
        score: The name in its history.
        history: It.
        direction: 1 if more is better, else -1.
        is_complete: Whether the training has reached its planned end.

    Returns:
        The last value, or minus it; what is no number is worse than all numbers, and so is
        a training that ended before it had a score.

    Raises:
        ValueError: If the history of a whole training has no such name.
    """
    if not history.get(score):
        if not is_complete:
            return -math.inf
        raise ValueError(
            f"The history of a try has no score. Received: score={score!r}, a history "
            f"of {sorted(history)}. Use `callbacks=lambda settings: "
            "[tfdp.callbacks.PrivateEvaluation(['accuracy'], noise_multiplier=20.0)]` or "
            "`metrics=` that give it."
        )
    value = direction * float(history[score][-1])
    return -math.inf if math.isnan(value) else value
