"""What a recording watches: tensors of a call, and what their gradients mean."""

from typing import NamedTuple

import keras

from tfdp._types import Tensor
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Terms
from tfdp.rules.terms import Term


class Watched(NamedTuple):
    """Tensors of a call, and what their gradients say about the variables.

    Attributes:
        path: Path of the layer; of the variable, where that is used elsewhere, or of the
            first of several that are used there together.
        rule: Name of the rule; there, the type of the operation that uses it.
        tensors: What to differentiate by.
        terms: From their gradients, in that order, to the terms.
        repeats: Rows of the call for each row of the batch; None if they may be any.
        must_be_reached: Whether it would be a mistake if no loss depended on them.
    """

    path: str
    rule: str
    tensors: list[Tensor]
    terms: Terms
    repeats: int | None
    must_be_reached: bool = False

    def terms_of(self, gradients: list[Tensor]) -> list[Term]:
        """Return the terms for these gradients of the tensors."""
        terms = self.terms(*gradients)
        for term in terms:
            if not isinstance(term.variable, keras.Variable):
                # Some attributes of layers are tensors while an adapter is on.
                raise UnsupportedLayerError(
                    "The terms of a rule must be of variables, or their share of the "
                    f"norm is lost. Received: `{self.path}` (rule `{self.rule}`) with "
                    f"variable={term.variable!r:.100}. Give each variable a term: "
                    "`OuterProducts(layer.lora_kernel_a, x, g)`."
                )
            term.repeats = self.repeats
        return terms
