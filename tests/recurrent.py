"""An older name of portable.conformance.recurrent."""

import sys

from portable.conformance import recurrent

sys.modules[__name__] = recurrent
