"""The examples, each in a process of its own."""

import csv
import gzip
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import tfdp
from tests import forks

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG"


@pytest.fixture
def small_mnist(tmp_path, rng):
    """A folder with an mnist.npz of a few random images."""
    arrays = {}
    for split, number in (("train", 600), ("test", 50)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (number, 28, 28), np.uint8)
        arrays[f"y_{split}"] = rng.integers(0, 10, number, np.uint8)
    np.savez(tmp_path / "mnist.npz", **arrays)
    return tmp_path


@pytest.fixture
def real_mnist():
    """The folder that TFDP_DATA names."""
    folder = os.environ.get("TFDP_DATA")
    if folder is None or not (Path(folder) / "mnist.npz").is_file():
        pytest.skip("TFDP_DATA names no folder with mnist.npz")
    return folder


def start_afresh(example, *arguments):
    """Run an example from the command line and return the finished process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TFDP_DATA", None)
    return subprocess.run(
        [sys.executable, ROOT / "examples" / f"{example}.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def start(example, *arguments):
    """Do the same in a process that need not import TensorFlow."""
    path = ROOT / "examples" / f"{example}.py"
    return forks.run(path, *arguments, environment={"TFDP_DATA": None})


def check_refusal(example, *arguments, message):
    """Check that an example ends with a message, and not with a traceback.

    In this process: to import TensorFlow takes seconds each time.
    """
    known = set(flags.FLAGS)
    path = ROOT / "examples" / f"{example}.py"
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Where a script finds the modules beside it.
            patch.syspath_prepend(path.parent)
            main = runpy.run_path(str(path))["main"]
            patch.delenv("TFDP_DATA", raising=False)
            with pytest.raises((SystemExit, flags.Error), match=re.escape(message)):
                main(flags.FLAGS([example, *arguments]))
    finally:
        for name in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()


def run(example, *arguments, start=start):
    """Return what an example prints, if it succeeds."""
    process = start(example, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def percentages(pattern, text):
    """The percentages that the groups of a pattern match, as fractions."""
    match = re.search(pattern.replace("%", r"([\d.]+)%"), text)
    assert match, text
    return [float(group) / 100 for group in match.groups()]


def number(pattern, text):
    match = re.search(pattern, text)
    assert match, text
    return float(match.group(1))


def history(path):
    with path.open() as file:
        return list(csv.DictReader(file))


class TestMultiWorker:
    @pytest.mark.exhaustive
    def test_a_worker_dies_and_comes_back(self, tmp_path):
        text = run(
            "multi_worker",
            "--epochs=2",
            "--kill_in_epoch=2",
            f"--output_dir={tmp_path}",
            start=start_afresh,
        )
        assert text.count("Starting 2 workers") == 2
        assert text.count("Epoch 1/2") == 1
        assert text.count("Epoch 2/2") == 2
        assert number(r"Epsilon: ([\d.]+) at delta 0.0001", text) <= 3.5
        assert "is gone" in (tmp_path / "worker_0.log").read_text()
        for index in (0, 1):
            assert (tmp_path / f"worker_{index}" / "digits.keras").is_file()

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("--target_epsilon=-1", "target_epsilon"),
            ("--batch_size=5000", "batch_size"),
            ("--workers=0", "workers"),
            ("digits", "everything is a flag"),
        ],
    )
    def test_wrong_arguments(self, argument, message, tmp_path):
        check_refusal(
            "multi_worker", argument, f"--output_dir={tmp_path}", message=message
        )
        assert not list(tmp_path.iterdir())


class TestPlots:
    @pytest.fixture
    def plots(self):
        return runpy.run_path(str(ROOT / "examples" / "plots.py"))

    @pytest.mark.parametrize(
        ("places", "moved"),
        [
            ([], []),
            ([0.1, 0.5], [0.1, 0.5]),
            ([0.5, 0.5], [0.45, 0.55]),
            ([0.0, 0.48, 0.5, 0.52, 0.9], [0.0, 0.4, 0.5, 0.6, 0.9]),
        ],
    )
    def test_names_are_apart(self, plots, places, moved):
        np.testing.assert_allclose(plots["apart"](places, 0.1), moved, atol=1e-12)

    @pytest.mark.parametrize("epochs", [1, 2, 3, 15, 60])
    def test_epochs_are_whole_numbers(self, plots, epochs):
        figure, [[axes]] = plots["panels"](1, 1)
        plots["curve"](axes, range(1, epochs + 1), [0.5] * epochs, "private", "C0")
        plots["over_epochs"](axes, epochs)
        figure.draw_without_rendering()
        ticks = axes.get_xticks()
        np.testing.assert_array_equal(ticks, np.round(ticks))


class TestSavedResults:
    @pytest.fixture
    def module(self):
        return runpy.run_path(str(ROOT / "examples" / "saved.py"))

    def test_they_are_there_later(self, module, tmp_path):
        path, settings = tmp_path / "new" / "results.json", {"epsilons": (1, 2)}
        results = module["SavedResults"](path, settings, resume=True)
        results["a"] = [1.5, float("inf")]
        resumed = module["SavedResults"](path, settings, resume=True)
        assert "a" in resumed
        assert resumed["a"] == [1.5, float("inf")]
        with pytest.raises(ValueError, match="other settings"):
            module["SavedResults"](path, {"epsilons": (1, 3)}, resume=True)
        assert "a" not in module["SavedResults"](path, settings, resume=False)

    @pytest.mark.parametrize("content", ["", "[]", "{}", "1"])
    def test_another_file(self, module, tmp_path, content):
        path = tmp_path / "results.json"
        path.write_text(content)
        with pytest.raises(ValueError, match="no results to go on with"):
            module["SavedResults"](path, {}, resume=True)

    def test_epochs_that_ran_again_count_once(self, module, tmp_path):
        path = tmp_path / "history.csv"
        path.write_text("epoch,loss\n0,3\n1,2\n1,1\n2,0\n")
        assert module["read_history"](path)["loss"] == [3, 1, 0]


class TestAccuracyOverEpsilon:
    @pytest.mark.exhaustive
    def test_it_goes_on(self, tmp_path):
        flags = ("--seeds=1", "--epochs=2", f"--output_dir={tmp_path}")
        text = run("accuracy_over_epsilon", "--target_epsilon=8", *flags)
        assert re.search(r"^ +8 +[\d.]+ +[\d.]+ ± 0.0 %$", text, re.M)
        assert (tmp_path / "accuracy_over_epsilon.png").read_bytes().startswith(PNG)
        more = ("--target_epsilon=8", "--target_epsilon=4", "--resume")
        text = run("accuracy_over_epsilon", *more, *flags)
        assert text.count("%, before") == 2
        assert text.count(" s so far") == 1

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--target_epsilon=0", "`target_epsilon` must be positive"),
            ("surplus", "everything is a flag"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message, tmp_path):
        folder = f"--output_dir={tmp_path}"
        check_refusal("accuracy_over_epsilon", flag, folder, message=message)


class TestTrainDigits:
    def check_files(self, folder):
        assert (folder / "history.png").read_bytes().startswith(PNG)
        rows = history(folder / "history.csv")
        assert len(rows) == 60
        epsilons = [float(row["epsilon"]) for row in rows]
        assert epsilons == sorted(epsilons)
        assert {"accuracy", "val_accuracy"} <= set(rows[0])
        for name in ("digits.keras", "digits_private.keras"):
            assert (folder / name).is_file()
        exported = folder / "digits" / "10"  # There is a version 9.
        assert (exported / "saved_model.pb").is_file()
        report = exported / "assets.extra" / "privacy_report.json"
        assert json.loads(report.read_text())["epsilon"] <= epsilons[-1] + 1e-3

    @pytest.mark.exhaustive
    def test_full(self, tmp_path):
        (tmp_path / "digits" / "9").mkdir(parents=True)
        text = run("train_digits", f"--output_dir={tmp_path}")
        private, plain = percentages(
            "Test accuracy: % private, % without privacy", text
        )
        assert private > 0.9
        assert plain > 0.96
        epsilon = number(r"Epsilon: ([\d.]+) at delta", text)
        assert 3.45 < epsilon <= 3.5
        assert "differentially private" in text
        assert str(tmp_path) in text
        self.check_files(tmp_path)
        program = (
            "import sys, keras\n"
            f"model = keras.saving.load_model({str(tmp_path / 'digits.keras')!r})\n"
            "assert model.output_shape == (None, 10)\n"
            "assert 'tfdp' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--target_epsilon=-1", "`target_epsilon` must be positive"),
            ("surplus", "surplus"),
        ],
    )
    def test_wrong_flag_is_explained(self, tmp_path, flag, message):
        check_refusal("train_digits", f"--output_dir={tmp_path}", flag, message=message)


class TestGanDigits:
    @pytest.mark.slow
    def test_few_steps(self, tmp_path):
        # Of small epsilons less time is taken to count.
        flags = ("--epochs=10", "--target_epsilon=0.3", f"--output_dir={tmp_path}")
        text = run("gan_digits", *flags)
        percentages("only samples: % private, % without privacy", text)
        assert 0.29 < number(r"Epsilon: ([\d.]+) at delta 0.0001", text) <= 0.3
        assert re.search(r"30 steps, noise multiplier [\d.]+, Poisson-sampled", text)
        assert (tmp_path / "samples.png").read_bytes().startswith(PNG)
        # Nobody needs tfdp to draw from it.
        program = (
            "import sys, keras, numpy as np\n"
            "sys.modules['tfdp'] = None\n"
            f"model = keras.saving.load_model({str(tmp_path / 'generator.keras')!r})\n"
            "images = model.predict([np.zeros((3, 8)), np.arange(3)], verbose=0)\n"
            "assert images.shape == (3, 8, 8, 1)\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--target_epsilon=-1", "`target_epsilon` must be positive"),
            ("--l2_norm_clip=0", "`l2_norm_clip` must be positive"),
            ("surplus", "everything is a flag"),
        ],
    )
    def test_wrong_flag_is_explained(self, tmp_path, flag, message):
        check_refusal("gan_digits", f"--output_dir={tmp_path}", flag, message=message)


class TestSamplingSchemes:
    @pytest.mark.slow
    def test_small(self, tmp_path):
        flags = ("--seeds=1", "--epochs=2", "--target_epsilon=1")
        text = run("sampling_schemes", *flags, f"--output_dir={tmp_path}")
        found = re.findall(r"^ +(\w+) +([\d.]+) +([\d.]+) +[\d.]+ ± 0.0 %$", text, re.M)
        assert [name for name, _, _ in found] == ["poisson", "balls_in_bins", "shuffle"]
        noise = {name: float(multiplier) for name, multiplier, _ in found}
        assert max(noise["poisson"], noise["balls_in_bins"]) < noise["shuffle"]
        assert all(0.98 < float(epsilon) <= 1 for _, _, epsilon in found)
        users = re.findall(r"^ +(\d+) rows of a user.* ([\d.]+) +([\d.]+)$", text, re.M)
        assert [int(most) for most, _, _ in users] == [1, 2, 5, 10, 20, 50]
        assert all(float(bound) <= float(group) for _, bound, group in users)
        # All of a user's rows, at the price of one row each.
        assert number(r"users as units.* ([\d.]+)\n", text) == float(users[0][1])
        assert (tmp_path / "sampling_schemes.png").read_bytes().startswith(PNG)

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--target_epsilon=0", "`target_epsilon` must be positive"),
            ("--delta=1", "Received: delta=1"),
            ("surplus", "everything is a flag"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message, tmp_path):
        folder = f"--output_dir={tmp_path}"
        check_refusal("sampling_schemes", flag, folder, message=message)


class TestPrivateExperiment:
    @pytest.mark.slow
    def test_small(self, tmp_path):
        text = run(
            "private_experiment",
            "--mean_tries=1.1",
            "--noguesses",
            f"--output_dir={tmp_path}",
            # It starts a process itself.
            start=start_afresh,
        )
        whole = number(r"([\d.]+) for all of it", text)
        assert f"({whole:.3f}, 0.0001)-differentially private" in text
        of_search = number(r"([\d.]+) of it for the search", text)
        # One try with the release that scores it.
        steps = tfdp.accounting.PoissonSteps(120, 5.0, 1437, 256)
        score = tfdp.accounting.UnamplifiedSteps(1, 20.0)
        alone = tfdp.accounting.Ledger((steps, score)).epsilon(1e-4)
        assert number(r"would have ([\d.]+),", text) == pytest.approx(alone, abs=1e-3)
        assert whole > of_search > alone
        assert text.count("nothing found") == 1
        report = tmp_path / "digits" / "1" / "assets.extra" / "privacy_report.json"
        exported = json.loads(report.read_text())
        assert exported["epsilon"] == pytest.approx(whole, abs=1e-3)
        assert "By a private search" in exported["answers"]["settings"]
        assert [each["audit"] for each in exported["audits"]] == [
            "replay",
            "membership",
        ]
        assert f"({whole:.3f}, 0.0001)" in (tmp_path / "MODEL_CARD.md").read_text()

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--mean_tries=0.5", "`mean` must be"),
            ("surplus", "everything is a flag"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message, tmp_path):
        folder = f"--output_dir={tmp_path}"
        check_refusal("private_experiment", flag, folder, message=message)


class TestFromScratch:
    def check(self, text):
        differences = re.findall(r"after \d+ steps?: ([\d.e+-]+)", text)
        assert len(differences) == 2
        assert all(float(difference) < 1e-5 for difference in differences)
        assert "ratio" in text
        assert "without clipping 1e+06" in text
        assert re.search(r"test accuracy [\d.]+%, epsilon [\d.]+ at delta", text)

    @pytest.mark.slow
    def test_digits(self):
        self.check(run("from_scratch", "--textbook_steps=2", "--epochs=1"))


class TestFinetuneLlm:
    small = (
        *("--epochs=1", "--pretrain_steps=4", "--sequences=60", "--batch_size=16"),
        *("--length=8", "--delta=1e-3", "--target_epsilon=1"),
    )

    def check(self, folder, *flags):
        pytest.importorskip("keras_hub")
        text = run("finetune_llm", *self.small, f"--output_dir={folder}", *flags)
        assert re.search(
            r"docstrings: [\d.]+ before, [\d.]+ private, [\d.]+ without privacy", text
        )
        assert 0.97 < number(r"Epsilon: ([\d.]+) at delta 0.001", text) <= 1
        assert "(1.000, 0.001)-differentially private" in text
        assert (folder / "perplexity.png").read_bytes().startswith(PNG)
        assert (folder / "adapters.lora.h5").is_file()
        (row,) = history(folder / "history.csv")
        assert float(row["epsilon"]) <= 1

    @pytest.mark.exhaustive
    def test_from_nothing(self, tmp_path):
        self.check(tmp_path)

    @pytest.mark.slow
    def test_a_preset(self, tmp_path):
        """A folder stands in for weights that would be downloaded."""
        hub = pytest.importorskip("keras_hub")
        tokens = ["<|endoftext|>", *bytes_as_characters()]
        tokenizer = hub.models.GPT2Tokenizer(
            {token: number for number, token in enumerate(tokens)}, ["t h"]
        )
        backbone = hub.models.GPT2Backbone(len(tokens), 1, 2, 8, 16)
        packer = hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=9)
        model = hub.models.GPT2CausalLM(backbone=backbone, preprocessor=packer)
        model.save_to_preset(str(tmp_path / "preset"))
        self.check(tmp_path, f"--preset={tmp_path / 'preset'}")

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("surplus", "everything is a flag"),
            *(
                pytest.param(flag, message, marks=pytest.mark.slow)
                for flag, message in (
                    ("--target_epsilon=0", "`target_epsilon` must be positive"),
                    ("--l2_norm_clip=0", "`l2_norm_clip` must be"),
                    ("--rank=0", "rank"),
                    ("--length=1", "length"),
                )
            ),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message, tmp_path):
        folder = f"--output_dir={tmp_path}"
        check_refusal("finetune_llm", flag, folder, message=message)


def bytes_as_characters():
    """What the tokenizer of GPT-2 makes of each byte, but for the merged ones."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return ["th", *map(chr, shown), *(chr(256 + n) for n in range(256 - len(shown)))]


class TestFinetuneText:
    small = ("--pretrain_steps=4", "--epochs=1", "--width=8", "--blocks=2")

    @pytest.mark.slow
    def test_generated(self, tmp_path):
        text = run(
            "finetune_text",
            *(*self.small, "--method=lora", "--target_epsilon=0.3"),
            f"--output_dir={tmp_path}",
        )
        percentages("Test accuracy: % private, % without privacy", text)
        assert number(r"Epsilon: ([\d.]+) at delta 1e-05", text) <= 0.3
        assert (tmp_path / "history.png").read_bytes().startswith(PNG)
        # From strings to scores, where neither tfdp nor Keras is.
        program = (
            "import sys\n"
            "sys.modules |= {'tfdp': None, 'keras': None}\n"
            "import tensorflow as tf\n"
            f"served = tf.saved_model.load({str(tmp_path / 'reviews' / '1')!r})\n"
            "served = served.signatures['serving_default']\n"
            "scores = served(review=tf.constant(['a good film', 'bad']))\n"
            "assert scores['bad_and_good'].shape == (2, 2)\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
        report = tmp_path / "reviews" / "1" / "assets.extra" / "privacy_report.json"
        found = json.loads(report.read_text())
        assert found["epsilon"] == pytest.approx(0.3, abs=0.001)
        assert any("embeddings" in name for name in found["not_trained"])

    @pytest.mark.exhaustive
    def test_data_of_a_folder(self, tmp_path):
        """Private reviews of one kind, public ones of the other."""
        (tmp_path / "sst2").mkdir()
        for split in ("train", "dev"):
            lines = "".join(
                f"a {word} film\t{word == 'good'}\n"
                for word in [
                    "good",
                    "bad",
                ]
                * 20
            )
            lines = lines.replace("True", "1").replace("False", "0")
            (tmp_path / "sst2" / f"sst2_{split}.tsv").write_text(lines)
        for split in ("train", "test"):
            rows = [
                json.dumps({"text": "a film<br />", "label": n % 2}) for n in range(40)
            ]
            with gzip.open(tmp_path / f"imdb_{split}.jsonl.gz", "wt") as file:
                file.write("\n".join(rows))
        text = run(
            "finetune_text",
            *(*self.small, "--method=last", "--dataset=sst2", f"--data_dir={tmp_path}"),
            *("--batch_size=10", f"--output_dir={tmp_path / 'runs'}"),
        )
        percentages("Test accuracy: % private, % without privacy", text)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--target_epsilon=0", "`target_epsilon` must be positive"),
            ("--l2_norm_clip=nan", "`l2_norm_clip` must be positive"),
            ("--dataset=sst2", "`data_dir` is missing"),
            ("--width=10", "`width` must be a multiple of 4"),
            ("surplus", "surplus"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message):
        check_refusal("finetune_text", flag, message=message)


class TestMnist:
    @pytest.mark.slow
    def test_quick(self, small_mnist, tmp_path):
        text = run(
            "mnist",
            "--row=3",
            "--epochs=2",
            f"--data_dir={small_mnist}",
            f"--output_dir={tmp_path / 'runs'}",
            # As a user starts it.
            start=start_afresh,
        )
        percentages("Test accuracy: %, published %", text)
        rdp = number(r"([\d.]+) \(RDP\)", text)
        assert 0 < number(r"([\d.]+) \(PLD\)", text) <= rdp
        folder = tmp_path / "runs" / "row3"
        assert (folder / "history.png").read_bytes().startswith(PNG)
        assert (folder / "mnist.keras").is_file()
        assert len(history(folder / "history.csv")) == 2

    @pytest.mark.slow
    def test_row_1(self, real_mnist, tmp_path):
        folders = f"--data_dir={real_mnist}", f"--output_dir={tmp_path}"
        text = run("mnist", *folders, start=start_afresh)
        reached, published = percentages("Test accuracy: %, published %", text)
        assert published == 0.95
        # Runs differ from each other by some tenths of a percent.
        assert reached > 0.946
        assert number(r"([\d.]+) \(RDP\)", text) == pytest.approx(0.956, abs=0.005)
        assert number(r"([\d.]+) \(PLD\)", text) == pytest.approx(0.866, abs=0.005)

    def test_missing_data_are_explained(self, tmp_path):
        check_refusal("mnist", f"--data_dir={tmp_path}", message="there is no")


class TestClipSchedules:
    names = ("small", "large", "switch", "polynomial", "quantile", "median")

    def table(self, text):
        """The rows of the table by name, as numbers."""
        rows = {}
        for line in text[text.index("not private:") :].splitlines():
            name, *cells = line.split() or [""]
            if name in self.names:
                rows[name] = [float(cell.rstrip("%")) for cell in cells]
        return rows

    def check(self, text, folder, target_epsilon, epochs):
        table = self.table(text)
        assert tuple(table) == self.names
        assert "neither publish them" in text
        assert (folder / "comparison.png").read_bytes().startswith(PNG)
        for name, (_, epsilon, clip, *nonprivate) in table.items():
            assert epsilon <= target_epsilon
            assert clip > 0
            assert np.isfinite(nonprivate).all()
            rows = history(folder / f"{name}.csv")
            # The histograms of `median` may use the budget up before the last epoch.
            assert len(rows) == epochs or name == "median"
            assert all(float(row["epsilon"]) <= target_epsilon for row in rows)
            assert float(rows[-1]["l2_norm_clip"]) == pytest.approx(clip, rel=0.01)
        return table

    @pytest.mark.slow
    def test_all(self, tmp_path):
        text = run(
            "clip_schedules",
            "--epochs=2",
            "--target_epsilon=2",
            "--power=2",
            f"--output_dir={tmp_path}",
        )
        table = self.check(text, tmp_path, 2.0, epochs=2)
        # One step is a good part of a budget for so few.
        assert all(row[1] > 1.5 for row in table.values())
        assert number(r"together cost (\d+\.\d+)", text) > 2.0
        assert table["small"][2] == table["switch"][2] < table["large"][2]
        c = [float(row["l2_norm_clip"]) for row in history(tmp_path / "polynomial.csv")]
        assert c == sorted(c, reverse=True)

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--target_epsilon=-1", "`target_epsilon` must be positive"),
            ("--data_dir=nowhere", "there is no nowhere"),
            ("surplus", "surplus"),
        ],
    )
    def test_wrong_flag_is_explained(self, tmp_path, flag, message):
        check_refusal(
            "clip_schedules", f"--output_dir={tmp_path}", flag, message=message
        )


class TestFederatedMnist:
    """A thousand clients a round, of few images."""

    RUNS = (
        "without-privacy",
        "fixed-0.05",
        "switch-0.2",
        "quantile-0.5",
        "median-0.01",
    )

    @pytest.mark.slow
    def test_runs_are_compared_and_go_on(self, small_mnist, tmp_path):
        arguments = [
            *("--rounds=10", "--evaluate_every=5", f"--data_dir={small_mnist}"),
            f"--output_dir={tmp_path}",
        ]
        runs = [f"--runs={name}" for name in self.RUNS]
        text = run("federated_mnist", *runs, *arguments)
        for name in self.RUNS:
            assert number(rf"(?m)^{name} +([\d.]+) ", text) >= 0
            rows = history(tmp_path / "compact-10" / name / "0" / "history.csv")
            # Every tenth is evaluated, for its norms.
            assert [row["round"] for row in rows] == [str(n) for n in range(1, 11)]
            norms = np.load(tmp_path / "compact-10" / name / "0" / "norms_4.npy")
            assert norms.shape == (1000,)
        assert "(8.000, 1e-07)-locally" in text
        assert text.count("not purely local") == 2
        assert "not differentially private" in text
        for figure in ("fixed", "scheduled", "adaptive", "norms", "histograms"):
            assert (tmp_path / f"{figure}.png").read_bytes().startswith(PNG)
        # The first trial is not run again.
        more = run("federated_mnist", "--runs=switch-0.2", *arguments, "--trials=2")
        assert " ± " in more
        assert (tmp_path / "compact-10" / "switch-0.2" / "1" / "state.npz").is_file()

    @pytest.mark.exhaustive
    def test_large_network(self, small_mnist, tmp_path):
        text = run(
            "federated_mnist",
            *("--runs=polynomial-0.05-0.5", "--rounds=10", "--network=large"),
            *(f"--data_dir={small_mnist}", f"--output_dir={tmp_path}"),
        )
        assert number(r"polynomial-0.05-0.5 .* ([\d.e-]+)\n", text) == pytest.approx(
            0.05 * 0.1**0.5, rel=1e-3
        )

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--runs=fixed-2", "fixed-2"),
            ("--rounds=0", "rounds"),
            ("--data_dir=nowhere", "there is no nowhere"),
            ("extra", "everything is a flag"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message):
        check_refusal("federated_mnist", flag, message=message)


class TestBatchSizes:
    @pytest.mark.slow
    def test_larger_batches_have_less_bias(self, tmp_path):
        flags = (
            *("--batch_size=32", "--batch_size=512", "--batches=4"),
            *("--epochs=0", "--epochs=1", f"--output={tmp_path / 'plot.png'}"),
        )
        out = run("batch_sizes", *flags)
        small, large = (
            np.array(
                [
                    row.split()
                    for row in re.findall(rf"^ +{size}((?: +[\d.]+){{6}})$", out, re.M)
                ],
                float,
            )
            for size in (32, 512)
        )
        assert small.shape == large.shape == (2, 6)  # After no epoch, and after one.
        assert (large[:, 0] < small[:, 0]).all()
        assert (large[:, 3:] > small[:, 3:]).all()
        assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
        again = run("batch_sizes", *flags, "--resume")
        assert "Epoch" not in again
        assert out.splitlines()[-4:] == again.splitlines()[-4:]

    def test_a_folder_without_its_data_set(self):
        check_refusal("batch_sizes", "--data_dir=.", message="Use --dataset=mnist")

    def test_more_images_than_there_are(self):
        check_refusal(
            *("batch_sizes", "--batch_size=5000", "--epochs=1"),
            message="there are 1797 images only. Received: batch_size=5000",
        )


class TestCifar10Bam:
    @pytest.fixture
    def folder(self, tmp_path, rng):
        """A folder with a few random images, as npz and as batches of ImageNet32."""
        arrays, sizes = {}, {"train": 96, "test": 32}
        for split, rows in sizes.items():
            arrays[f"x_{split}"] = rng.integers(0, 256, (rows, 32, 32, 3), np.uint8)
            arrays[f"y_{split}"] = rng.integers(0, 10, (rows, 1), np.uint8)
        np.savez(tmp_path / "cifar10.npz", **arrays)
        for name, split in (("train_data_batch_1", "train"), ("val_data", "test")):
            images = arrays[f"x_{split}"].transpose(0, 3, 1, 2)
            labels = (arrays[f"y_{split}"].ravel() + 1).tolist()
            batch = {"data": images.reshape(len(images), -1), "labels": labels}
            (tmp_path / name).write_bytes(pickle.dumps(batch))
        return tmp_path

    def small(self, folder, *flags):
        return run(
            "cifar10_bam",
            *("--batch_size=32", "--epochs=2", "--every=2", "--multiplicity=2"),
            f"--data_dir={folder}",
            f"--output={folder / 'plot.png'}",
            *flags,
        )

    def check(self, folder, text, cells):
        found = re.findall(
            r"^(\d+) +(\w+) +([\d.]+ \+- [\d.]+) +([\d.]+) +[\d.]+ \+- [\d.]+ +(\S+)$",
            text,
            re.M,
        )
        assert [(row[0], row[1], row[3]) for row in found] == cells
        for row in found:
            if row[1] == "dp_sgd":
                assert row[4] == "-"
            else:
                assert -1 <= float(row[4]) <= 1
        assert (folder / "plot.png").read_bytes().startswith(PNG)

    @pytest.mark.slow
    def test_methods_are_compared(self, folder):
        methods = ("--methods=dp_sgd", "--methods=bam")
        text = self.small(folder, *methods, "--seeds=1", "--delta=1e-3")
        cells = [("2", "dp_sgd", "67.1"), ("2", "bam", "68.2")]
        self.check(folder, text, cells)
        assert len(re.findall(r"^epsilon (1\.9\d|2\.00), ", text, re.M)) == 2
        assert re.search(r"bias of bam below that of dp_sgd with [01] of 1 seeds", text)

    @pytest.mark.exhaustive
    def test_only_what_is_needed_is_decoded_and_runs_are_kept(self, folder):
        arrays = np.load(folder / "cifar10.npz")
        coded = {}
        for split in ("train", "test"):
            files = [
                tf.io.encode_jpeg(image).numpy() for image in arrays[f"x_{split}"][:40]
            ]
            # What lies behind them is no image.
            files.append(b"no image")
            coded[f"{split}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
            coded[f"{split}_offsets"] = np.cumsum([0, *map(len, files)])
            coded[f"y_{split}"] = arrays[f"y_{split}"][:41]
        (folder / "cifar10.npz").unlink()
        np.savez(folder / "cifar10_jpeg.npz", **coded)
        flags = ("--images=36", "--test_images=8", "--methods=dp_sgd", "--delta=1e-3")
        text = self.small(folder, *flags, "--seeds=1")
        assert "  epoch 2/2: test accuracy" in text
        text = self.small(folder, *flags, "--seeds=1", "--resume")
        assert "run before" in text
        assert "  epoch" not in text

    @pytest.mark.exhaustive
    def test_a_run_that_was_killed_goes_on_with_its_epoch(self, folder):
        flags = ("--methods=sat", "--seeds=1", "--delta=1e-3", "--epochs=3")
        command = [
            *(sys.executable, "-u", ROOT / "examples" / "cifar10_bam.py"),
            *("--batch_size=32", "--every=2", f"--data_dir={folder}", *flags),
            f"--output={folder / 'plot.png'}",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                if "epoch 2/3" in line:
                    process.kill()
        [killed] = folder.glob("plot.under_way/*/*")
        assert (killed / "looks.json").is_file()
        finished = subprocess.run(
            [*command, "--resume"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        # Where it was killed decides whether the second epoch had been saved.
        assert "epoch 1/3" not in finished.stdout
        assert "epoch 3/3" in finished.stdout
        [values] = json.loads((folder / "plot.json").read_text())["results"].values()
        epsilon, accuracy, *looks = values
        assert len(accuracy) == 3
        # A step was lost at least where the second epoch was not saved; none gained.
        assert ("was killed on its way" in finished.stdout) == (epsilon > 2)
        steps = 3 * (len(np.load(folder / "cifar10.npz")["x_train"]) // 32)
        assert {len(each) for each in looks} <= {steps // 2, steps // 2 + 1}
        assert not list(folder.glob("plot.under_way/*/*"))

    @pytest.mark.exhaustive
    def test_imagenet32(self, folder):
        flags = ("--dataset=imagenet32", "--target_epsilon=10", "--delta=1e-3")
        text = self.small(folder, *flags, "--methods=sat", "--seeds=1")
        self.check(folder, text, [("10", "sat", "14.7")])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--radius=-1", "`radius` must be"),
            ("--learning_rate=nan", "`learning_rate` must be positive"),
        ],
    )
    def test_wrong_flag_is_explained(self, folder, flag, message):
        check_refusal("cifar10_bam", f"--data_dir={folder}", flag, message=message)

    def test_missing_data_are_explained(self, tmp_path):
        check_refusal(
            "cifar10_bam", f"--data_dir={tmp_path}", message="Leave --data_dir out"
        )


class TestDpviBreastCancer:
    @pytest.mark.slow
    def test_epsilons_are_compared(self, tmp_path):
        plot = tmp_path / "plot.png"
        text = run(
            "dpvi_breast_cancer",
            "--epsilon=10",
            "--trials=2",
            "--draws=2",
            f"--output={plot}",
        )
        assert plot.read_bytes().startswith(PNG)
        assert "398 patients, 500 steps" in text
        rows = {
            row[0]: row
            for row in map(str.split, text.splitlines())
            if "±" in row and row[0] in {"none", "10.0"}
        }
        assert set(rows) == {"none", "10.0"}
        assert float(rows["none"][2]) > 88
        assert float(rows["10.0"][2]) > 85
        # The textbook's noise for 10, and what it costs.
        assert float(rows["10.0"][-2]) == pytest.approx(0.378, abs=1e-3)
        assert 60 < float(rows["10.0"][-1]) < 75

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("surplus", "everything is a flag"),
            ("--epsilon=0", "`target_epsilon` must be positive"),
            ("--epsilon=nan", "`target_epsilon` must be positive"),
            ("--trials=0", "trials"),
            ("--features=some", "features"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message):
        check_refusal("dpvi_breast_cancer", flag, message=message)


class TestDpviCoverage:
    @pytest.mark.slow
    def test_intervals_are_compared_and_go_on(self, tmp_path):
        plot = tmp_path / "plot.png"
        flags = ("--epsilon=1", f"--output={plot}")
        run("dpvi_coverage", "--datasets=1", *flags)
        text = run("dpvi_coverage", "--datasets=2", "--resume", *flags)
        assert "epsilon 1.0, data set 0" not in text
        assert plot.read_bytes().startswith(PNG)
        widths = dict(
            re.findall(r"(?m)^ +1.0 (\w.*?) {2,}.* ([\d.]+)$", text),
        )
        assert list(widths) == ["begins at 0.1", "begins at the prior", "averaged"]
        # Noise widens what knows of it.
        assert float(widths["averaged"]) > float(widths["begins at 0.1"])

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("surplus", "everything is a flag"),
            ("--epsilon=nan", "`target_epsilon` must be positive"),
            ("--datasets=0", "datasets"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message):
        check_refusal("dpvi_coverage", flag, message=message)


class TestOnePosteriorSample:
    @pytest.mark.slow
    def test_draws_are_compared(self, tmp_path):
        plot = tmp_path / "plot.png"
        flags = ("--epsilon=1", f"--output={plot}")
        text = run("one_posterior_sample", "--trials=1", *flags)
        assert "This draw is 1.000-differentially private" in text
        assert re.search(r"^one draw +1 +0 +replace-one +[\d.]+ %$", text, re.M)
        assert re.search(r"^DP-SGD +1 +0.001 +add-or-remove +[\d.]+ %$", text, re.M)
        assert plot.read_bytes().startswith(PNG)

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("surplus", "everything is a flag"),
            ("--epsilon=0", "`target_epsilon` must be positive"),
        ],
    )
    def test_wrong_flag_is_explained(self, flag, message, tmp_path):
        path = f"--output={tmp_path / 'plot.png'}"
        check_refusal("one_posterior_sample", flag, path, message=message)

    @pytest.mark.exhaustive
    def test_a_chain_is_refused(self, tmp_path):
        flags = ("--epsilon=9", "--trials=1", f"--output={tmp_path / 'plot.png'}")
        process = start("one_posterior_sample", *flags)
        assert process.returncode == 1
        assert "must be exact to have an epsilon" in process.stderr
