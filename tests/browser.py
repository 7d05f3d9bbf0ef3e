"""Chromium without a screen, from the system's packages: nothing is fetched for it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)
MISSING = "Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)"


def found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def chromium(*, width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """A WebDriver. Without Chromium the test is skipped, and fails where CI is set."""
    browser, driver = found(BROWSERS), found(DRIVERS)
    if browser is None or driver is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = browser
    # No sandbox: it needs privileges that containers do not give.
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", f"--window-size={width},{height}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = Chrome(options=options, service=Service(driver))
    try:
        yield session
    finally:
        session.quit()


def emulate(session: Any, *, dark: bool = False, phone: bool = False) -> None:
    """What a browser tells its pages of the system; both False is the default."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    session.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    session.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone, "maxTouchPoints": 1})
    if phone:
        size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    else:
        session.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
