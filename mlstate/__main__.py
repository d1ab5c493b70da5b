"""``python -m mlstate``: the same as the ``mlstate`` command."""

import sys

from .cli import main

sys.exit(main())
