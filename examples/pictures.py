"""Make the pictures of docs/report.md: the report of a run, in a browser.

It trains on the digits of the demonstration, three of them with NaN or Inf in them, at a learning rate that is too high.

    python examples/pictures.py [folder]

Needs scikit-learn, selenium, and Debian's chromium and chromium-driver. The folder is docs/pictures by default.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from selenium import webdriver

from keras_nanguard import NanGuard
from keras_nanguard._cli import demo

EPOCHS = 4
FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def network() -> keras.Model:
    """Return a small network at a learning rate ten times too high."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(64, activation="relu", name=f"hidden_{number}") for number in (1, 2)]
    stack = [keras.Input((8, 8, 1)), keras.layers.Flatten(), *hidden, keras.layers.Dense(10, name="head")]
    model = keras.Sequential(stack, name="digits")
    model.compile(keras.optimizers.SGD(1.0, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(directory: str) -> NanGuard:
    """Train on the digits of the demonstration, three of them broken, and return the guard."""
    x, y, *_ = demo.digits()
    x[list(demo.UNSCALED)] /= 65535.0
    guard = NanGuard(directory=directory)
    network().fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[guard])
    return guard


def photograph(page: Path, picture: Path, width: int, height: int, dark: bool = False, script: str = "") -> None:
    """Write a screenshot of a local page in Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page.as_uri())
        driver.execute_script(script)
        driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        driver.save_screenshot(str(picture))
    finally:
        driver.quit()


def main() -> None:
    """Make all pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        page = train("run1").report(Path(scratch) / "run.html")
        photograph(page, folder / "report.png", 1180, 1190)
        unfold = "document.documentElement.style.scrollBehavior = 'auto'; const c = document.querySelector('#card-0'); c.open = true;"
        photograph(page, folder / "card.png", 1180, 980, dark=True, script=f"{unfold} c.scrollIntoView()")
        os.chdir(folder)
    print(f"Written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}.")


if __name__ == "__main__":
    main()
