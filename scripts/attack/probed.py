"""Run `tinkerpool` with a probe in its process: `python -m scripts.attack.probed serve ...`."""

from __future__ import annotations

import os

from scripts.attack.probe import Probe, answer_at
from tinkerpool.cli.main import main

SOCKET = "TINKERPOOL_ATTACK_SOCKET"
"""Environment variable: path of the socket on which the probe answers."""

if __name__ == "__main__":
    probe = Probe()
    answer_at(os.environ.pop(SOCKET), probe)
    probe.install()
    main()
