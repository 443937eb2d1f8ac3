"""The pages as a reader sees them: a real Chromium at 1280 and at 400 pixels."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from tests.pages import browser

WIDTHS = (1280, 400)
PAGES = ("index", "00_start", "01_tp_swiglu", "02_tp_gqa", "03_which_sum", "04_determinism")
PAGES += ("05_ffn_cost", "06_ws2_two_nodes", "07_overlap")
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium():
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium on PATH")
    started = browser.Browser(executable)
    yield started
    started.close()


def faults(seen: browser.Seen) -> list[str]:
    """Everything that a page may not do, in words."""
    found = [f"console: {text}" for text in seen.complaints]
    found += [f"asks for {a[:80]}" for a in seen.requests if not a.startswith(("file:", "data:"))]
    for picture in seen.pictures:
        name = picture["alt"][:40] or "a picture"
        if not picture["alt"].strip():
            found.append("a picture without a text alternative")
        if min(picture["width"], picture["height"]) == 0 or picture["shown"] == 0:
            found.append(f"{name}: no size")
        if picture["colours"] < 8:
            found.append(f"{name}: blank, {picture['colours']} colours")
    if seen.scroll_width > seen.inner_width:
        found.append(f"scrolls sideways: {seen.scroll_width} in {seen.inner_width}")
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_page(built, chromium, tmp_path, name, width):
    shot = tmp_path / "page.png"
    seen = chromium.look(built.folder / f"{name}.html", width, shot)
    assert faults(seen) == []
    assert seen.requests[0].startswith("file:") and seen.title and seen.height > 600
    assert len(seen.pictures) >= 2
    colours = Image.open(shot).convert("RGB").getcolors(1 << 24)
    assert len(colours) > 100


def test_dark(built, chromium):
    seen = chromium.look(built.index, 1280, dark=True)
    assert faults(seen) == []
    ground = "getComputedStyle(document.body).backgroundColor"
    assert chromium.evaluate(ground) == "rgb(18, 24, 31)"


BLANK = io.BytesIO()
Image.new("RGB", (40, 30), "white").save(BLANK, "PNG")
WHITE = "data:image/png;base64," + base64.b64encode(BLANK.getvalue()).decode()


@pytest.mark.parametrize(
    "body, says",
    [
        ("<script>console.error('oh')</script>", "console: "),
        ("<script>nobody()</script>", "console: Uncaught"),
        ('<script src="http://127.0.0.1:9/a.js"></script>', "asks for http://127.0.0.1:9/a.js"),
        ("<style>@import 'http://127.0.0.1:9/a.css';</style>", "asks for http://127.0.0.1:9/a.css"),
        (f'<img src="{WHITE}" alt="white">', "white: blank, 1 colours"),
        (f'<img src="{WHITE}" alt=" ">', "a picture without a text alternative"),
        ('<img src="data:image/png;base64,AAAA" alt="torn">', "torn: no size"),
        ('<div style="width:2000px">wide</div>', "scrolls sideways: 20"),
    ],
    ids=lambda value: value[:24],
)
def test_a_bad_page_is_noticed(chromium, tmp_path, body, says):
    page = tmp_path / "bad.html"
    page.write_text(f'<!DOCTYPE html><link rel="icon" href="data:,">{body}')
    assert any(fault.startswith(says) for fault in faults(chromium.look(page, 1280)))
