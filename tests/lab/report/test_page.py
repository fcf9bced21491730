"""The page holds all it shows, and shows names as they are."""

from __future__ import annotations

import re
from base64 import b64decode
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from verl_ext.lab.report.page import to_page
from verl_ext.lab.report.panels import Panel
from verl_ext.lab.report.tables import Table

PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Reader(HTMLParser):
    """Tags with their attributes, and text; fails where tags do not match."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.text.append(data.strip())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def panel(name="a", section="One", title="A title", caption="A caption."):
    return Panel(name, section, title, caption, Figure())


def page(name="grpo", plots=()):
    return to_page(
        "Runs", "A lead.", [Table(f"Table of {name}", ("method", "steps"), ((name, "3"),))], [f"{name}!"], plots
    )


def test_tables_notes_and_plots_are_there():
    reader = Reader(page(plots=[(panel(), PNG), (panel("b"), PNG), (panel("c", "Two"), PNG)]))
    assert {"Runs", "A lead.", "Table of grpo", "method", "3", "grpo!", "One", "Two", "A caption."} <= set(reader.text)
    assert len(reader.all("section")) == 2 and len(reader.all("figure")) == 3
    assert all(image["alt"] == "A title" for image in reader.all("img"))


def test_every_image_is_in_the_page():
    images = Reader(page(plots=[(panel(), PNG), (panel("b"), PNG + b"more")])).all("img")
    heads, data = zip(*(image["src"].split(",", 1) for image in images), strict=True)
    assert set(heads) == {"data:image/png;base64"}
    assert [b64decode(part) for part in data] == [PNG, PNG + b"more"]


def test_nothing_is_loaded_from_anywhere():
    text = page(plots=[(panel(), PNG)])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    assert not {tag for tag, _ in Reader(text).tags} & {"script", "link", "iframe", "object", "base"}


def test_it_fits_a_phone():
    text = page(plots=[(panel(), PNG)])
    (viewport,) = (meta for meta in Reader(text).all("meta") if meta.get("name") == "viewport")
    assert viewport["content"] == "width=device-width, initial-scale=1"
    assert text.count("<table>") == text.count('<div class="scroll"><table>')


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b", "{title}", "{0.x}"])
def test_names_are_text(name):
    reader = Reader(page(name, plots=[(panel(title=name, caption=name, section=name), PNG)]))
    assert name in reader.text
    assert not reader.all("script") and [image["alt"] for image in reader.all("img")] == [name]


def test_without_plots_it_is_still_a_page():
    assert Reader(page()).all("table")
