"""Reports about a private model, in the forms that others ask for."""

from collections.abc import Callable

from tfdp._types import Config
from tfdp.reports.facts import facts_of as facts_of
from tfdp.reports.model_card import model_card
from tfdp.reports.nist import checklist
from tfdp.reports.registry import registry

# What makes each form from what `facts_of` returns.
FORMS: dict[str, Callable[[Config], Config | str]] = {
    "json": dict,
    "registry": registry,
    "nist-800-226": checklist,
    "model-card": model_card,
}
