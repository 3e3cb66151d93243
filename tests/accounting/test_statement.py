import dataclasses
import json
import math
import re
import warnings

import pytest

from tfdp.accounting.ledger import Ledger, compose
from tfdp.accounting.segments import (
    PoissonSteps,
    Segment,
    ShuffledPasses,
    UnamplifiedSteps,
)
from tfdp.accounting.statement import privacy_report, privacy_statement
from tfdp.accounting.tradeoff import true_positive_rate
from tfdp.accounting.users import user_epsilon
from tfdp.compat.tf_privacy_accounting import compute_dp_sgd_privacy_statement
from tfdp.sampling import Poisson, PoissonUsers

# Much noise, which makes it cheap to account for.
POISSON = PoissonSteps(14_063, 8.0, 60_000, 256)
SHUFFLED = ShuffledPasses(60, 16.0, 60_000, 256)
PUBLISHED = PoissonSteps(875, 10.0, 50_000, 4096)
UNKNOWN = UnamplifiedSteps(10, 9.0)
TRUTH = "this run's were not"


def rows(text):
    """Return the table of a statement: label -> (RDP, PLD)."""
    found = re.findall(r"^ +(\S+) +(\S+)  (w\w+ .*)$", text, re.M)
    return {label: (float(rdp), float(pld)) for rdp, pld, label in found}


def flat(ledger, delta=1e-5):
    return " ".join(privacy_statement(ledger, delta).split())


@pytest.mark.smoke
def test_a_poisson_run():
    text = privacy_statement(Ledger((PUBLISHED,)), 1e-5)
    assert text.startswith("This training is (0.903, 1e-05)-differentially private.\n")
    table = rows(text)
    assert table["what ran"] == pytest.approx((0.988, 0.903), rel=2e-3)
    assert table[f"would hold for shuffled batches; {TRUTH}"][1] > 3.5
    assert len(table) == 2


@pytest.mark.slow
def test_a_shuffled_run_is_not_reported_as_poisson():
    ledger = Ledger((SHUFFLED,))
    text = privacy_statement(ledger, 1e-5)
    table = rows(text)
    poisson = table[f"would hold for Poisson-sampled batches; {TRUTH}"]
    assert table["what ran"][1] == round(ledger.epsilon(1e-5), 3) > 10 * poisson[1]
    assert f"({table['what ran'][1]}, 1e-05)" in text
    as_poisson = Ledger((PoissonSteps(14_063, 16.0, 60_000, 256),))
    assert poisson[0] == round(as_poisson.epsilon(1e-5, "RDP"), 3)
    assert len(table) == 2


@pytest.mark.parametrize("steps", [1, 235, 1000, 14_063])
def test_a_poisson_run_has_the_figure_of_tensorflow_privacys_statement(steps):
    ours = privacy_statement(Ledger((POISSON.with_count(steps),)), 1e-5)
    theirs = compute_dp_sgd_privacy_statement(
        60_000, 256, steps * 256 / 60_000, 8.0, 1e-5, used_microbatching=False
    )
    poisson = re.search(r"Poisson-sampled batches: +(\S+)", theirs).group(1)
    shuffled = re.search(r"Each example once an epoch: +(\S+)", theirs).group(1)
    assert f" {poisson} " in ours
    assert rows(ours)["what ran"][0] == float(poisson)
    assert rows(ours)[f"would hold for shuffled batches; {TRUTH}"][0] == float(shuffled)


def test_unknown_batches_have_no_other_row():
    text = flat(Ledger((UNKNOWN,)))
    assert "would hold" not in text
    assert "assumed that a batch holds a row at most once" in text
    assert "counts in full" in text


def test_microbatches_have_no_poisson_row():
    text = flat(Ledger((ShuffledPasses(3, 4.0, 60_000, 256, examples_per_unit=8),)))
    assert "would hold" not in text
    assert "Groups of 8 examples" in text
    assert "doubles the sensitivity" in text
    assert "Groups of" not in flat(Ledger((SHUFFLED,)))


@pytest.mark.slow
def test_runs_of_both_kinds_have_both_other_rows():
    table = rows(privacy_statement(Ledger((POISSON, SHUFFLED)), 1e-5))
    some = "not all of this run's were"
    assert list(table) == [
        "what ran",
        f"would hold for Poisson-sampled batches; {some}",
        f"would hold for shuffled batches; {some}",
    ]


def test_figures_that_do_not_hold_come_last_and_apart():
    text = privacy_statement(Ledger((POISSON,)), 1e-5)
    *_, last = text.split("\n\n")
    assert last.startswith("For comparison only: figures of trainings that did not run")
    assert list(rows(last)) == [f"would hold for shuffled batches; {TRUTH}"]
    assert "would hold" not in text.removesuffix(last)
    assert list(rows(text.removesuffix(last))) == ["what ran"]


@pytest.mark.parametrize("ledger", [Ledger(), Ledger((UNKNOWN,))])
def test_nothing_is_compared_where_nothing_else_could_have_run(ledger):
    assert privacy_statement(ledger, 1e-5).split("\n\n")[-1].startswith("Not covered")


def test_it_says_what_epsilon_means_to_a_person():
    found = true_positive_rate(Ledger((PUBLISHED,)), 0.01)
    shown = float(re.search(r"at most (\S+) in 100 of", flat(Ledger((PUBLISHED,))))[1])
    assert found <= shown / 100 < found + 0.001
    assert privacy_report(Ledger((PUBLISHED,)), 1e-5)["best_attack"] == {
        "false_positive_rate": 0.01,
        "true_positive_rate": found,
    }
    assert "at most 1 in 100 of" in flat(Ledger())
    assert "nothing keeps them from" in flat(Ledger((UnamplifiedSteps(1, 0),)))


def test_what_is_one_person():
    users = Ledger((Segment(PoissonUsers(1000, 50, 2), 10, 8.0),))
    assert "whether all your data were used" in flat(users)
    assert "whether your row was used" in flat(Ledger((POISSON,)))
    both = Ledger((*users.segments, POISSON))
    assert "whether your row was used" in flat(both)
    for ledger, units in (
        (users, ["user"]),
        (both, ["example", "user"]),
        (Ledger(), ["example"]),
    ):
        assert privacy_report(ledger, 1e-5)["units"] == units


def test_whoever_trains_is_trusted():
    assert "Trust model: Central. Whoever trains has the rows" in flat(Ledger())
    assert report()["trust_model"].startswith("Central")


def test_batches_larger_than_the_data():
    run = Ledger((PoissonSteps(3, 4.0, 100, 256),))
    table = rows(privacy_statement(run, 1e-5))
    assert table["what ran"] == table[f"would hold for shuffled batches; {TRUTH}"]


@pytest.mark.slow
def test_everything_that_is_public_is_printed():
    text = flat(Ledger((POISSON, SHUFFLED, UNKNOWN)))
    for fact in (
        "14063 steps, noise multiplier 8",
        "60000 examples",
        "256 of",
        "sampling probability 0.00426667",
        "60 passes, noise multiplier 16",
        "10 steps, noise multiplier 9",
        "zero-out",
        "one row of x",
        "(`privacy_statement(..., max_examples_per_user=)` says how much)",
        "adding or removing",
    ):
        assert fact in text


def test_a_run_that_was_cut_short_states_what_was_planned():
    ledger = Ledger(
        (PUBLISHED.with_count(375),), cut_short=(PUBLISHED.with_count(500),)
    )
    text = privacy_statement(ledger, 1e-5)
    assert text.startswith("This training is (0.903, 1e-05)")
    assert rows(text)["what ran"][1] < rows(text)["what was planned"][1] == 0.903
    assert "- 375 steps" in text
    assert "- 875 steps" in text
    assert "stopped before its planned end" in flat(ledger)
    assert "planned" not in flat(Ledger((POISSON,)))


@pytest.mark.parametrize(
    ("noise", "sampling", "words"),
    [
        (True, False, "chosen for the noise and the masks of rows:"),
        (False, True, "chosen for the draws of batches:"),
        (
            True,
            True,
            "chosen for the noise and the masks of rows and the draws of batches:",
        ),
    ],
)
def test_fixed_seeds_are_told(noise, sampling, words):
    ledger = Ledger((POISSON,), (), noise, sampling)
    assert words in flat(ledger)
    assert "someone who does not know it" in flat(ledger)
    assert words in flat(compose(ledger, Ledger((UNKNOWN,))))
    assert "seed" not in flat(Ledger((POISSON,)))


@pytest.mark.parametrize("delta", [1 / 60_000, 0.1])
def test_a_large_delta_warns(delta):
    with pytest.warns(UserWarning, match="number_of_examples=60000") as record:
        text = privacy_statement(Ledger((POISSON,)), delta)
    assert record[0].filename == __file__
    assert "Warning: `delta` must be well below" in text


def test_a_small_delta_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        privacy_statement(Ledger((POISSON,)), 1.6e-5)
        privacy_statement(Ledger((UNKNOWN,)), 0.5)


def test_nothing_run():
    text = privacy_statement(Ledger((POISSON.with_count(0),)), 1e-5)
    assert "(0.000, 1e-05)" in text
    assert "What ran:\n- nothing\n" in text
    assert rows(text) == {"what ran": (0, 0)}


def test_no_noise_is_said_plainly():
    text = privacy_statement(Ledger((POISSON, UnamplifiedSteps(1, 0))), 1e-5)
    assert text.startswith("This training is not differentially private")


def test_what_is_not_covered_is_listed():
    text = flat(Ledger((POISSON,)))
    for words in (
        "metrics",
        "early stopping",
        "best checkpoint",
        "learning rate",
        "Validation rows",
        "vocabularies",
        "class weights",
        "oversampling",
        "hyperparameters",
        "loaded from elsewhere",
        "How long steps took",
        "Philox",
        "Mironov, 2012",
    ):
        assert words in text


@pytest.mark.parametrize("delta", [0, 1, float("nan")])
def test_a_wrong_delta_is_refused(delta):
    with pytest.raises(ValueError, match="Received: delta="):
        privacy_statement(Ledger(), delta)


# ---------------------------------------------------------------- the report


def report(*segments, **options):
    return privacy_report(Ledger(segments, **options), 1e-5)


def test_a_report_has_the_figures_of_the_statement():
    found = report(POISSON)
    text = privacy_statement(Ledger((POISSON,)), 1e-5)
    table = rows(text)
    for row in found["bounds"]:
        assert (row["RDP"], row["PLD"]) == pytest.approx(table[row["label"]], abs=1e-3)
    assert f"({found['epsilon']:.3f}, 1e-05)" in text
    for sentence in (*found["not_covered"], found["neighbouring_relation"]):
        assert sentence in " ".join(text.split())
    assert found["noise_multiplier"] == 8.0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_report_of_runs_of_several_kinds_has_the_smallest_noise():
    found = report(POISSON, SHUFFLED, UNKNOWN)
    kinds = ["poisson_steps", "shuffled_passes", "unamplified_steps"]
    assert found["sampling"] == [each["kind"] for each in found["segments"]] == kinds
    assert found["noise_multiplier"] == 8.0


def test_a_report_of_a_run_cut_short_proves_what_was_planned():
    found = report(POISSON.with_count(10), cut_short=(POISSON.with_count(90),))
    assert [row["holds"] for row in found["bounds"]] == [False, True, False]
    planned = Ledger((POISSON.with_count(100),))
    assert found["epsilon"] == planned.epsilon(1e-5)
    assert found["planned_segments"][0]["steps"] == 100


def test_a_report_without_noise_proves_nothing():
    found = report(POISSON, UnamplifiedSteps(1, 0.0))
    assert found["differentially_private"] is False
    assert found["epsilon"] is found["accountant"] is None
    assert all(row["RDP"] is row["PLD"] is None for row in found["bounds"])


def test_a_report_of_nothing():
    found = report()
    assert found["differentially_private"] is True
    assert (found["epsilon"], found["noise_multiplier"]) == (0.0, None)


@pytest.mark.parametrize("delta", [0, 1, float("nan"), -1])
def test_a_report_refuses_bad_deltas(delta):
    with pytest.raises(ValueError, match="`delta`"):
        privacy_report(Ledger(), delta)


def test_figures_of_users_count_looks_that_ended_a_run():
    run = PoissonSteps(128, 2.0, 1000, 10)
    looked = dataclasses.replace(Ledger().add(run), ended_by_release=True)
    looked = looked.add(Segment(run.scheme, 9, 50.0, "private_accuracy"))
    of_one = privacy_statement(looked, 1e-6, max_examples_per_user=1)
    stated = float(re.search(r"it is \((\S+),", filled_out(of_one)).group(1))
    assert stated >= looked.epsilon(looked.delta_at_end(1e-6)) - 1e-3


@pytest.mark.slow
def test_users_with_several_rows_have_a_figure_of_their_own():
    run = PoissonSteps(128, 2.0, 1000, 10)
    both = Ledger().add(run, ShuffledPasses(1, 30.0, 1000, 10))
    of_four = user_epsilon(run, 1e-6, max_examples_per_user=4, accountant="PLD")
    statement = privacy_statement(Ledger().add(run), 1e-6, max_examples_per_user=4)
    assert f"at most 4 rows, all of them together, it is ({of_four:.3f}," in filled_out(
        statement
    )
    assert of_four > Ledger().add(run).epsilon(1e-6)
    half = [
        user_epsilon(each, 5e-7, max_examples_per_user=4, accountant="PLD")
        for each in both.segments
    ]
    statement = privacy_statement(both, 1e-6, max_examples_per_user=4)
    assert f"it is ({sum(half):.3f}, 1e-06)" in filled_out(statement)
    nothing = Ledger().add(PoissonSteps(1, 0.0, 1000, 10))
    assert "Nothing is proven for all rows" in privacy_statement(
        nothing, 1e-6, max_examples_per_user=4
    )
    with pytest.raises(ValueError, match="max_examples_per_user"):
        privacy_statement(both, 1e-6, max_examples_per_user=0)


def filled_out(text):
    return " ".join(text.split())


RELEASES = Segment(Poisson(60_000, 60_000), 3, 20.0, "private_accuracy")


@pytest.mark.slow
def test_releases_are_told_and_stay_what_they_are():
    steps = PoissonSteps(234, 1.1, 60_000, 256)
    ledger = Ledger((RELEASES, steps))
    text = flat(ledger)
    assert RELEASES.words() in text
    assert "covered like the weights" in text
    assert "ended by a released value" not in text
    shuffled = Ledger((ShuffledPasses(1, 1.1, 60_000, 256), RELEASES))
    found = privacy_report(ledger, 1e-5)
    assert found["sampling"] == ["poisson_steps"]
    of_shuffled = next(row for row in found["bounds"] if "shuffled" in row["label"])
    assert of_shuffled["RDP"] == pytest.approx(shuffled.epsilon(1e-5, "RDP"))
    assert "this run's were not" in of_shuffled["label"]
    only = privacy_report(Ledger((RELEASES,)), 1e-5)
    assert [row["label"] for row in only["bounds"]] == ["what ran"]


def test_an_end_by_a_release_and_other_rows_are_told():
    ledger = Ledger((RELEASES,), ended_by_release=True, saw_other_rows=True)
    text = flat(ledger)
    assert "A run was ended by a released value. Steps that it did not take" in text
    assert "a ledger of their own" in text
    found = privacy_report(ledger, 1e-5)
    # Three releases, and nobody knows what other rows have said.
    share = 6 / (math.pi * 3) ** 2
    assert found["epsilon"] == pytest.approx(ledger.epsilon(1e-5 * share))
    assert found["epsilon"] > ledger.epsilon(1e-5)
    alone = true_positive_rate(ledger, 0.01 / 3)
    assert found["best_attack"]["true_positive_rate"] == pytest.approx(3 * alone)
    assert found["ended_by_release"]
    assert found["saw_other_rows"]
