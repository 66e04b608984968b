"""`python -m scripts.demo`."""

import sys

from scripts.demo.run import main

sys.exit(main())
