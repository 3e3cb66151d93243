import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "plot_run.py"
PNG = b"\x89PNG\r\n\x1a\n"
BIAS = ["bias_magnitude", "bias_scale", "bias_direction", "clip_cosine"]
NORMS = ["norm_q10", "norm_q50", "norm_q90"]


@pytest.fixture
def write(tmp_path):
    def write(content, name="history.csv"):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def keras_logs(tmp_path_factory):
    """What Keras writes of two short trainings, the second appended to the first."""
    folder = tmp_path_factory.mktemp("keras")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["binary_accuracy"], run_eagerly=True)
    data = np.ones((4, 2)), np.ones((4, 1))
    for epochs in (2, 3):
        history = model.fit(
            *data,
            epochs=epochs,
            validation_data=data,
            callbacks=[keras.callbacks.CSVLogger(folder / "log.csv", append=True)],
            verbose=0,
        )
    (folder / "log.json").write_text(json.dumps(history.history))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("log.csv", 5), ("log.json", 3)])
def test_logs_that_keras_wrote(tool, run, keras_logs, name, rows):
    table = tool.read(keras_logs / name)
    found = tool.panels(table)
    assert {label: set(curves) for label, curves in found.items()} == {
        "loss": {"loss", "val_loss"},
        "accuracy": {"binary_accuracy", "val_binary_accuracy"},
    }
    assert np.isfinite(found["loss"]["loss"]).all()
    np.testing.assert_array_equal(tool.epochs(table), np.arange(1, rows + 1))
    run(keras_logs / name)
    assert (keras_logs / "log.png").read_bytes().startswith(PNG)


def table(*names):
    return {name: ["1", "2"] for name in names}


@pytest.mark.parametrize(
    ("names", "panels"),
    [
        (["loss"], {"loss": ["loss"]}),
        (["loss", "val_loss", "head_loss"], {"loss": ["loss", "val_loss"]}),
        (
            ["accuracy", "auc", "val_sparse_top_k_categorical_accuracy"],
            {"accuracy": ["accuracy", "val_sparse_top_k_categorical_accuracy"]},
        ),
        (["epsilon", "learning_rate"], {"epsilon": ["epsilon"]}),
        (["l2_norm_clip"], {"clip norm": ["l2_norm_clip"]}),
        (["noise_multiplier"], {"noise multiplier": ["noise_multiplier"]}),
    ],
)
def test_panels(tool, names, panels):
    found = tool.panels(table("epoch", *names))
    assert {label: list(curves) for label, curves in found.items()} == panels


@pytest.mark.parametrize(
    "prefixes", [["nonprivate_"], ["public_"], ["nonprivate_", "public_"]]
)
def test_panels_of_the_bias(tool, prefixes):
    def prefixed(*names):
        return {prefix + name for prefix in prefixes for name in names}

    names = prefixed(*BIAS, *NORMS, "clipped_fraction")
    found = tool.panels(table("l2_norm_clip", *names, "norm_q50", "val_bias_scale"))
    assert {label: set(curves) for label, curves in found.items()} == {
        "clip norm": {"l2_norm_clip"} | prefixed(*NORMS),
        "clipped fraction": prefixed("clipped_fraction"),
        "bias": prefixed("bias_magnitude", "bias_direction"),
        "scale and cosine": prefixed("bias_scale", "clip_cosine"),
    }


def test_gaps(tool):
    cells = ["1", "", "NA", "nan", None, 2]
    found = tool.panels({"loss": cells, "val_loss": ["NA"] * 6, "epsilon": ["nan"] * 6})
    assert list(found) == ["loss"]
    assert list(found["loss"]) == ["loss"]
    nan = np.nan
    np.testing.assert_array_equal(found["loss"]["loss"], [1, nan, nan, nan, nan, 2])


def test_columns_that_are_not_plotted_may_hold_anything(tool):
    assert list(tool.panels({"loss": ["1"], "matrix": ["[1, 2]"]})) == ["loss"]


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (["0", "1", "2"], [1, 2, 3]),
        (["5", "6", "8"], [6, 7, 9]),
        (["0", "1", "0"], [1, 2, 3]),
        (["0", "", "2"], [1, 2, 3]),
        (None, [1, 2, 3]),
    ],
)
def test_epochs_count_from_one(tool, epoch, expected):
    columns = {"loss": ["3", "2", "1"]} | ({"epoch": epoch} if epoch else {})
    np.testing.assert_array_equal(tool.epochs(columns), expected)


@pytest.mark.parametrize("private", [True, False])
def test_the_figure_says_what_is_not_private(tool, private):
    prefix = "nonprivate_" if private else "public_"
    found = tool.panels(table("loss", prefix + "clipped_fraction"))
    figure = tool.draw(np.array([1, 2]), found, "log.csv")
    assert ("not private and not for publication" in figure.get_supxlabel()) == private
    loss, fraction = (axes.lines[0] for axes in figure.axes)
    assert loss.get_linestyle() == "-"
    assert fraction.get_linestyle() == ("--" if private else "-")
    assert fraction.get_label() == prefix + "clipped_fraction"


@pytest.mark.slow
def test_the_axes(tool):
    found = tool.panels(table("loss", "l2_norm_clip", "epsilon"))
    figure = tool.draw(np.array([1, 2]), found, "log.csv")
    axes = {each.get_title(): each for each in figure.axes}
    assert list(axes) == ["loss", "epsilon", "clip norm"]
    scales = [each.get_yscale() for each in axes.values()]
    assert scales == ["linear", "linear", "log"]
    assert axes["epsilon"].get_ylim()[0] == 0
    assert {each.get_xlabel() for each in axes.values()} == {"epoch"}
    np.testing.assert_array_equal(axes["loss"].lines[0].get_xydata(), [[1, 1], [2, 2]])


@pytest.mark.parametrize(
    "content",
    [
        "epoch,loss\n0,1\n",
        "\ufeffloss,extra\n\n1,a\n\n",
        "epoch,nonprivate_norm_q10,public_norm_q10\n0,0,0\n1,0,\n",
        "epoch,nonprivate_norm_q10,nonprivate_norm_q90\n0,0,2\n1,0,inf\n",
        "epoch,loss,val_loss,epsilon,l2_norm_clip\n0,inf,,0,0.5\n1,1e38,NA,inf,\n",
    ],
)
def test_unusual_numbers_are_plotted(run, write, content):
    log = write(content, "$\\odd$ name.csv")
    png = log.with_suffix(".png")
    assert run(log) == f"Plot: {png}\n"
    assert png.read_bytes().startswith(PNG)


def test_output_goes_where_the_flag_says(run, write, tmp_path):
    log = write('{"loss": [2, NaN, null, 1]}', "history.json")
    output = tmp_path / "new" / "plot"
    run(log, f"--output={output}")
    assert output.read_bytes().startswith(PNG)
    assert not log.with_suffix(".png").exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("history.png", []),
        ("history.csv", ["--output={folder}/history.csv"]),
        ("history.csv", ["--output={folder}/../{folder.name}/history.csv"]),
        ("history.csv", ["--output={folder}/link.png"]),
    ],
)
def test_the_log_is_not_overwritten(run, write, tmp_path, name, arguments):
    content = "epoch,loss\n0,1\n"
    log = write(content, name)
    (tmp_path / "link.png").symlink_to(log)
    with pytest.raises(SystemExit, match=r"not overwrite the log\. Received: out"):
        run(log, *(argument.format(folder=tmp_path) for argument in arguments))
    assert log.read_text() == content


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "must have rows. Received: .*a.csv"),
        ("a.csv", "\n\n", "must have rows. Received: .*a.csv"),
        ("a.csv", "epoch,loss\n", "must have rows. Received: .*a.csv"),
        ("a.csv", "epoch,auc\n0,1\n", "can be plotted.* Received: epoch, auc"),
        ("a.csv", "epoch;loss\n0;1\n", "can be plotted.* Received: epoch;loss"),
        ("a.csv", "loss\nNA\n", "can be plotted.* Received: loss"),
        ("a.csv", "loss\n1\nmuch\n", "`loss` must be.* Received: 'much' in row 2"),
        ("a.csv", "epoch,loss\nx,1\n", "`epoch` must be.* Received: 'x' in row 1"),
        ("a.csv", "loss,auc\n1,2\n1\n", "Received: 1 cells in row 2, 2 in the header"),
        ("a.csv", "loss\n" + "1" * 200_000, "must be CSV.* Received: .*a.csv"),
        ("a.json", "", "must be CSV, or JSON.* Received: .*a.json"),
        ("a.json", "epoch,loss\n0,1\n", "must be CSV, or JSON.* Received: .*a.json"),
        ("a.json", "[" * 200_000, "must be CSV, or JSON.* Received: .*a.json"),
        ("a.json", "{}", "must have rows. Received: .*a.json"),
        ("a.json", '{"loss": []}', "must have rows. Received: .*a.json"),
        ("a.json", "[1, 2]", r"dict of lists.* Received: \[1, 2\]"),
        ("a.json", '{"loss": 1}', "dict of lists.* Received: {'loss': 1}"),
        ("a.json", '{"loss": [[1]]}', r"`loss` must be.* Received: \[1\] in row 1"),
        ("a.json", f'{{"loss": [{10**400}]}}', "`loss` must be.* Received: 1000"),
        (
            "a.json",
            '{"loss": [1, 2], "val_loss": [1]}',
            "same length. Received: 2 in loss, 1 in val_loss",
        ),
    ],
)
def test_a_wrong_log_ends_in_a_sentence(run, write, name, content, message):
    log = write(content, name)
    with pytest.raises(SystemExit, match=message) as stop:
        run(log)
    assert stop.value.code.startswith("plot_run: ")
    assert len(stop.value.code.splitlines()) == 1
    assert not log.with_suffix(".png").exists()


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_binary_file_is_refused(run, tmp_path, suffix):
    log = tmp_path / f"a{suffix}"
    log.write_bytes(PNG)
    with pytest.raises(SystemExit, match=r"plot_run: .*must be CSV.* Received: "):
        run(log)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Received: none"),
        (["a.csv", "b.csv"], "Received: a.csv b.csv"),
        (["{folder}/missing.csv"], "No such file.* Received: .*missing.csv"),
        (["{folder}"], "directory. Received: "),
        (["{folder}/a.csv", "--output={folder}"], "directory. Received: "),
        (["{folder}/a.csv", "--output={folder}/a.csv/b.png"], "Received: .*a.csv"),
    ],
)
def test_wrong_paths_end_in_a_sentence(run, write, tmp_path, arguments, message):
    write("loss\n1\n", "a.csv")
    with pytest.raises(SystemExit, match=message) as stop:
        run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert stop.value.code.startswith("plot_run: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "status", "output", "errors"),
    [("loss\n1\n", 0, "Plot: ", ""), ("loss\nmuch\n", 1, "", "Received: 'much'")],
)
def test_the_script_runs_from_a_shell(write, content, status, output, errors):
    log = write(content)
    process = subprocess.run(
        [sys.executable, SCRIPT, log], capture_output=True, text=True, check=False
    )
    assert process.returncode == status
    assert output in process.stdout
    assert errors in process.stderr
    assert "Traceback" not in process.stderr
    assert log.with_suffix(".png").exists() == (status == 0)


@pytest.mark.slow
def test_it_starts_without_tensorflow():
    code = """
import sys, plot_run
assert not {"keras", "tensorflow", "tfdp"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
        check=True,
    )
