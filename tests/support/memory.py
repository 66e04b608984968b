"""The memory of Python objects."""

import gc
import tracemalloc
from collections.abc import Callable


def memory_of(make: Callable[[], object]) -> int:
    """Bytes that stay allocated as long as the object that is made."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert made is not None
        return after - before
    finally:
        tracemalloc.stop()
