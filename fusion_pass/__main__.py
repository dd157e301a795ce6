"""`python -m fusion_pass` is the command `fusion-pass`."""

import sys

from fusion_pass.cli import main

sys.exit(main())
