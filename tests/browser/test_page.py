"""The page in a real browser, Debian's Chromium, against a pool of the shipped model. `make browser` runs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from coordinator.tenants.principals import Role
from tests.support.served_pool import ServedPool, shipped_pool
from tinkerpool import AdamParams, Datum, TrainingClient

T = TypeVar("T")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not os.environ.get("BROWSER_TESTS") or CHROMIUM is None or DRIVER is None, reason="`make browser` runs it"
)
PICTURES = os.environ.get("BROWSER_PICTURES", "")
"""A folder for pictures of the page; empty: none are taken."""
WAIT_S = 20
PHONE, LAPTOP = (390, 844), (1280, 860)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
NOTE_SIZES = """(window.sizes = [], new MutationObserver(() =>
  window.sizes.push(document.querySelector(".drawn")?.textContent.length ?? 0)
).observe(document.querySelector(".answer"), { childList: true, subtree: true }))"""
"""Notes in a script how long the drawn text is, at each of its changes."""
SLOW_HISTORY = """(window.numReads = 0, window.fetch = ((fetch) => async (url, ...rest) => {
  const response = await fetch(url, ...rest);
  if (!url.includes("ListHistory")) return response;
  await new Promise((resolve) => setTimeout(resolve, 2500));
  window.numReads += 1;
  return response;
})(window.fetch))"""
"""Makes each read of a run's history slower than the page's refresh, and counts them."""
AT_LIMIT, AT_END = "The limit of tokens is reached.", "The model has ended its text."
DRAWS_MAX = 5
ADAM = AdamParams(learning_rate=1e-2)
TEXT = Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9]})


class Page:
    """One browser, and what a user does with it."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def until(self, found: Callable[[], T], what: str = "") -> T:
        """Return what `found` returns, once that is true."""
        result = WebDriverWait(self.driver, WAIT_S, poll_frequency=0.1).until(lambda _: _tried(found), what)
        assert result is not None
        return result

    def one(self, selector: str, text: str = "") -> WebElement:
        """Return the first visible element that matches and contains the text, once there is one."""
        return self.until(lambda: self.all(selector, text), f"no {selector} {text!r}")[0]

    def all(self, selector: str, text: str = "") -> list[WebElement]:
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return [each for each in found if each.is_displayed() and text in each.text]

    @property
    def text(self) -> str:
        return str(self.driver.find_element(By.TAG_NAME, "body").text)

    def sign_in(self, key: str) -> None:
        self.driver.get(self.url + "/ui/")
        self.one("input[name=key]").send_keys(key, Keys.ENTER)

    def open(self, part: str) -> None:
        self.one("nav a", part).click()
        self.one("main h1", part)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def picture(self, name: str) -> None:
        """Write a picture, if they are asked for."""
        if PICTURES:
            self.driver.save_screenshot(str(Path(PICTURES) / f"{name}.png"))

    def problems(self) -> list[str]:
        """Return what the browser has complained of since the last call, but for refused calls."""
        logged = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        lines = [each["message"] for each in logged if each["level"] == "SEVERE"]
        return [line for line in lines if "Failed to load resource" not in line]


def _tried(found: Callable[[], T]) -> T | None:
    try:
        return found()
    except StaleElementReferenceException:  # the page has replaced it meanwhile
        return None


@contextmanager
def browser(url: str, size: tuple[int, int] = LAPTOP, *, is_dark: bool = False) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in (*OPTIONS, f"--window-size={size[0]},{size[1]}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER or ""))
    theme = {"features": [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]}
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    try:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", theme)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        page = Page(driver, url)
        yield page
        assert page.problems() == []
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with shipped_pool(tmp_path_factory.mktemp("pool") / "data") as pool:
        yield pool


@pytest.fixture(scope="module")
def client(pool: ServedPool) -> Iterator[TrainingClient]:
    """Return an adapter of alice; bob trains one, too."""
    with pool.client("alice") as service, pool.client("bob") as other:
        bobs = other.create_lora_training_client(rank=8, name="bobs-run")
        step(bobs, 3)
        client = service.create_lora_training_client(rank=8, name="ferry", user_metadata={"project": "harbour"})
        step(client, 12)
        client.report_metrics(12, {"eval/score": 0.5}).result(WAIT_S)
        client.save_state("evening").result(WAIT_S)
        yield client


def step(client: TrainingClient, number: int = 1) -> None:
    for _ in range(number):
        client.train_step([TEXT], "cross_entropy", ADAM).result(WAIT_S)


def admin_key(pool: ServedPool) -> str:
    key, _ = pool.run(pool.coordinator.authenticator.create_key("operator", role=Role.ADMIN))
    return str(key)


def test_a_wrong_key_is_refused_with_the_reason_and_the_right_one_opens_the_clock(pool: ServedPool) -> None:
    with browser(pool.http_url) as page:
        page.sign_in("tp_000000000000_nonsense")
        assert "unknown or revoked" in page.one(".sign-in .bad", "key").text
        page.picture("sign-in")
        key = page.one("input[name=key]")
        key.clear()
        key.send_keys(pool.key("alice"), Keys.ENTER)
        page.one("main h1", "Clock")
        page.open("Runs")
        page.run("location.hash = '#/runs/%'")
        page.one("main h1", "Clock")
        assert "alice (member)" in page.one(".who").text
        assert page.run("document.cookie") == "", "no script can read the sign-in"
        assert page.run("[localStorage.length, sessionStorage.length]") == [0, 0]
        page.one(".who button", "Sign out").click()
        page.one("input[name=key]")
        page.driver.refresh()
        page.one("input[name=key]")


def test_a_cycle_appears_as_it_commits_and_the_keyboard_chooses_it(pool: ServedPool, client: TrainingClient) -> None:
    with browser(pool.http_url) as page:
        page.sign_in(pool.key("alice"))
        clock = page.one("svg.clock")
        step(client, 3)
        page.until(lambda: page.run("document.querySelectorAll('svg.clock rect[fill]').length") > 2, "bars")
        page.one(".legend", "alice")

        def choose() -> list[WebElement]:
            clock.send_keys(Keys.ARROW_LEFT)  # the newest first: it may be that of a save
            return page.all(".detail", "alice on w0: 4 tokens")

        page.until(choose)
        clock.send_keys(Keys.ESCAPE)
        page.until(lambda: "Cycle" not in page.one(".detail").text)
        page.picture("clock")


def test_a_member_sees_others_as_others(pool: ServedPool, client: TrainingClient) -> None:
    with browser(pool.http_url) as page, pool.client("bob") as other:
        page.sign_in(pool.key("alice"))
        step(other.create_lora_training_client(rank=8, name="bobs-second"), 3)
        page.one(".legend", "others")
        page.one("section[aria-label=Queue]", "others")
        for part in ("Runs", "Checkpoints", "Playground", "Pool"):
            page.open(part)
            page.until(lambda: page.all("main section, main form"))
            assert "bob" not in page.text, part
        assert not page.all("section[aria-label=Tenants], section[aria-label=Keys]"), "for administrators alone"


def test_a_curve_grows_while_the_run_goes_on(pool: ServedPool, client: TrainingClient) -> None:
    with browser(pool.http_url, is_dark=True) as page:
        page.sign_in(pool.key("alice"))
        page.open("Runs")
        page.one("td a", "ferry").click()

        def num_points() -> int:
            return int(page.one("[data-metric='loss per token']").get_attribute("data-points") or 0)

        before = num_points()
        step(client, 2)
        page.until(lambda: num_points() >= before + 2)
        for metric in ("grad_norm", "eval/score"):
            assert page.one(f"[data-metric='{metric}'] svg").get_attribute("aria-label")
        page.one("section", "evening")
        assert "project=harbour" in page.text
        page.picture("run-dark")
        before = num_points()
        page.open("Runs")
        page.run(SLOW_HISTORY)
        page.one("td a", "ferry").click()
        page.until(lambda: page.run("window.numReads") >= 2)
        assert num_points() == before, "a read that is slower than the refresh counts no step twice"


def draw_to_limit(page: Page) -> None:
    """Draw a text, and another one if the model has ended it before the limit, as it does now and then."""
    for _ in range(DRAWS_MAX):
        page.run(NOTE_SIZES)
        page.one("button:enabled", "Draw").click()
        page.until(lambda: page.one(".answer").text.endswith((AT_LIMIT, AT_END)), "no end of the text")
        if page.all(".answer", AT_LIMIT):
            return
    page.one(".answer", AT_LIMIT)


def test_a_sample_streams_and_a_checkpoint_can_be_chosen(pool: ServedPool, client: TrainingClient) -> None:
    with browser(pool.http_url) as page:
        page.sign_in(pool.key("alice"))
        page.open("Playground")
        page.one("option", "ferry")
        draw_to_limit(page)
        sizes = page.run("window.sizes")
        assert len({size for size in sizes if size}) > 3, "the text has grown piece by piece"
        page.picture("playground")


def test_deleting_asks_first_and_a_checkpoint_is_downloaded_with_the_sign_in_alone(
    pool: ServedPool, client: TrainingClient
) -> None:
    client.save_state("mistake").result(WAIT_S)
    with browser(pool.http_url) as page:
        page.sign_in(pool.key("alice"))
        page.open("Checkpoints")
        row = page.one("tr", "mistake")
        address = row.find_element(By.CSS_SELECTOR, "a.button").get_attribute("href")
        size = "(async () => (await (await fetch(arguments[0])).arrayBuffer()).byteLength)().then(arguments[1])"
        assert page.driver.execute_async_script(size, address) > 10_000
        row.find_element(By.CSS_SELECTOR, "button.danger").click()
        page.one("dialog button", "Cancel").click()
        page.one("tr", "mistake").find_element(By.CSS_SELECTOR, "button.danger").click()
        page.one("dialog button", "Delete").click()
        page.until(lambda: not page.all("tr", "mistake"))
        page.one("#notice", "deleted")


def test_an_administrator_sees_the_pool_with_its_problems_and_creates_a_key(
    pool: ServedPool, client: TrainingClient
) -> None:
    with browser(pool.http_url) as page:
        page.sign_in(admin_key(pool))
        page.open("Pool")
        page.one("main", "Nothing is wrong")
        workers = page.one("section[aria-label=Workers]", "ready").text
        assert "w0" in workers
        for tenant in ("alice", "bob"):
            page.one("section[aria-label=Tenants] tr", tenant)
        keys = page.one("section[aria-label=Keys]", "alice")
        keys.find_element(By.CSS_SELECTOR, "input").send_keys("carol", Keys.ENTER)
        assert page.one(".made code", "tp_").text.startswith("tp_")
        row = page.one("section[aria-label=Keys] tr", "carol")
        keys.find_element(By.CSS_SELECTOR, "input").send_keys("da")
        row.find_element(By.CSS_SELECTOR, "button.danger").click()
        page.one("dialog button", "Revoke").click()
        page.until(lambda: not page.all("section[aria-label=Keys] tr", "carol"))
        page.one(".made code", "tp_")  # a refresh keeps what is shown only once, and what is half typed
        assert page.one("section[aria-label=Keys] input").get_attribute("value") == "da"
        page.picture("pool")


def test_an_empty_run_list_says_what_to_type_and_fits_a_phone(pool: ServedPool) -> None:
    with browser(pool.http_url, PHONE) as page:
        page.sign_in(pool.key("dora"))
        for part in ("Clock", "Runs", "Checkpoints", "Playground", "Pool"):
            page.open(part)
            page.until(lambda: page.all("main section, main form"))
            width, shown = page.run("[document.documentElement.scrollWidth, innerWidth]")
            assert width <= shown, part
        page.open("Runs")
        page.one("main code", "create_lora_training_client")


def test_two_tabs_share_one_stream(pool: ServedPool, client: TrainingClient) -> None:
    with browser(pool.http_url) as page:
        page.sign_in(pool.key("alice"))
        page.one("svg.clock")
        page.driver.switch_to.new_window("tab")
        page.driver.get(page.url + "/ui/")
        page.one("svg.clock")
        page.until(lambda: len(pool.coordinator.core.journal.watchers) == 1, "one stream")
        step(client, 2)
        page.until(lambda: page.run("document.querySelectorAll('svg.clock rect[fill]').length") > 0, "bars")
        page.one(".legend", "alice")


def test_whoever_signs_in_next_sees_nothing_of_the_one_before_in_any_tab(
    pool: ServedPool, client: TrainingClient
) -> None:
    with browser(pool.http_url) as page:
        page.sign_in(admin_key(pool))
        page.one("svg.clock")
        first = page.driver.current_window_handle
        page.driver.switch_to.new_window("tab")
        page.driver.get(page.url + "/ui/")
        page.one(".who button", "Sign out").click()
        page.one("input[name=key]").send_keys(pool.key("bob"), Keys.ENTER)
        for tab in (page.driver.current_window_handle, first):
            page.driver.switch_to.window(tab)
            page.one(".who", "bob (member)")
            step(client, 2)
            page.one(".legend", "others")
            assert "alice" not in page.text
