"""What is installed, and what must not be in the tree."""

import ast
import configparser
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

import tfdp

ROOT = Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")

# The one file that may touch private names.
PRIVATE = {"tfdp/_keras.py"}

IGNORED = re.compile(
    r"(^|/)(\.git|\.venv[^/]*|\.[a-z_]+_cache|\.hypothesis|__pycache__|build|dist"
    r"|[^/]+\.egg-info)(/|$)|^runs/"
)


def source_files():
    """Return the paths of the files that belong to the tree, from its root."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
        paths = [ROOT / name for name in names if name]
    else:  # no git, or no repository: what is not ignored
        paths = [
            path
            for path in ROOT.rglob("*")
            if not IGNORED.search(path.relative_to(ROOT).as_posix())
        ]
    return sorted(path for path in paths if path.is_file())


def requirements(section, option):
    """Return {name: version specifiers} of requirements in setup.cfg."""
    lines = SETUP[section][option].split()
    matches = (re.fullmatch(r"([\w.-]+?)([<>=!~].*)?", line) for line in lines)
    return {match[1]: match[2] or "" for match in matches}


def imported_modules(path):
    """Return (line, module) of all imports in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                (node.lineno, f"{node.module}.{alias.name}") for alias in node.names
            )


@pytest.mark.parametrize(
    "name",
    [
        "DPModel",
        "ClippedSum",
        "clipped_gradients",
        "compute_dp_sgd_privacy",
        "compute_dp_sgd_privacy_statement",
        "calibrate_noise_multiplier",
        "validate_model",
        "export.export_private_model",
        "fix_model",
        "optimizers.DPOptimizer",
        "optimizers.DPSGD",
        "optimizers.DPAdam",
        "optimizers.DPAdamW",
        "optimizers.DPAdagrad",
        "optimizers.DPNadam",
        "optimizers.DPRMSprop",
        "optimizers.DPKerasSGDOptimizer",
        "optimizers.DPKerasAdamOptimizer",
        "optimizers.DPKerasAdagradOptimizer",
        "optimizers.VectorizedDPKerasSGDOptimizer",
        "optimizers.VectorizedDPKerasAdamOptimizer",
        "optimizers.VectorizedDPKerasAdagradOptimizer",
        "data.PoissonDataset",
        "data.declare",
        "callbacks.ClipNormScheduler",
        "callbacks.PrivacyBudget",
        "accounting.Ledger",
        "accounting.compose",
        "errors.NotPrivateError",
        "errors.PrivacyBudgetError",
        "errors.UnsupportedLayerError",
    ],
)
def test_public_names(name):
    found = tfdp
    for part in name.split("."):
        found = getattr(found, part)
    assert found.__doc__


def test_version_is_that_of_the_metadata():
    try:
        installed = importlib.metadata.version("tfdp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tfdp is not installed; it is imported from the checkout")
    assert tfdp.__version__ == installed


def test_version_is_known_without_importing_anything():
    """Setuptools reads a plain assignment, and imports the package otherwise."""
    assert SETUP["metadata"]["version"] == "attr: tfdp.__version__"
    tree = ast.parse((ROOT / "tfdp" / "__init__.py").read_text(encoding="utf-8"))
    [version] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and [getattr(target, "id", None) for target in node.targets] == ["__version__"]
    ]
    assert version == tfdp.__version__


def test_type_information_is_part_of_the_package():
    assert (Path(tfdp.__file__).parent / "py.typed").is_file()
    assert SETUP["options.package_data"]["tfdp"].split() == ["py.typed"]


def test_every_folder_of_the_package_is_a_package():
    """`packages = find:` leaves out folders without an `__init__.py`."""
    folders = {path.parent for path in (ROOT / "tfdp").rglob("*.py")}
    assert [
        folder for folder in folders if not (folder / "__init__.py").is_file()
    ] == []


def test_the_test_extra_has_all_that_examples_and_exports_need():
    tests = requirements("options.extras_require", "test")
    for extra in ("examples", "onnx"):
        assert requirements("options.extras_require", extra).items() <= tests.items()


def test_ci_tests_the_lowest_versions_that_are_promised():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"'([\w-]+)==([\d.*]+)'", script))
    lowest = {
        name: specifier.removeprefix(">=")
        for name, specifier in requirements("options", "install_requires").items()
        if specifier
    }
    assert set(pinned) == set(lowest) == {"tensorflow", "keras", "dp-accounting"}
    for name, version in lowest.items():
        assert f"{pinned[name]}.".startswith(f"{version}."), name


@pytest.mark.slow
def test_private_names_of_keras_and_tensorflow_stay_in_one_file():
    found = [
        f"{name}:{line}: {module}"
        for path in sorted((ROOT / "tfdp").rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in PRIVATE
        for line, module in imported_modules(path)
        if f"{module}.".startswith(("keras.src.", "tensorflow.python."))
    ]
    assert found == []


def test_no_path_or_host_of_a_machine_is_in_the_tree():
    # Written in pieces, so as not to be found here.
    patterns = [
        r"/(?:root|home/\w+|Users/\w+|work|opt" + r"|mnt|workspace)/\w",
        r"/tmp" + r"/\w",
        r"\b(?:[A-Z]:\\Users)" + r"\\",
        r"pypi" + r"\.org|files\.python" + r"hosted|--index" + r"-url",
    ]
    forbidden = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in source_files()
        if path.name != "LICENSE" and b"\0" not in path.read_bytes()[:1000]
        for number, line in enumerate(
            path.read_text(encoding="utf-8").splitlines(), start=1
        )
        if forbidden.search(line)
    ]
    assert found == []
