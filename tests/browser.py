"""A headless Chromium for tests; they are skipped, with the reason, where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")


@contextmanager
def open_browser() -> Iterator:
    """A driver of Debian's Chromium (packages chromium and chromium-driver)."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=programs["chromedriver"])
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def set_width(driver, width: int) -> None:
    """Make the page as wide as a device of `width` CSS pixels."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
