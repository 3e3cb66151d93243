"""A model card begins with YAML that model hubs read."""

import pytest

from tfdp.accounting import UnamplifiedSteps
from tfdp.reports.model_card import model_card


def front_matter(card):
    yaml = pytest.importorskip("yaml")
    before, block, _ = card.split("---\n", 2)
    assert not before
    return yaml.safe_load(block)


def test_the_front_matter_is_yaml(facts):
    tags = ["keras", "tensorflow", "tfdp", "differential-privacy"]
    empty = model_card(facts())
    assert front_matter(empty) == {"library_name": "keras", "tags": tags}
    assert "# ____ Under which license" in empty.split("---\n")[1]
    license_ = 'a "b": {c}\n# d ü'
    card = model_card(facts(answers={"license": license_}))
    assert front_matter(card) == {
        "license": license_,
        "library_name": "keras",
        "tags": tags,
    }


def test_what_is_not_private_has_no_such_tag(facts):
    for known in (facts(UnamplifiedSteps(1, 0.0)), facts(plain_steps=1)):
        card = model_card(known)
        assert "differential-privacy" not in front_matter(card)["tags"]
        assert "- Guarantee: None: " in card


def test_it_says_what_was_run_and_what_is_not_covered(facts):
    known = facts()
    card = model_card(known)
    assert "\n# small\n" in card
    for section in ("The model", "Training", "Privacy", "Not covered"):
        assert f"\n## {section}\n\n- " in card
    assert f"({known['epsilon']:.3f}, 1e-05)-differential privacy" in card
    assert known["weights"]["sha256"] in card
    assert "10 steps, noise multiplier 8" in card
    for sentence in known["not_covered"]:
        assert f"- {sentence}\n" in card
    assert "`small/last/kernel`" in card
