"""The steps of "Two hosts, step by step" in docs/cluster.md, typed on two hosts as they stand on the page.

The page is the script. This module knows how commands and their output stand there, and how to do what cannot be typed:
to save a file, and to switch a host off and on.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, made_folder, made_hosts, problem
from tests.cluster.pools import ROOT
from tests.support.pages import blocks

PROBLEM = problem()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM),
]
HEADING, NEXT_HEADING = "\n## Two hosts, step by step\n", "\n## "
CODE = 8 * " "
PROMPT = re.compile(r"(one|two)\$ (.+)")
CUT = re.compile(r"\w+\.\.\.")
"""A line of output that is cut on the page: a token, or a key."""
LOOKS = ("curl ", "tinkerpool logs", "tinkerpool status")
"""Commands that change nothing. They are repeated until they print what the page shows: it says "within seconds"."""
SEEN_S = 90.0
"""Seconds for that. A worker starts in 7 to 25 s."""
AGAIN_S = 1.0
COMMAND_S = 240.0

TENANT = r"(?:alice|bob|carol)(?: \+step)?"
VARYING = (
    rf"{TENANT}(?:, {TENANT})+",  # those of a shared cycle
    TENANT,
    r"\b\d\d:\d\d:\d\d\.\d{3}\b",
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    r"\btp_[0-9a-f]{12}",
    r"\bw\d-[0-9a-f]{12}\b",
    r"\bw\d\b",
    r"\b\d+(?:\.\d+)? (?:us|ms|s|min)\b",
    r"\b\d+(?:\.\d+)? k?M?B\b",
    r"\b\d+\.\d+\b",
    r"\b[1-9]\d*\b",
)
"""What differs from run to run: each stands for what has the same shape. So a zero stands for a zero only."""
SHAPES: dict[str, str | None] = {
    r"(?:\d+\.){2,3}\d+(?::\d+)?": None,  # a version or an address stands for itself, as all words do
    r"\b[0-9a-f]{12}\.\.\.": "[0-9a-f]{64}",  # a token
    r"\.\.\.": "(?s:.*)",
    r" +": " +",
    **dict(zip(VARYING, VARYING, strict=True)),
}
"""Expressions for what stands on the page, and for what may stand there in the output. The first that fits counts."""


@dataclass
class Typed:
    """A command on the page."""

    host: str
    command: str
    output: list[str] = field(default_factory=list)
    """The lines that the page shows as its output."""


def parsed(text: str) -> list[Typed | str]:
    """Return the commands of a section, and the lines of prose between them, in order."""
    found: list[Typed | str] = []
    for line in text.splitlines():
        code = line.removeprefix(CODE)
        last = found[-1] if found else ""
        if prompt := PROMPT.fullmatch(code):
            found.append(Typed(prompt[1], prompt[2]))
        elif not isinstance(last, Typed) or (line and code == line):
            found.append(line)
        elif code.startswith("> "):
            last.command += f"\n{code.removeprefix('> ')}"
        else:
            last.output.append(code)
    return found


def shape(shown: str) -> re.Pattern[str]:
    """Return what output is taken for that on the page."""
    pattern, end = "", 0
    for piece in re.finditer("|".join(SHAPES), shown):
        stands_for = next(shape for on_page, shape in SHAPES.items() if re.fullmatch(on_page, piece[0]))
        pattern += re.escape(shown[end : piece.start()]) + (stands_for or re.escape(piece[0]))
        end = piece.end()
    return re.compile(pattern + re.escape(shown[end:]))


def by_host(output: str) -> str:
    """Return a command's output with the rows of workers in the order of their hosts: Ray chooses which goes where."""
    row, address = re.compile(r"^w\d .*$", re.MULTILINE), re.compile(r"10\.77\.0\.\d")
    text = "\n".join(line.rstrip() for line in output.strip().splitlines())
    rows = iter(sorted(row.findall(text), key=address.findall))
    return row.sub(lambda _: next(rows), text)


class Terminal:
    """A terminal on a host."""

    def __init__(self, host: Host, home: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TINKERPOOL_", "RAY_"))}
        self._host = host
        self._home = home
        self._environment = inherited | {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def type(self, command: str) -> str:
        """Run a command to its end; return its output. Raises AssertionError if it fails."""
        if command.startswith("export "):
            self._environment |= dict(word.split("=", 1) for word in shlex.split(command)[1:])
            return ""
        return by_host(self._host.run(["bash", "-c", command], self._environment, self._home, timeout_s=COMMAND_S))


def follow(section: str, terminals: dict[str, Terminal], by_hand: dict[str, Callable[[], None]]) -> None:
    """Do what a section says, and compare what is printed. `by_hand`: what to do where the prose has these words."""
    words_in_full: dict[str, str] = {}
    """What was printed for a line that is cut on the page, such as a key; later commands take it in full."""
    for step in parsed(section):
        if isinstance(step, str):
            for words in [words for words in by_hand if words in step]:
                by_hand.pop(words)()
            continue
        command, shown = step.command, by_host("\n".join(step.output))
        for cut, full in words_in_full.items():
            command = command.replace(cut, full)
        deadline_s = time.monotonic() + (SEEN_S if command.startswith(LOOKS) else 0.0)
        while not shape(shown).fullmatch(printed := terminals[step.host].type(command)):
            assert time.monotonic() < deadline_s, f"the page shows:\n{shown}\nand this was printed:\n{printed}"
            time.sleep(AGAIN_S)
        print(f"{step.host}$ {command}\n{printed}", flush=True)
        if CUT.fullmatch(cut := shown.partition("\n")[0]):
            words_in_full[cut] = printed.partition("\n")[0]
    assert not by_hand, f"the page does not say {list(by_hand)}"


def test_the_steps_for_two_hosts_print_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    section = page.partition(HEADING)[2].partition(NEXT_HEADING)[0]
    [program] = [code for _, code in blocks("docs/quickstart.md") if code.startswith("# first.py\n")]
    with made_folder() as folder, made_hosts(2, folder) as (one, two):
        homes = {name: folder / name / "alice" for name in ("one", "two")}
        for home in homes.values():
            home.mkdir(parents=True)
        (homes["one"] / "first.py").write_text(program, encoding="utf-8")
        terminals = {"one": Terminal(one, homes["one"]), "two": Terminal(two, homes["two"])}
        by_hand = {"Switch `two` off": two.kill, "Switch it on": two.boot}
        follow(section.replace("/home/alice", str(homes["one"])), terminals, by_hand)
