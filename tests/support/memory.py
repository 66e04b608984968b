"""The memory of Python objects."""

import gc
import tracemalloc
from collections.abc import Callable


def memory_of(make: Callable[[], object]) -> int:
    """Return the bytes that stay allocated while the object that `make` returns exists."""
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
