"""An older name of portable.conformance.cells."""

import sys

from portable.conformance import cells

sys.modules[__name__] = cells
