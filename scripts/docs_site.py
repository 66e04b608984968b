"""What the site has beside the pages of docs/: pages that the repository keeps elsewhere, and a check of every link.

mkdocs calls the functions `on_...` by their names (`hooks` in mkdocs.yml). A link that leaves docs/ may lead to a page
in `PAGES` only. The check reads the built pages, so it also covers the theme, the client API and the navigation: each
link leads to a file, as it must where pages are opened without a server, and each anchor to an element.
"""

from __future__ import annotations

import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "cpp.md": "scripts/clients/cpp/README.md",
    "go.md": "scripts/clients/go/README.md",
    "java.md": "scripts/clients/java/README.md",
    "node.md": "scripts/clients/node/README.md",
    "ruby.md": "scripts/clients/ruby/README.md",
    "vectors.md": "tests/data/wire/README.md",
}
"""Pages of the site that are not in docs/, by their names in the site: paths in the repository."""

logger = logging.getLogger("mkdocs.hooks.docs_site")  # mkdocs counts the warnings of its own loggers


def on_files(files: Any, *, config: Any) -> Any:
    """Add `PAGES` to the site."""
    from mkdocs.structure.files import File

    for name, path in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace links between docs/ and `PAGES`."""
    del config, files
    name = page.file.src_uri
    source = PAGES.get(name, f"docs/{name}")
    return re.sub(r"\]\(([^)\s]+)\)", lambda found: f"]({in_site(source, found[1])})", markdown)


def on_post_build(*, config: Any) -> None:
    """Report each dead link, also with --quiet, which drops warnings: with --strict the build fails."""
    for fault in dead_links(Path(config.site_dir)):
        logger.error(fault)


def in_site(source: str, target: str) -> str:
    """Return where a link of the page `source` (a path in the repository) leads in the site.

    A link to what the site does not have stays as it is, and mkdocs reports it.
    """
    path, mark, anchor = target.partition("#")
    if not path or "://" in path:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    for name, elsewhere in PAGES.items():
        if path == elsewhere:
            return name + mark + anchor
    return path.removeprefix("docs/") + mark + anchor if path.startswith("docs/") else target


class _Page(HTMLParser):
    """The links and the anchors of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in {"href", "src"}:
                self.links.append(value)
            elif value is not None and name == "id":
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """Return a message for each link of a built site that leads to no file of it, or to no anchor.

    404.html is left out: only a server shows it, and at any address.
    """
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"(https?|mailto|data):", link):
                continue
            target, _, anchor = link.partition("#")
            linked = Path(posixpath.normpath(path.parent / target)) if target else path
            if not linked.is_relative_to(site) or not linked.is_file():
                found.append(f"{path.relative_to(site)} links {link}, which is no file of the site")
            elif anchor and linked in pages and anchor not in pages[linked].anchors:
                found.append(f"{path.relative_to(site)} links {link}, which has no such anchor")
    return found
