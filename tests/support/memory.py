"""The memory of Python objects."""

import asyncio
import gc
import tracemalloc
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType


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


def num_entries(root: object) -> int:
    """Return the number of entries of all collections that an object refers to, directly or not.

    Leaves out code, and what event loops refer to.
    """
    outside = (ModuleType, type, FunctionType, BuiltinFunctionType, FrameType, asyncio.AbstractEventLoop)
    seen, found, entries = {id(root)}, [root], 0
    while found:
        each = found.pop()
        if isinstance(each, dict | list | set | frozenset | deque):
            entries += len(each)
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, outside):
                seen.add(id(other))
                found.append(other)
    return entries
