"""`python -m scripts.reliability.chaos`."""

import sys

from scripts.reliability.chaos.run import main

sys.exit(main())
