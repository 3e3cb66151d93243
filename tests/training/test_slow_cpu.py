"""Whoever trains on a CPU where TensorFlow leaves oneDNN off is told, once."""

import pytest
import tensorflow as tf

from tfdp import _keras
from tfdp.training.arguments import note_slow_cpu

pytestmark = pytest.mark.keras_private


@pytest.fixture(autouse=True)
def anew():
    note_slow_cpu.cache_clear()
    yield
    note_slow_cpu.cache_clear()


@pytest.mark.parametrize("is_off", [False, True])
def test_it_is_said_once(is_off, monkeypatch, caplog):
    monkeypatch.setattr(_keras, "onednn_is_off", lambda: is_off)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: [])
    with caplog.at_level("WARNING", "absl"):
        note_slow_cpu()
        note_slow_cpu()
    assert caplog.text.count("TF_ENABLE_ONEDNN_OPTS=1") == is_off


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("is_enabled", [False, True])
@pytest.mark.parametrize("is_asked", [False, True])
def test_only_where_nobody_has_decided(machine, is_enabled, is_asked, monkeypatch):
    monkeypatch.setattr(_keras.platform, "machine", lambda: machine)
    monkeypatch.setattr(_keras._pywrap_util_port, "IsMklEnabled", lambda: is_enabled)
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if is_asked:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    wanted = machine == "x86_64" and not is_enabled and not is_asked
    assert _keras.onednn_is_off() == wanted
