"""The path of a request: the product's files that it executed, in order of first call, without background work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.trace.recorder import Call, Function

PROCESSES = ("client", "coordinator", "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A file that a process executed for the request."""

    process: str
    file: str
    function: str
    """The first of the file's functions that was called."""
    num_functions: int
    """Different functions of the file that were called."""
    at_ms: float
    """After the first step of the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPath:
    """All files of one request through one door."""

    door: str
    request: str
    steps: tuple[Step, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Different files, in order of first call. A file that two processes execute counts once."""
        return tuple(dict.fromkeys(step.file for step in self.steps))

    def table(self) -> str:
        """Return the path as text: totals, then a line per process and file."""
        by_process = Counter(step.process for step in self.steps)
        totals = ", ".join(f"{process} {by_process[process]}" for process in PROCESSES)
        lines = [f"{self.door}, {self.request}: {len(self.files)} files ({totals})"]
        width = max((len(step.file) for step in self.steps), default=0)
        for number, step in enumerate(self.steps, start=1):
            others = f" and {step.num_functions - 1} more" if step.num_functions > 1 else ""
            place = f"{number:4} {step.at_ms:8.1f} ms  {step.process:11}  {step.file:{width}}"
            lines.append(f"{place}  {step.function}{others}")
        return "\n".join(lines)


def background_of(calls: Sequence[Call]) -> frozenset[tuple[Function, Function]]:
    """Return what an idle process executed: pairs of a root and a function below it."""
    return frozenset((call.root, call.function) for call in calls)


def path_of(
    door: str,
    request: str,
    calls: Mapping[str, Sequence[Call]],
    background: Mapping[str, frozenset[tuple[Function, Function]]],
) -> RequestPath:
    """Return the path from each process's calls; `background` is what each executed while idle."""
    first: dict[tuple[str, str], Call] = {}
    functions: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for process, recorded in calls.items():
        for call in sorted(recorded, key=lambda call: call.at_ns):
            if (call.root, call.function) not in background[process]:
                first.setdefault((process, call.function.file), call)
                functions[process, call.function.file].add(call.function.name)
    in_order = sorted(first.items(), key=lambda item: item[1].at_ns)
    begin_ns = in_order[0][1].at_ns if in_order else 0
    steps = tuple(
        Step(
            process=process,
            file=file,
            function=call.function.name,
            num_functions=len(functions[process, file]),
            at_ms=(call.at_ns - begin_ns) / 1e6,
        )
        for (process, file), call in in_order
    )
    return RequestPath(door=door, request=request, steps=steps)
