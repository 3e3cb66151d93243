"""The fields of the Differential Privacy Deployments Registry."""

import re

from tfdp._types import Config
from tfdp.reports.form import Form


def registry(facts: Config) -> Config:
    """Fill in an entry of the registry, in the order of its fields [1]_.

    Args:
        facts: See `facts_of`.

    Returns:
        A dictionary that is an entry when it is written as YAML, or JSON.

    References:
        .. [1] https://github.com/opendp/deployments-registry-data,
           `schemas/deployments-schema.yaml`
    """
    form = Form(facts)
    return {
        "url_slug": _slug(form),
        "deployment": {
            "basic": _basic(form),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": form.answer("data"),
                "unprotected_quantities": form.answer("unprotected"),
            },
            "privacy_loss": _privacy_loss(form),
            "deployment_model": _deployment_model(form),
            "implementation": _implementation(form),
            "administrative": {
                "status": "Draft",
                "registry_authors": [form.answer("registry_authors")],
                "tier": 3,
            },
        },
    }


def _slug(form: Form) -> str:
    answers = form.facts["answers"]
    year = answers.get("publication_date", form.facts["date"])[:4]
    parts = (form.facts["model"], answers.get("curator", ""), year)
    words = re.findall("[a-z0-9]+", " ".join(parts).lower())
    return "-".join(words)


def _basic(form: Form) -> Config:
    return {
        "name": form.facts["model"],
        "data_curators": [
            {
                "data_curator_name": form.answer("curator"),
                "data_curator_type": form.answer("curator_type"),
            }
        ],
        "description": form.answer("description"),
        "intended_use": form.answer("intended_use"),
        "data_product_type": "Machine learning model",
        "data_product_region": form.answer("region"),
        "data_product_sector": form.answer("sector"),
        "publication_date": form.answer("publication_date"),
    }


def _privacy_loss(form: Form) -> Config:
    facts = form.facts
    fields = {
        "privacy_unit": "User-level" if form.is_of_users else "Record-level",
        "privacy_unit_details": " ".join((
            facts["unit"],
            facts["neighbouring_relation"],
            form.answer("rows_per_person"),
        )),
    }
    numbers = set(facts["numbers_of_examples"])
    if len(numbers) == len(facts["units"]) == 1 and None not in numbers:
        fields["number_of_privacy_units"] = numbers.pop()
    parameters = {"epsilon": facts["epsilon"], "delta": facts["delta"]}
    return fields | {
        "privacy_parameters": parameters if form.is_private else {},
        "privacy_parameters_details": f"{form.guarantee} {form.meaning}",
    }


def _deployment_model(form: Form) -> Config:
    return {
        "model_name": "Central",
        "trust_assumptions": (
            f"{form.facts['trust_model']} {form.answer('trust_model')}"
        ),
        "release_type": form.answer("release_type"),
        "release_type_details": form.answer("other_releases"),
        "data_source_type": form.answer("data_source"),
        "access_type": "Non-interactive",
        "access_type_details": "The trained model is published; nobody queries the rows.",
    }


def _implementation(form: Form) -> Config:
    return {
        "preprocessing_and_hyperparameter_tuning": "\n\n".join((
            form.answer("preprocessing"),
            f"{form.facts['settings']} {form.answer('settings')}",
            f"{form.untrained} {form.facts['pretrained']} {form.answer('pretrained')}",
        )),
        "mechanisms": "\n\n".join((
            form.mechanism,
            form.arithmetic,
            f"How long steps took is not covered. {form.answer('side_channels')}",
            form.answer("access_control"),
        )),
        "composition": form.composition,
        "post_processing": (
            "The inner optimizer, and all that is computed from the weights afterwards."
        ),
        "justification": form.answer("justification"),
        "utility": f"{form.answer('utility')} {form.answer('bias')}",
        "additional_information": "\n\n".join((
            f"Not covered: {' '.join(form.facts['not_covered'])}",
            f"Audits: {form.audits}",
            f"Weights: {form.fingerprint}",
        )),
    }
