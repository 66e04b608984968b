"""`python -m scripts.tutorial`."""

import sys

from scripts.tutorial.run import main

sys.exit(main())
