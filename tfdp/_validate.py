"""Checks of arguments, written so that NaN fails every one of them.

Each returns the plain Python number: NumPy scalars and Keras variables that
reach `dp_accounting` unconverted change its results silently.
"""

import math
import numbers
from typing import Any


def number(name: str, value: Any) -> float:
    """Return `value` as a float, or raise a TypeError if it is no real number."""
    if isinstance(value, (bool, str, bytes)) or value is None:
        raise TypeError(_rule(name, "must be a number", value))
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(_rule(name, "must be a number", value)) from error


def positive(name: str, value: object, fix: str = "") -> float:
    """Return `value` as a float with 0 < value < inf, or raise."""
    result = number(name, value)
    if not 0 < result < math.inf:
        raise ValueError(_rule(name, "must be positive and finite", value, fix))
    return result


def non_negative(name: str, value: object) -> float:
    """Return `value` as a float with 0 <= value < inf, or raise."""
    result = number(name, value)
    if not 0 <= result < math.inf:
        raise ValueError(_rule(name, "must be at least 0 and finite", value))
    return result


def probability(name: str, value: object) -> float:
    """Return `value` as a float with 0 < value < 1, or raise."""
    result = number(name, value)
    if not 0 < result < 1:
        raise ValueError(_rule(name, "must lie strictly between 0 and 1", value))
    return result


def positive_int(name: str, value: object, fix: str = "") -> int:
    """Return `value` as an int with value >= 1, or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_rule(name, "must be a whole number", value))
    result = number(name, value)
    if not (1 <= result < math.inf and result.is_integer()):
        raise ValueError(
            _rule(name, "must be a whole number of at least 1", value, fix)
        )
    return int(result)


def seed(name: str, value: object) -> int:
    """Return `value` as an int with value >= 0 of any size, or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_rule(name, "must be a whole number", value))
    if value < 0:
        fix = f"Use `{name}={-value}`."
        raise ValueError(_rule(name, "must be at least 0", value, fix))
    return int(value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of the allowed strings, or raise."""
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(
            f"`{name}` must be one of {choices}. Received: {name}={value!r}."
        )
    return str(value)


def instance(name: str, value: object, *types: type) -> None:
    """Raise a TypeError if `value` is of none of the types."""
    if not isinstance(value, types):
        allowed = " or ".join(f"`{each.__name__}`" for each in types)
        raise TypeError(
            f"`{name}` must be a {allowed}. Received: {name} of type "
            f"{type(value).__name__}."
        )


# What people may write who want to begin somewhere.
_EXAMPLES = {
    "batch_size": "256",
    "delta": "1e-5",
    "epsilon": "3.0",
    "epochs": "15",
    "examples_per_user": "4",
    "expected_batch_size": "256",
    "l2_norm_clip": "1.0",
    "learning_rate": "0.1",
    "noise_multiplier": "1.1",
    "num_microbatches": "32",
    "number_of_examples": "len(x)",
    "physical_batch_size": "64",
    "sampling_probability": "0.01",
    "target_epsilon": "3.0",
}


def _rule(name: str, rule: str, value: object, fix: str = "") -> str:
    message = f"`{name}` {rule}. Received: {name}={value!r}."
    if not fix and name in _EXAMPLES:
        fix = f"Use, for example, `{name}={_EXAMPLES[name]}`."
    return f"{message} {fix}" if fix else message
