"""The page in a real browser opens fast, loads nothing else, and all is in reach."""

import json
import shutil
from itertools import pairwise, product

import pytest
from support.recordings import HOSTILE, run_of, synthetic

from keras_nanguard._report import compare, html
from keras_nanguard._report.reported_run import ReportedRun

webdriver = pytest.importorskip("selenium.webdriver", reason="takes selenium")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.requires_backend("tensorflow", reason="needs no backend: runs once"),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium: apt-get install chromium chromium-driver"),
]

SECONDS = 2.0
"""Maximum processor time to open a page, which other work on the machine does not affect."""


@pytest.fixture(scope="session")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get("data:text/html,warm")
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    yield driver
    driver.quit()


def written(folder, name, recording):
    path = folder / f"{name}.html"
    path.write_text(html.page(run_of(recording)), encoding="utf-8", errors="replace")
    return path


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    found = {
        "usual": synthetic(3000, 12),
        "healthy": synthetic(2000, 0),
        "large": synthetic(1_000_000, 10_000),
        "hostile": synthetic(2000, 12, name=HOSTILE),
    }
    return {name: written(folder, name, recording) for name, recording in found.items()}


def opened(browser, path, width=1280, height=900, dark=False):
    """Open a page and return the processor time of its thread."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get(path.as_uri())
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]


def requests(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


DRAWN = """return [...document.querySelectorAll(".plot canvas")].map(canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
  for (let n = 0; n < pixels.length; n += 4) if (pixels[n + 3]) seen.add(pixels[n] + "," + pixels[n + 1] + "," + pixels[n + 2]);
  return seen.size;
})"""


@pytest.mark.parametrize("name", ["usual", "healthy", "large", "hostile"])
def test_it_opens(browser, pages, name):
    """In two seconds, with every chart, no error, no request, no overflow; light and dark."""
    for width, dark in product((1280, 390), (False, True)):
        took = opened(browser, pages[name], width, dark=dark)
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        assert browser.get_log("browser") == [] and took < SECONDS
        assert [url for url in requests(browser) if not url.startswith("data:")] == [pages[name].as_uri()]
        colours = browser.execute_script(DRAWN)
        assert len(colours) == 4 and min(colours) > 3
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 200) == dark


CLICK = """const u = document.querySelectorAll(".u-over")[0], box = u.getBoundingClientRect();
return [box.left, box.top, box.width, box.height]"""


def test_a_click_opens_the_card(browser, pages):
    """The card of its kind opens, shows which incident it was, and gets the focus."""
    opened(browser, pages["usual"])
    assert browser.execute_script("return document.querySelectorAll('details.card[open]').length") == 0
    left, top, width, height = browser.execute_script(CLICK)
    step = 50 + 1  # the first incident of the recording
    at = {"x": left + width * (step - 1) / (3000 - 1), "y": top + height * 0.95}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **at})
    for kind in ("mousePressed", "mouseReleased"):
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "button": "left", "clickCount": 1, **at})
    assert browser.execute_script("return document.querySelector('details.card[open]').id") == "card-0"
    assert f"step {step}." in browser.execute_script("return document.querySelector('.chosen .chosen-step').textContent")
    assert browser.execute_script("return document.activeElement.closest('details').id") == "card-0"


def test_zoom(browser, pages):
    """Buttons and a drag zoom all charts together, and a double click shows everything."""
    opened(browser, pages["usual"])
    said = "return document.getElementById('said').textContent"
    browser.execute_script("document.querySelector('[data-zoom=in]').click()")
    assert browser.execute_script(said) == "Steps 751 to 2250."
    left, top, width, height = browser.execute_script(CLICK)
    for kind, share in (("mouseMoved", 0.25), ("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
        place = {"x": left + width * share, "y": top + height / 2}
        button = {} if kind == "mouseMoved" and share == 0.25 else {"button": "left", "buttons": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "clickCount": 1, **button, **place})
    first, last = (int(word.strip(".")) for word in browser.execute_script(said).split() if word.strip(".").isdigit())
    assert 1100 < first < 1150 and 1470 < last < 1530
    browser.execute_script("document.querySelector('[data-zoom=all]').click()")
    assert browser.execute_script(said) == "Steps 1 to 3000."


FOCUSED = """const e = document.activeElement; return e.className + "|" + (e.dataset.zoom || e.id || e.tagName)"""


def test_the_keyboard_reaches_everything(browser, pages):
    """Each button, chart, card and list; arrows and Enter open and announce an incident."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, pages["usual"])
    reached = []
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(browser.execute_script(FOCUSED))
    end = next(n for n, at in enumerate(reached) if at.endswith("|BODY"))
    text = " ".join(reached[:end])
    assert all(word in text for word in ("skip|A", "|in", "|all", "plot|", "|SUMMARY")) and text.count("plot|") == 4
    browser.execute_script("document.querySelector('.plot').focus()")
    ActionChains(browser).send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 3).perform()
    assert browser.execute_script("return document.getElementById('said').textContent").startswith("Step ")
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert browser.execute_script("return document.activeElement.tagName + document.querySelector('.chosen').open") == "SUMMARYtrue"


UNNAMED = """return [...document.querySelectorAll("button, a, select, summary, canvas[role], .plot, svg[role], img")].filter(e =>
  !(e.textContent.trim() || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.alt
    || document.querySelector(`label[for="${e.id}"]`))).map(e => e.outerHTML)"""

TOLD = """return [...document.querySelectorAll(".plot")].every(p =>
  document.getElementById(p.getAttribute("aria-describedby")).textContent.includes("lowest"))"""


def test_a_screen_reader_has_names(browser, pages):
    """Controls, pictures and charts have names, headings skip no level, heads have a scope."""
    opened(browser, pages["usual"])
    assert browser.execute_script(UNNAMED) == []
    levels = browser.execute_script("return [...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert browser.execute_script(TOLD)
    assert browser.execute_script("return document.querySelectorAll('main table:not(.u-legend) th:not([scope])').length") == 0
    assert browser.execute_script("return document.documentElement.lang") == "en"


def test_several_runs(browser, tmp_path):
    runs = [ReportedRun((), synthetic(500, n, seed=n), name=f"trial {n}") for n in range(30)]
    path = tmp_path / "all.html"
    path.write_text(compare.page(runs), encoding="utf-8")
    assert opened(browser, path, 390) < SECONDS and browser.get_log("browser") == []
    assert browser.execute_script("return document.querySelectorAll('svg.spark path').length") == 30
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
