"""The site is built strictly and without a network, and every link has a target."""

import html
import html.parser
import json
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="needs the extra docs: pip install -e .[docs]")
pytest.importorskip("furo", reason="needs the extra docs: pip install -e .[docs]")
pytest.importorskip("myst_parser", reason="needs the extra docs: pip install -e .[docs]")

ROOT = Path(__file__).parents[2]
TAGS = re.compile(r"<[^>]+>")
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


class Links(html.parser.HTMLParser):
    """Collects the links of a page, the files that it loads, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("img", "script") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(once) -> Path:
    """Build the site once, with warnings as errors and without a network."""

    def build(folder: Path) -> dict[str, str]:
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-E", "-q", "-b", "html"]
        environment = os.environ | NO_NETWORK | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True, env=environment, check=False
        )
        return {"folder": str(folder / "html"), "said": "" if done.returncode == 0 else done.stderr}

    made = once("site", build)
    assert made["said"] == ""
    return Path(made["folder"])


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Links]:
    return {path: Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_every_page_of_the_docs_is_there(site, pages):
    sources = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    missing = [path for path in sources if site / path.relative_to(ROOT / "docs").with_suffix(".html") not in pages]
    assert len(sources) > 30 and missing == []


def test_links_lead_somewhere(site, pages):
    broken = []
    for page, found in pages.items():
        for link in found.links + found.loaded:
            target = urllib.parse.urlsplit(link)
            if target.scheme or target.netloc or not link:
                continue
            file = (page.parent / urllib.parse.unquote(target.path)).resolve() if target.path else page
            known = pages.get(file)
            if not file.exists() or (target.fragment and known and urllib.parse.unquote(target.fragment) not in known.anchors):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(pages):
    """No page loads a script, a style, a font or an image from another place."""
    loaded = {link for found in pages.values() for link in found.loaded}
    assert [link for link in loaded if re.match(r"(\w+:)?//", link)] == []


def test_every_example_can_be_read(site, pages):
    """The site has the text of each script, policy file and notebook, and its page links to it."""
    shown = {name: TAGS.sub("", (site / f"{name}.html").read_text(encoding="utf-8")) for name in ("examples_sources", "notebooks")}
    shown = {name: html.unescape(text) for name, text in shown.items()}
    linked = {re.sub(r"[\W_]", "", urllib.parse.urlsplit(link).fragment) for link in pages[site / "examples.html"].links}
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".toml"):
            assert path.read_text(encoding="utf-8").strip() in shown["examples_sources"], path.name
        elif path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            missing = [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip() not in shown["notebooks"]]
            assert missing == [], path.name
        if path.is_file() and path.name != "pictures.py":
            assert re.sub(r"[\W_]", "", path.name) in linked, path.name


def test_two_clicks_from_the_front_page(site, pages):
    front = site / "index.html"

    def leads_to(page: Path) -> set[Path]:
        parts = (urllib.parse.urlsplit(link) for link in pages[page].links)
        return {(page.parent / part.path).resolve() for part in parts if part.path and not part.scheme}

    one = leads_to(front) & set(pages)
    two = set().union(*map(leads_to, one)) | one
    assert {page for page in pages if not page.name.startswith(("genindex", "py-modindex", "search"))} - two - {front} == set()
