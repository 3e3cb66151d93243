"""What a layer's call adds to the gradient of each row, in factors not yet multiplied.

A term belongs to one variable. All terms of a variable, from all calls of all layers,
add up to its gradient; a norm is only right over their sum. Leading axes hold whole
units one after the other: ``(R, ...)`` with the same number of rows for each unit.
"""

from tfdp.rules.terms.columns import Block as Block
from tfdp.rules.terms.columns import Columns as Columns
from tfdp.rules.terms.convolution import Convolution as Convolution
from tfdp.rules.terms.outer_products import OuterProducts as OuterProducts
from tfdp.rules.terms.scaled_products import ScaledProducts as ScaledProducts
from tfdp.rules.terms.standardized import Standardized as Standardized
from tfdp.rules.terms.term import Jvp as Jvp
from tfdp.rules.terms.term import Kept as Kept
from tfdp.rules.terms.term import Movable as Movable
from tfdp.rules.terms.term import PerRow as PerRow
from tfdp.rules.terms.term import Term as Term
from tfdp.rules.terms.term import Units as Units
