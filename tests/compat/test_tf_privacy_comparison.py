"""Without TensorFlow Privacy; beside it, the parity tests compare."""

import sys

import pytest

from tfdp.accounting import compare_with_tensorflow_privacy

TRAINING = (60_000, 256, 60, 1.1, 1e-5)


def test_it_says_how_to_install_tensorflow_privacy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)
    monkeypatch.delattr(sys, "skip_tf_privacy_import", raising=False)
    version = ".".join(map(str, sys.version_info[:2]))
    with pytest.raises(
        ImportError, match=rf"Received: Python {version}, .*\. Use `pip"
    ):
        compare_with_tensorflow_privacy(*TRAINING)
    assert not hasattr(sys, "skip_tf_privacy_import")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delta": float("nan")}, "delta"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"accountant_type": "GDP"}, "accountant_type"),
    ],
)
def test_wrong_arguments_are_refused_first(wrong, message):
    names = ("number_of_examples", "batch_size", "num_epochs", "noise_multiplier")
    right = dict(zip((*names, "delta"), TRAINING, strict=True))
    with pytest.raises(ValueError, match=message):
        compare_with_tensorflow_privacy(**(right | wrong))
