"""An older name of portable.conformance.contract."""

import sys

from portable.conformance import contract

sys.modules[__name__] = contract
