"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp

NAMES = [module.name for module in pkgutil.walk_packages(tfdp.__path__, prefix="tfdp.")]
QUICK = {"tfdp.clipping", "tfdp.accounting.segments"}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_examples(name):
    if name.startswith("tfdp.federated.flower"):
        pytest.importorskip("flwr")
    module = importlib.import_module(name)
    namespace = {**vars(module), "keras": keras, "np": np, "tf": tf, "tfdp": tfdp}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.testmod(module, globs=namespace, optionflags=FLAGS)
    assert result.failed == 0
