"""The pages as a reader sees them: a real Chromium at 1280 and at 400 pixels."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from rlkernel.pages import show
from tests.pages import browser

WIDTHS = (1280, 400)
PAGES = ("index", "00_start", "01_tp_swiglu", "02_tp_gqa", "03_which_sum", "04_determinism")
PAGES += ("05_ffn_cost", "06_ws2_two_nodes", "07_overlap", "08_cross_node")
pytestmark = pytest.mark.browser


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


def boxed(chromium, page, width: int) -> dict:
    """How wide a table is, how wide its box, and whether the box shades what is outside."""
    assert faults(chromium.look(page, width)) == []
    return chromium.evaluate(
        "(() => { const box = document.querySelector('.rk-scroll'); return {"
        "table: box.scrollWidth, box: box.clientWidth, moves: getComputedStyle(box).overflowX,"
        "shaded: getComputedStyle(box).backgroundImage.includes('gradient') } })()"
    )


def test_a_wide_table_wraps_and_what_does_not_fit_scrolls_in_its_box(chromium, tmp_path):
    header = ["schedule", *(f"T comm {n} us" for n in range(10)), "path"]
    line = ["kernel, 4 chunks", *["10,219.3"] * 10, "chunks: kernel, 4 slices by gloo"]
    page, css = tmp_path / "wide.html", (show.CARDS, show.CARDS.with_name("page.css"))
    page.write_text(
        '<!DOCTYPE html><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{''.join(map(Path.read_text, css))}</style>"
        f'<body class="rk-page"><main>{show.table_html(header, [line])}</main></body>'
    )
    wide, narrow = (boxed(chromium, page, width) for width in WIDTHS)
    assert wide["table"] <= wide["box"], wide
    assert narrow["table"] > narrow["box"] and narrow["moves"] == "auto" and narrow["shaded"]


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
