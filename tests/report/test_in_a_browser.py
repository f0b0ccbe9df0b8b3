"""The page in headless Chromium: it renders, plots are drawn, values show, nothing is fetched or complained of."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report.browser import Browser, find_browser
from tests.report.runs import failed_once
from zslurm.report.page import as_html
from zslurm.report.run_facts import read_runs
from zslurm.report.sections import build

PHONE = 390
BLUE = (0x1F, 0x6F, 0xEB)
"""The colour of the first curve on a light page."""

_POINT_AT_ALL = """<script>
for (const svg of document.querySelectorAll("figure.plot svg")) {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 5}));
}
</script>"""

_IN_A_PHONE = """<!DOCTYPE html><body style="margin:0"><iframe width="{width}" height="6000" style="border:0"
 srcdoc="{page}"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {{ document.body.dataset.inner = frame.contentDocument.documentElement.scrollWidth; }};
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return find_browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("runs")
    return as_html(build(read_runs([failed_once(directory / "first").run])))


def test_plots_are_drawn_and_the_console_is_empty(page: str, browser: Browser, tmp_path: Path) -> None:
    from matplotlib.image import imread

    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(page)
    assert browser.screenshot(file, picture, 1200, 2400) == []
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (2400, 1200)
    close = np.abs(pixels - BLUE).max(axis=-1) < 40
    assert close.sum() > 1000, "curves of the first colour"
    assert close.any(axis=0).sum() > 300, "and they reach over their plots"


def test_the_value_under_the_pointer_is_that_of_the_curve(page: str, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page.replace("</body>", f"{_POINT_AT_ALL}</body>"))
    document, console = browser.document(file)
    assert console == []
    shown = re.findall(r"<output>([^<]*)</output>", document)
    assert len(shown) == page.count('<figure class="plot"')
    assert all(text.startswith("step ") for text in shown)
    mfu = next(text for text in shown if text.endswith("%"))
    assert mfu.endswith(": 40.0 %")


def test_nothing_is_wider_than_a_phone(page: str, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "phone.html"
    file.write_text(_IN_A_PHONE.format(width=PHONE, page=html.escape(page)))
    document, console = browser.document(file)
    assert console == []
    (inner,) = re.findall(r'data-inner="(\d+)"', document)
    assert int(inner) <= PHONE
