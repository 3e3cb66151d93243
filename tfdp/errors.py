"""The errors that tfdp raises beside `ValueError` and `TypeError`."""


class NotPrivateError(RuntimeError):
    """Training was asked for in a way that would not be private."""


class PrivacyBudgetError(RuntimeError):
    """The privacy budget leaves no room for the step that was asked for."""


class UnsupportedLayerError(ValueError):
    """Layers of a model break per-example privacy; the message lists them all."""


class UnsupportedLossError(ValueError):
    """A loss cannot be evaluated for one example alone."""


class WorkerLostError(RuntimeError):
    """A process that took part in a training is gone."""
