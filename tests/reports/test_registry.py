"""An entry has the fields of the registry, in its order, and its words."""

import pytest

from tfdp.accounting import PoissonSteps, Segment, UnamplifiedSteps
from tfdp.reports.registry import registry
from tfdp.sampling import PoissonUsers

# Those of its template that entries of tfdp have, in the order that its tests ask for.
FIELDS = {
    "basic": [
        *("name", "data_curators", "description", "intended_use", "data_product_type"),
        *("data_product_region", "data_product_sector", "publication_date"),
    ],
    "dp_variant": ["variant_name", "data_domain", "unprotected_quantities"],
    "privacy_loss": [
        *("privacy_unit", "privacy_unit_details", "number_of_privacy_units"),
        *("privacy_parameters", "privacy_parameters_details"),
    ],
    "deployment_model": [
        *("model_name", "trust_assumptions", "release_type", "release_type_details"),
        *("data_source_type", "access_type", "access_type_details"),
    ],
    "implementation": [
        *("preprocessing_and_hyperparameter_tuning", "mechanisms", "composition"),
        *("post_processing", "justification", "utility", "additional_information"),
    ],
    "administrative": ["status", "registry_authors", "tier"],
}


def test_it_has_the_registrys_fields_in_its_order(facts):
    entry = registry(facts())
    assert list(entry) == ["url_slug", "deployment"]
    found = {name: list(part) for name, part in entry["deployment"].items()}
    assert found == FIELDS
    assert list(found) == list(FIELDS)


def test_words_that_the_registry_lists_are_its_own(facts):
    answers = {
        "curator": "Ärzte & Co.",
        "curator_type": "Industry",
        "sector": "Healthcare",
        "release_type": "One release",
        "data_source": "Static",
        "publication_date": "2025-03-01",
    }
    entry = registry(facts(answers=answers))
    assert entry["url_slug"] == "small-rzte-co-2025"
    deployment = entry["deployment"]
    assert deployment["basic"]["data_product_type"] == "Machine learning model"
    assert deployment["basic"]["data_product_sector"] == "Healthcare"
    assert deployment["basic"]["publication_date"] == "2025-03-01"
    assert deployment["basic"]["data_curators"] == [
        {"data_curator_name": "Ärzte & Co.", "data_curator_type": "Industry"}
    ]
    assert deployment["dp_variant"]["variant_name"] == "Approximate DP"
    assert deployment["deployment_model"]["model_name"] == "Central"
    assert deployment["deployment_model"]["release_type"] == "One release"
    assert deployment["deployment_model"]["data_source_type"] == "Static"
    assert deployment["deployment_model"]["access_type"] == "Non-interactive"
    assert deployment["administrative"]["status"] == "Draft"


def loss_of(facts):
    return registry(facts)["deployment"]["privacy_loss"]


def test_epsilon_is_that_of_the_report(facts):
    known = facts()
    loss = loss_of(known)
    assert loss["privacy_parameters"] == {"epsilon": known["epsilon"], "delta": 1e-5}
    assert loss["number_of_privacy_units"] == 60_000
    assert loss["privacy_unit"] == "Record-level"
    assert "at most" in loss["privacy_parameters_details"]


@pytest.mark.slow
def test_no_number_is_stated_that_is_not_known(facts):
    unknown = loss_of(facts(UnamplifiedSteps(3, 9.0)))
    assert "number_of_privacy_units" not in unknown
    several = facts(PoissonSteps(3, 9.0, 100, 10), PoissonSteps(3, 9.0, 200, 10))
    assert "number_of_privacy_units" not in loss_of(several)
    users = Segment(PoissonUsers(100, 10, 2), 3, 9.0)
    assert loss_of(facts(users))["privacy_unit"] == "User-level"
    mixed = loss_of(facts(users, PoissonSteps(3, 9.0, 100, 10)))
    assert mixed["privacy_unit"] == "Record-level"
    assert "number_of_privacy_units" not in mixed


def test_without_a_guarantee_there_are_no_parameters(facts):
    for known in (facts(UnamplifiedSteps(1, 0.0)), facts(plain_steps=3)):
        loss = loss_of(known)
        assert loss["privacy_parameters"] == {}
        assert loss["privacy_parameters_details"].startswith("None: ")
        assert "nothing keeps them from" in loss["privacy_parameters_details"]
