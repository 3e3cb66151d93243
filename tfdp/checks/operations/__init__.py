"""What each TensorFlow operation does to the rows of its inputs.

An operation that is in none of these tables is one of which nothing is known.
"""

from tfdp.checks.node import apply as apply
from tfdp.checks.operations import axes as axes
from tfdp.checks.operations import chance as chance
from tfdp.checks.operations import contractions as contractions
from tfdp.checks.operations import elementwise as elementwise
from tfdp.checks.operations import gathers as gathers
from tfdp.checks.operations import lists as lists
from tfdp.checks.operations import parts as parts
from tfdp.checks.operations import scatters as scatters
from tfdp.checks.operations import shapes as shapes
from tfdp.checks.operations import slices as slices
from tfdp.checks.operations import spaces as spaces
from tfdp.checks.operations import whole_numbers as whole_numbers
from tfdp.checks.operations import words as words
