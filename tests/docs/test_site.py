"""The site is built strictly and without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="needs the extra docs: pip install -e .[docs]")
pytest.importorskip("furo", reason="needs the extra docs: pip install -e .[docs]")
pytest.importorskip("myst_parser", reason="needs the extra docs: pip install -e .[docs]")

ROOT = Path(__file__).parents[2]
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


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


def test_every_page_of_the_docs_is_there(site):
    sources = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    missing = [path for path in sources if not (site / path.relative_to(ROOT / "docs")).with_suffix(".html").is_file()]
    assert len(sources) > 30 and missing == []
