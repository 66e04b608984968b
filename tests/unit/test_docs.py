"""The pages match the code: links resolve, and tests, files and reasons of errors that they name exist."""

import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup

from scripts import docs_site, generate_contract, generate_dashboard, generate_metrics
from scripts.generate_configuration import PAGE, page
from tests.support.pages import blocks
from tinkerpool import RestClient, SamplingClient, TrainingClient
from tinkerpool.cli.app import command_line
from tinkerpool.credentials import DEFAULT_PORT
from workers.contract.messages import ErrorCode
from workers.model.families import REFUSED, TESTED

ROOT = Path(__file__).resolve().parents[2]
PROMISES = ("README.md", "docs/promises.md", "docs/reliability.md")
FOR_ENGINEERS = {
    *("architecture.md", "benchmarks.md", "decisions.md", "glossary.md", "promises.md", "reliability.md", "security.md")
}
FOLDERS = ("coordinator", "workers", "tinkerpool", "scripts", "tests", "docs", "protos")

PACKAGES = ("coordinator", "workers", "tinkerpool")
GENERATED = ("tinkerpool/v1/", "tinkerpool/compat/")

REFUSALS = {
    "ServiceError",
    "OperationError",
    "Refusal",
    "UnreadableBody",
    "busy",
    "denied",
    "exists",
    "invalid",
    "not_found",
    "over_ceiling",
    "refused",
    "unavailable",
    "unmet",
}
"""Functions and classes that take the reason of a refusal or failed outcome."""


def pages() -> list[str]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
    names = (path.relative_to(ROOT).as_posix() for path in found if "node_modules" not in path.parts)
    return [*sorted(path.name for path in ROOT.glob("*.md")), *sorted(names)]


def text_of(page: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Return the links of a page to what is in the repository."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)) if not re.match(r"https?://", target)]


@pytest.mark.parametrize("page", pages())
def test_every_relative_link_of_a_page_resolves(page: str) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), f"{page} links {target}"
        assert not anchor or anchor in anchors(linked), f"{page} links {target}, which has no such heading"


def pages_of_the_site() -> list[str]:
    return [page for page in pages() if page.startswith("docs/") or page in docs_site.PAGES.values()]


@pytest.mark.parametrize("page", pages_of_the_site())
def test_every_link_of_a_page_of_the_site_leads_to_what_the_site_has(page: str) -> None:
    folder = ROOT / "docs"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")} | docs_site.PAGES.keys()
    for target in links(page):
        path, _, _ = docs_site.in_site(page, target).partition("#")
        assert not path or path in names, f"{page} links {target}: scripts/docs_site.py says what else the site has"


@pytest.mark.parametrize(
    "link", ["gone.html", "guide", "guide/", "../outside.html", "guide.html#gone", "#gone", "/guide.html"]
)
def test_a_link_of_the_built_site_that_is_dead_without_a_server_is_found(link: str, tmp_path: Path) -> None:
    (tmp_path / "outside.html").write_text("")
    site = tmp_path / "site"
    (site / "guide").mkdir(parents=True)
    (site / "guide.html").write_text('<h2 id="start">Start</h2><a href="index.html">back</a>')
    page = site / "index.html"
    page.write_text('<p id="here"><a href="guide.html#start"></a><a href="#here"></a><a href="https://a.b/c"></a></p>')
    assert docs_site.dead_links(site) == []
    page.write_text(f'<a href="{link}"></a>')
    [found] = docs_site.dead_links(site)
    assert found.startswith(f"index.html links {link}, ")


@pytest.mark.parametrize("client", [TrainingClient, SamplingClient, RestClient])
def test_the_client_api_shows_each_async_twin_as_help_does(client: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))  # only the site's environment has it
    twins = importlib.import_module("scripts.docs_twins").Twins()
    tree = ast.parse(Path(inspect.getfile(client)).read_text(encoding="utf-8"))
    [node] = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == client.__name__]
    twins.on_class_node(node=node)
    shown = {each.name: each for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
    for name, method in vars(client).items():
        if name.endswith("_async"):
            twin = shown[name]
            arguments = [each.arg for each in (*twin.args.args, *twin.args.kwonlyargs)]
            assert (arguments, ast.unparse(twin.returns or twin)) == (
                list(inspect.signature(method).parameters),
                method.__annotations__["return"],
            )
            assert ast.get_docstring(twin) == method.__doc__
    assert "extensions: [scripts/docs_twins.py]" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_index_and_the_site_list_every_page_in_the_same_order() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    in_nav = re.findall(r"^ +- .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    in_index = re.findall(r"^\| \[.*?\]\(([\w./]+\.md)\)", text_of("docs/index.md"), flags=re.MULTILINE)
    names = [docs_site.in_site("docs/index.md", target) for target in in_index]
    assert in_nav[0] == "index.md"
    assert in_nav[1:] == names
    assert set(names) == pages | docs_site.PAGES.keys()


def commands(page: str) -> Iterator[list[str]]:
    """Yield each command line of `tinkerpool` that a page shows, in a block or between backticks.

    What a command prints is shown too: that it is ready, and its version.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = "".join(f"\n    {line}" for _, code in blocks(page) for line in code.splitlines())
    shown = r"^ {4,}(?:\w*\$ )?(tinkerpool (?!is ready |\d).+)$|`(tinkerpool [^`\n]+)`"
    for found in re.finditer(shown, text + fenced, re.MULTILINE):
        yield shlex.split((found[1] or found[2]).replace("'", ""), comments=True)


@pytest.mark.parametrize("page", pages())
def test_every_command_of_a_page_exists_with_its_options(page: str) -> None:
    for words in commands(page):
        command: Any = command_line()
        arguments = words[1:]
        while isinstance(command, TyperGroup) and arguments and not arguments[0].startswith("-"):
            assert arguments[0] in command.commands, f"{page} shows {shlex.join(words)}"
            command, arguments = command.commands[arguments[0]], arguments[1:]
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        given = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
        assert given <= known | {"--help"}, f"{page} shows {shlex.join(words)}"


def test_a_relay_is_set_up_for_the_ports_of_a_pool() -> None:
    [nginx] = [code for language, code in blocks("docs/security.md") if language == "nginx"]
    assert nginx.count("{") == nginx.count("}")
    ports = {int(port) for port in re.findall(r"(?:grpc|http)://127.0.0.1:(\d+)", nginx)}
    assert ports == {DEFAULT_PORT, DEFAULT_PORT + 1}


def test_the_page_on_configuration_has_every_environment_variable() -> None:
    sources = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"\"(TINKERPOOL_[A-Z_]+)\"", source)}
    assert set(re.findall(r"^\| `(TINKERPOOL_[A-Z_]+)`", page(), flags=re.MULTILINE)) == read


def test_the_page_on_models_has_every_tested_family_and_every_one_that_is_refused_by_name() -> None:
    tested, refused = text_of("docs/models.md").partition("## What is refused")[::2]
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([^|]*) \|$", tested, flags=re.MULTILINE)[1:]  # without the head
    assert rows == [(family.title, name, family.special) for name, family in TESTED.items()]
    assert not [name for name in REFUSED if not re.search(rf"^\| [^|]*`{name}`", refused, flags=re.MULTILINE)]
    assert f"[{len(TESTED)} families tested](models.md#which-load)" in text_of("docs/index.md")
    assert f"{len(TESTED)} families of\nmodels are tested" in text_of("README.md")


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_a_page_for_users_names_no_test(page: str) -> None:
    if page not in FOR_ENGINEERS:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert not re.findall(r"\btests/(?!data/wire/)|`test_\w+\.py`", text)
        assert not set(re.findall(r"`(test_\w+)`", text)) & names_of_tests()


@cache
def names_of_tests() -> frozenset[str]:
    return frozenset(
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    )


@pytest.mark.parametrize("page", PROMISES)
def test_every_test_that_a_promise_names_exists(page: str) -> None:
    assert not set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text(encoding="utf-8"))) - names_of_tests()


@pytest.mark.parametrize("page", pages())
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?", text))
    missing = {
        name for name in named if not (ROOT / name).exists() and not (ROOT / page).parent.joinpath(name).exists()
    }
    assert not missing


def described_modules() -> list[str]:
    """Return the modules in the architecture page's tables, each below a heading that names their folder."""
    found: list[str] = []
    folder: str | None = None
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = re.fullmatch(r"#### `([\w/]+/)`", line)
            folder = heading.group(1) if heading else None
        elif folder and (row := re.match(r"\| `([\w/]+\.py)` \| \S", line)):
            found.append(folder + row.group(1))
    return found


def modules() -> list[str]:
    """Return the modules of the three packages, without generated ones."""
    paths = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.name != "__init__.py")
    names = (path.relative_to(ROOT).as_posix() for path in paths)
    return sorted(name for name in names if not name.startswith(GENERATED))


def test_page_of_the_architecture_has_one_row_for_each_module_and_no_other() -> None:
    assert sorted(described_modules()) == modules()


def test_page_of_the_architecture_names_no_module_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"tests/unit/test_house.py"}
    found = modules()
    assert not {name for name in named if not any(f"/{module}".endswith(f"/{name}") for module in found)}


def rooms() -> list[str]:
    """Return the packages inside the three packages, without generated ones."""
    paths = (path.parent for name in PACKAGES for path in (ROOT / name).glob("*/**/__init__.py"))
    names = (path.relative_to(ROOT).as_posix() + "/" for path in paths)
    return sorted(name for name in names if not name.startswith(GENERATED))


@pytest.mark.parametrize("room", rooms())
def test_init_of_a_room_names_every_module_and_no_other(room: str) -> None:
    """An import in it names a module, too. `a.B` means B of the module a; so does an item of a list with `a`: `B`."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    text, package = ast.get_docstring(tree) or "", room.rstrip("/").replace("/", ".")
    files = {path.stem: path for path in (ROOT / room).glob("*.py") if not path.stem.startswith("__")}
    inside = {*files, *(path.parent.name for path in (ROOT / room).glob("*/__init__.py"))}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module is not None]
    imported = {str(node.module).removeprefix(f"{package}.") for node in imports}
    imported |= {alias.name for node in imports if node.module == package for alias in node.names}
    assert not inside - imported - set(re.findall(r"[`.]([a-z]\w*)", text)), "not named"
    parts = re.findall(r"`([a-z]\w*)\.(\w+)", text) + re.findall(
        r"^- `([a-z]\w*)`(?:: `| \(`)?(\w*)", text, re.MULTILINE
    )
    assert not {module for module, _ in parts} - inside - set(PACKAGES), "named, and not there"
    for module, name in parts:
        if module in files:
            assert re.search(rf"\b{name}\b", files[module].read_text(encoding="utf-8")), f"{module} has no {name}"


def strings(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def reasons(node: ast.AST) -> Iterator[str]:
    """Return the reasons of refusals and outcomes in a syntax tree: arguments, or defaults, in capitals."""
    for each in ast.walk(node):
        given: list[ast.expr] = []
        if isinstance(each, ast.Call):
            name = each.func.id if isinstance(each.func, ast.Name) else getattr(each.func, "attr", "")
            if name in REFUSALS or any(keyword.arg == "reason" for keyword in each.keywords):
                given = [*each.args, *(keyword.value for keyword in each.keywords)]
        elif isinstance(each, ast.FunctionDef) and each.name in REFUSALS:
            given = each.args.defaults
        for expression in given:
            yield from (text for text in strings(expression) if re.fullmatch(r"[A-Z][A-Z_]{3,}", text))


def test_page_of_errors_names_every_reason_that_a_client_can_see_and_no_other() -> None:
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "coordinator").rglob("*.py")]
    items = {code.name for code in ErrorCode}
    assert {reason for tree in trees for reason in reasons(tree)} | items <= named
    assert named <= {text for tree in trees for text in strings(tree)} | items


def raised(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Return the reasons of refusals that a syntax tree makes, each with whether it is made with a retry delay."""
    for each in ast.walk(node):
        if not isinstance(each, ast.Call):
            continue
        name = each.func.id if isinstance(each.func, ast.Name) else getattr(each.func, "attr", "")
        if name not in REFUSALS | {"full", "__init__"} - {"OperationError"}:
            continue
        has_delay = name in {"busy", "full", "unavailable"} or any(
            keyword.arg == "retry_delay_s" for keyword in each.keywords
        )
        if name == "Refusal":
            has_delay = "over_ceiling" not in {getattr(arg, "id", "") for arg in each.args}
        given = [*each.args, *(keyword.value for keyword in each.keywords if keyword.arg == "reason")]
        for text in (text for expression in given for text in strings(expression)):
            if re.fullmatch(r"[A-Z][A-Z_]{3,}", text):
                yield text, has_delay


def test_a_refusal_is_made_with_a_retry_delay_exactly_if_the_page_of_errors_says_that_waiting_helps() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^## Refusals with a retry delay$(.*?)^## ", page, flags=re.MULTILINE | re.DOTALL)
    waiting_helps = set(re.findall(r"^\| `([A-Z_]+)` \|", table, flags=re.MULTILINE))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "coordinator").rglob("*.py")]
    made = {each for tree in trees for each in raised(tree)}
    assert {reason for reason, has_delay in made if has_delay} == waiting_helps
    assert not {reason for reason, has_delay in made if not has_delay} & waiting_helps


def test_page_of_the_contract_is_generated_from_the_protos() -> None:
    written = generate_contract.PAGE.read_text(encoding="utf-8")
    assert written == generate_contract.page(), "run `make protos`"
    headings = re.findall(r"^#+ (.*)$", written.lower(), flags=re.MULTILINE)
    assert len(headings) == len(set(headings)), "two things have the same anchor"


def test_every_call_of_the_contract_says_what_is_durable_and_whether_it_is_safe_to_repeat() -> None:
    for source in generate_contract.sources():
        for index, service in enumerate(source.file.service):
            for number, method in enumerate(service.method):
                said = source.of_service(index) + source.of_method(index, number)
                as_another = re.search(r"(?:[Ll]ike|as in) [A-Z]\w+", said)
                assert as_another or re.search(r"[Dd]urable|Reads only|At most once", said), method.name
                assert as_another or re.search(r"[Ii]dempotent|[Rr]epeat|Reads only|At most once", said), method.name


def test_page_of_configuration_is_generated_from_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `.venv/bin/python -m scripts.generate_configuration`"


def test_page_of_metrics_is_generated_from_the_code() -> None:
    written = generate_metrics.PAGE.read_text(encoding="utf-8")
    assert written == generate_metrics.page(), "run `.venv/bin/python -m scripts.generate_metrics`"


def test_the_dashboard_is_generated_from_the_code() -> None:
    written = generate_dashboard.FILE.read_text(encoding="utf-8")
    assert written == generate_dashboard.text(), "run `.venv/bin/python -m scripts.generate_dashboard`"


def test_the_dashboard_shows_every_metric_and_asks_for_no_other_and_by_labels_that_it_has() -> None:
    served = {each.name: each for each in generate_metrics.served_metrics()}
    panels = [panel for row in generate_dashboard.ROWS.values() for panel in row]
    assert {name for panel in panels for name in panel.metrics()} == served.keys()
    for panel in panels:
        for legend, query in panel.queries.items():
            [labels, *others] = [
                set(served[name].labels) for name in dict.fromkeys(generate_dashboard.METRIC.findall(query))
            ]
            assert not others, "one metric a query"
            by = set(re.findall(r"\w+", " ".join(re.findall(r" by \(([^)]*)\)", query))))
            assert by <= labels | {"le"}, panel.title
            assert set(re.findall(r"{{(\w+)}}", legend)) == by - {"le"}, panel.title


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = [each["gridPos"] for each in generate_dashboard.dashboard()["panels"]]
    cells = [
        (x, y)
        for each in panels
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < generate_dashboard.COLUMNS


def test_every_alert_has_a_runbook_line_and_uses_metrics_that_exist() -> None:
    rules = yaml.safe_load((ROOT / "docs" / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    known = set(re.findall(r"^\| `(\w+)`", generate_metrics.page(), re.MULTILINE))
    for rule in rules:
        assert rule["alert"].startswith("Tinkerpool"), "the dashboard marks alerts by their names"
        assert rule["annotations"].keys() == {"summary", "runbook"}
        used = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"tinkerpool_\w+", rule["expr"])}
        assert used <= known, rule["alert"]
