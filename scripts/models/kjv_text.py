"""The King James Version as chapters of verses, read from the Debian package bible-kjv-text.

The package's copyright file says of the text: "The copyright for the King James Version text of the Bible is
expired since the translation was done in 1611 under King James the first of Great Britain", and of the data file:
"provided for unrestricted use provided that this legend is included on all tape media and as a part of the software
program in whole or part. Users may copy, modify or distribute this file at will. -- Chip Chapin, September 4, 1989".

`bible.data` is a header, a table of offsets, and windows of 64 KiB compressed with compress(1); `gzip -dc` reads such
windows. The text has one verse a line: `Ge1:1 In the beginning ...`. This module depends on no tokenizer or model.
"""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "bible-kjv-text"
INSTALLED_DATA_FILE = Path("/usr/lib/bible.data")

_MAGIC = b"EC02"
_NUM_WINDOWS_AT = 0x58
_OFFSETS_AT = 0x5C
_COMPRESS_MAGIC = b"\x1f\x9d\x90"
_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One chapter: a document of the training text."""

    book: str
    """The package's abbreviation, such as `Ge` or `1Sm`."""
    number: int
    """Counted from 1 inside its book."""
    verses: tuple[str, ...]
    """Verse texts in order, without references and without line breaks."""

    @property
    def text(self) -> str:
        """The verses, one a line, with a final line end."""
        return "".join(verse + "\n" for verse in self.verses)


def load_chapters(text_file: Path | None = None) -> list[Chapter]:
    """Load all 1,189 chapters in the order of the text.

    `text_file` is a `bible.data` or the plain text inside it. None: the installed package, or the package downloaded
    with apt-get and unpacked in a temporary folder. Raises ValueError if the text cannot be found or read.
    """
    if text_file is not None:
        return parse_chapters(read_text(text_file))
    if INSTALLED_DATA_FILE.exists():
        return parse_chapters(read_text(INSTALLED_DATA_FILE))
    with tempfile.TemporaryDirectory(prefix="kjv-text-") as folder:
        return parse_chapters(read_text(_download(Path(folder))))


def read_text(path: Path) -> str:
    """Return the plain text in a `bible.data` file; any other file is read as that plain text."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        return data.decode("utf-8")
    (num_windows,) = struct.unpack_from(">I", data, _NUM_WINDOWS_AT)
    offsets = [*struct.unpack_from(f">{num_windows}I", data, _OFFSETS_AT), len(data)]
    windows = [data[start:end] for start, end in itertools.pairwise(offsets)]
    return b"".join(_decompress(window) for window in windows).decode("ascii")


def parse_chapters(text: str) -> list[Chapter]:
    """Parse lines such as `Ge1:1 In the beginning ...`; a first line without a reference is the title."""
    title, *lines = text.splitlines()
    if _VERSE.match(title):
        lines.insert(0, title)
    verses_by_chapter: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        match = _VERSE.match(line)
        if match is None:
            raise ValueError(f"not a verse: {line[:60]!r}; expected a line such as 'Ge1:1 In the beginning ...'")
        book, chapter, _, verse = match.groups()
        verses_by_chapter.setdefault((book, int(chapter)), []).append(" ".join(verse.split()))
    return [
        Chapter(book=book, number=number, verses=tuple(verses)) for (book, number), verses in verses_by_chapter.items()
    ]


def split_tail(chapters: list[Chapter], fraction: float) -> tuple[list[Chapter], list[Chapter]]:
    """Return (train, held out): the last chapters with at least `fraction` of the bytes are held out."""
    target_bytes = fraction * sum(len(chapter.text) for chapter in chapters)
    held_out_bytes = 0
    first = len(chapters)
    while held_out_bytes < target_bytes:
        first -= 1
        held_out_bytes += len(chapters[first].text)
    return chapters[:first], chapters[first:]


def _decompress(window: bytes) -> bytes:
    if not window.startswith(_COMPRESS_MAGIC):
        window = _COMPRESS_MAGIC + window
    try:
        return subprocess.run(["gzip", "-dc"], input=window, capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise ValueError("gzip is needed to read bible.data; install it or pass the plain text") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"gzip cannot read a window of bible.data: {error.stderr.decode().strip()}") from error


def _download(folder: Path) -> Path:
    folder.chmod(0o755)
    try:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True, capture_output=True)
        (package,) = folder.glob(f"{PACKAGE}_*.deb")
        subprocess.run(["dpkg", "-x", package.name, "unpacked"], cwd=folder, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"no text: {INSTALLED_DATA_FILE} is missing and `apt-get download {PACKAGE}` failed ({error}). On Debian "
            f"or Ubuntu run `apt-get update && apt-get install {PACKAGE}`; elsewhere unpack that package and pass "
            "its usr/lib/bible.data with --text"
        ) from error
    return folder / "unpacked" / "usr" / "lib" / "bible.data"
