"""Makes our accounting and TensorFlow Privacy's importable side by side.

TensorFlow Privacy 0.9.0 wants Python 3.11, numpy < 2 and dp-accounting 0.4.3, so
these tests run in an environment of their own; elsewhere they are skipped:

    python3.11 -m venv .venv-parity
    .venv-parity/bin/pip install -r tests/parity/requirements.txt
    .venv-parity/bin/pip install --no-deps tensorflow-privacy==0.9.0
    .venv-parity/bin/python -m pytest tests/parity

That leaves TensorFlow out, which neither side's accounting needs. `pip install
".[tensorflow-privacy,test]"` gives an environment with it, where they run too.
"""

import importlib.util
import pathlib
import sys
import types

# With this, importing tensorflow_privacy leaves alone all that needs TensorFlow.
sys.skip_tf_privacy_import = True

if importlib.util.find_spec("keras") is None:
    # `import tfdp` would ask for Keras. A bare package at the same place lets
    # `tfdp.accounting` be imported without running `tfdp/__init__.py`.
    bare = types.ModuleType("tfdp")
    bare.__path__ = [str(pathlib.Path(__file__).parents[2] / "tfdp")]
    sys.modules["tfdp"] = bare
