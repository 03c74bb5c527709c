"""A real browser for the tests of reports: headless Chromium, skipped where there is none."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

resource = import_module("resource") if sys.platform != "win32" else None
_FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-dev-shm-usage
    --disable-background-networking --disable-component-update --disable-sync --hide-scrollbars
""".split()


class Browser:
    """A page at a width and in a colour scheme, and what it has logged and asked for."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(
        self, path: Path, *, width: int = 1280, scheme: str = "light", motion: str = "no-preference"
    ) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._command("Emulation.setDeviceMetricsOverride", metrics)
        preferences = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in preferences.items()]
        self._command("Emulation.setEmulatedMedia", {"features": features})
        self._driver.get_log("performance")
        self._driver.get_log("browser")
        self._driver.get(path.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self._driver.execute_script(script, *arguments)

    def press(self, key: str, code: int) -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self._command("Input.dispatchKeyEvent", {"type": "keyDown", **common, **text})
        self._command("Input.dispatchKeyEvent", {"type": "keyUp", **common})

    def console(self) -> list[str]:
        """What the page has logged since it was opened: errors of script, policy and network."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since it was opened, without data within it."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")
        ]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [s["request"]["url"] for s in sent if not s["request"]["url"].startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        taken = self._command(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"}
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    def _command(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._driver.execute_cdp_cmd(name, parameters)


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; the test is skipped where Chromium is not installed."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and chromedriver (Debian: chromium chromium-driver)")
    if resource is not None and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("Chromium reserves more address space than the limit (ulimit -v) allows")
    options = Options()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(opened)
    finally:
        opened.quit()
