"""A box has a cross if its line is known and as it should be."""

import re

import pytest

from tfdp.accounting import PoissonSteps, UnamplifiedSteps
from tfdp.reports.nist import checklist


def boxes(text):
    found = re.findall(r"^- \[(.)\] \*\*(.+?)\*\*: (.+)$", text, re.M)
    return {title: (box == "x", line) for box, title, line in found}


def test_it_has_the_guidelines_topics(facts):
    text = checklist(facts())
    assert text.startswith("# Differential privacy of `small`: a checklist\n")
    assert "NIST SP 800-226" in text
    for topic in (
        "Privacy parameters",
        "Unit of privacy",
        "Several releases",
        "Algorithms and their correctness",
        "Utility and bias",
        "Queries and trust",
        "Side channels",
        "Security of the data and access to them",
        "Exposure by data collection",
    ):
        assert f"\n## {topic}\n\n- [" in text
    assert len(boxes(text)) == text.count("- [")


def test_what_is_known_has_a_cross_and_blanks_have_none(facts):
    for done, line in boxes(checklist(facts())).values():
        assert done != ("____" in line)


@pytest.mark.parametrize(
    ("options", "title", "words"),
    [
        ({"plain_steps": 3}, "Epsilon and delta", "None: plain Keras trained"),
        ({"plain_steps": 3}, "Not covered", "plain Keras has trained them"),
        ({"plain_steps": 3}, "In plain words", "nothing keeps them from"),
        ({"delta": 1 / 60_000}, "Size of delta", "1 of one over"),
        (
            {"noise_seed_fixed": True},
            "Floating point and randomness",
            "a seed for the noise, and may know it",
        ),
        (
            {"noise_seed_fixed": True, "sampling_seed_fixed": True},
            "Floating point and randomness",
            "a seed for the noise and for the draws, and may know it",
        ),
    ],
)
def test_what_is_not_as_it_should_be_has_no_cross(facts, options, title, words):
    done, line = boxes(checklist(facts(**options)))[title]
    assert not done
    assert words in line
    assert boxes(checklist(facts()))[title][0]


def test_without_noise(facts):
    found = boxes(checklist(facts(UnamplifiedSteps(1, 0.0))))
    assert found["Epsilon and delta"] == (False, "None: steps ran without noise.")


def test_what_is_said_only_where_it_is_so(facts):
    segment = PoissonSteps(10, 8.0, 60_000, 256)
    short = boxes(checklist(facts(segment, cut_short=(segment,))))
    assert "epsilon is that of what was planned" in short["Planned and run"][1]
    assert "20 steps" in short["Mechanism"][1]
    found = boxes(checklist(facts()))
    assert "Planned and run" not in found
    assert "Budget" not in found
    assert "nobody knows them" in found["Floating point and randomness"][1]
    unknown = boxes(checklist(facts(UnamplifiedSteps(3, 9.0))))["Size of delta"]
    assert unknown == (True, "1e-05; the number of records is not known.")
