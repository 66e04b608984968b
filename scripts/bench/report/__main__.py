"""`python -m scripts.bench.report`."""

import sys

from scripts.bench.report.page import main

sys.exit(main())
