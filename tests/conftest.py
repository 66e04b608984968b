"""What every test runs with: no network, no Ray of somebody else's, reproducible examples."""

import logging
import os
import secrets

import hypothesis

# Set before anything imports a library that reads them; child processes inherit them.
os.environ |= {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",  # spinning threads are up to ten times slower where other processes want the cores
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray would write one into the home directory
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call to a Ray that has ended fails, as in a pool, and starts no other one
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# A Ray address in the environment would make tests join that cluster.
os.environ.pop("RAY_ADDRESS", None)

# A session of the SDK whose pool a test has killed goes on beating in its thread and says so until the process ends,
# behind pytest's last line too: without a handler Python would write that to stderr.
logging.getLogger("tinker").addHandler(logging.NullHandler())

# Deadlines fail on a busy machine without a bug in sight. The examples are the same in every run;
# look for new ones with `make test ARGS="--hypothesis-profile=search"`.
hypothesis.settings.register_profile("tinkerpool", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("tinkerpool")
