"""`python -m portable`."""

import sys

from portable.cli import main

if __name__ == "__main__":
    sys.exit(main())
