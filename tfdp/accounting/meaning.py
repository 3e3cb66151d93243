"""What a ledger means to a person: how often the best attack finds their record."""

import functools
import math

from tfdp.accounting.ledger import Ledger
from tfdp.accounting.tradeoff import true_positive_rate

# Of those who are no members, how many the attack accuses: 1 in 100.
FALSE_POSITIVE_RATE = 0.01


@functools.lru_cache(maxsize=256)
def best_attack(ledger: Ledger) -> float:
    """Return `true_positive_rate` at 1 % false positives; it takes tenths of a second.

    Where released values may end a run, each moment has a part of the false positives,
    and because the rate is concave in these equal parts are the most.
    """
    looks = ledger.looks
    return min(1.0, looks * true_positive_rate(ledger, FALSE_POSITIVE_RATE / looks))


def in_words(rate: float, *, of_users: bool) -> str:
    """Say in words that a patient understands what an attack can find out.

    Args:
        rate: What `best_attack` returned.
        of_users: Whether the records are users, with all their rows.

    Returns:
        A paragraph.

    Example:
        >>> print(in_words(0.0402, of_users=False).split(", ")[3])
        at most 4.1 in 100 of those whose data were used are recognised. Whoever guesses
    """
    yours = "all your data were" if of_users else "your row was"
    if rate >= 1:
        found = "nothing keeps them from recognising all of those whose data were used"
    else:
        # Never less than it is.
        shown = math.ceil(round(rate * 1000, 6)) / 10
        found = f"at most {shown:g} in 100 of those whose data were used are recognised"
    return (
        f"What this means for one person: somebody has the model, knows the data of "
        f"everybody else, and wants to find out whether {yours} used. If they are "
        f"wrong about 1 in 100 of the people whose data were not used, {found}. "
        "Whoever guesses, without the model, recognises 1 in 100."
    )
