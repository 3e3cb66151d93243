"""Scripts run in this process, with flags of their own."""

import importlib.util

import pytest
from absl import flags
from absl.testing import flagsaver


@pytest.fixture(scope="module")
def tool(request):
    """The script that the test module names `SCRIPT`, loaded as a module."""
    known = set(flags.FLAGS)
    script = request.module.SCRIPT
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)


@pytest.fixture
def run(tool, request, capsys):
    """Run the script's main: arguments -> what it prints; errors leave by SystemExit."""

    def run(*arguments):
        with flagsaver.flagsaver():
            tool.main(flags.FLAGS([request.module.SCRIPT.name, *map(str, arguments)]))
        return capsys.readouterr().out

    return run
