"""An older name of portable.conformance.inputs."""

import sys

from portable.conformance import inputs

sys.modules[__name__] = inputs
