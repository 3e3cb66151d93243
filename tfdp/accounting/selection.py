"""The best of several trainings, as Rényi differential privacy knows it."""

import dataclasses
from collections.abc import Iterable, Sequence

import dp_accounting
import numpy as np
from dp_accounting import privacy_accountant, rdp
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class OneOfDpEvent(dp_accounting.DpEvent):
    """One of several events takes place; a coin that knows no data says which.

    Attributes:
        events: Those that may.
    """

    events: tuple[dp_accounting.DpEvent, ...]


class RdpAccountant(rdp.RdpAccountant):
    """dp_accounting's, which also knows `OneOfDpEvent`.

    At each order such an event costs as much as the dearest of its parts there. Let p_i
    be the chance of part i, P_i and Q_i its laws on two neighbouring data sets. For the
    pair of i and the output, ``exp((order - 1) * divergence)`` is the mean over i,
    weighted by p_i, of the same of P_i and Q_i, and so at most the largest of these.
    """

    _rdp: NDArray[np.float64]

    @property
    def divergences(self) -> NDArray[np.float64]:
        """The Rényi divergence at each order."""
        return np.array(self._rdp, np.float64)

    def _maybe_compose(
        self, event: dp_accounting.DpEvent, count: int, do_compose: bool
    ) -> privacy_accountant.PrivacyAccountant.CompositionErrorDetails | None:
        if not isinstance(event, OneOfDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        before, dearest = self._rdp, np.zeros(len(self._rdp))
        for each in event.events:
            self._rdp = np.zeros(len(before))
            error = self._maybe_compose(each, 1, do_compose)
            if error is not None:
                return error
            dearest = np.maximum(dearest, self._rdp)
        self._rdp = before + count * dearest if do_compose else before
        return None


def is_covered(
    event: dp_accounting.DpEvent, others: Sequence[dp_accounting.DpEvent]
) -> bool:
    """Tell whether an event costs at most as much as one of others, at every order.

    Args:
        event: What RDP knows.
        others: Likewise.

    Returns:
        False if it costs more at one of them.
    """
    one, all_of_them = _divergences(event), _divergences(OneOfDpEvent(tuple(others)))
    return bool(np.all(one <= all_of_them * (1 + 1e-9)))


def _divergences(event: dp_accounting.DpEvent) -> NDArray[np.float64]:
    accountant = RdpAccountant()
    accountant.compose(event)
    return accountant.divergences


def leaves(event: dp_accounting.DpEvent) -> Iterable[dp_accounting.DpEvent]:
    """Yield the events that composed ones are made of."""
    parts = getattr(event, "events", None)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        parts = [event.event]
    if parts is None:
        yield event
        return
    for part in parts:
        yield from leaves(part)
