"""The page is self-contained, and shows names unchanged."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from verl_ext.files import check_folder
from verl_ext.lab.page import Page
from verl_ext.lab.plot import Plot
from verl_ext.lab.table import Table

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


def plot(name="a", section="One", title="A title", caption="A caption."):
    return Plot(name, section, title, caption, Figure())


def page(name="grpo", plots=()):
    table = Table(f"Table of {name}", ("method", "steps"), ((name, "3"),))
    plots, images = zip(*plots, strict=True) if plots else ((), ())
    return Page("Runs", "A lead.", [table], [f"{name}!"], plots).to_html(images)


def test_tables_notes_and_plots_are_there():
    reader = Reader(page(plots=[(plot(), PNG), (plot("b"), PNG), (plot("c", "Two"), PNG)]))
    assert {"Runs", "A lead.", "Table of grpo", "method", "3", "grpo!", "One", "Two", "A caption."} <= set(reader.text)
    assert len(reader.all("section")) == 2 and len(reader.all("figure")) == 3
    assert all(image["alt"] == "A title" for image in reader.all("img"))


def test_every_image_is_in_the_page():
    images = Reader(page(plots=[(plot(), PNG), (plot("b"), PNG + b"more")])).all("img")
    heads, data = zip(*(image["src"].split(",", 1) for image in images), strict=True)
    assert set(heads) == {"data:image/png;base64"}
    assert [b64decode(part) for part in data] == [PNG, PNG + b"more"]


def test_nothing_is_loaded_from_anywhere():
    text = page(plots=[(plot(), PNG)])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    assert not {tag for tag, _ in Reader(text).tags} & {"script", "link", "iframe", "object", "base"}


def test_it_fits_a_phone():
    text = page(plots=[(plot(), PNG)])
    (viewport,) = (meta for meta in Reader(text).all("meta") if meta.get("name") == "viewport")
    assert viewport["content"] == "width=device-width, initial-scale=1"
    assert text.count("<table>") == text.count('<div class="scroll"><table>')


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b", "{title}", "{0.x}"])
def test_names_are_text(name):
    reader = Reader(page(name, plots=[(plot(title=name, caption=name, section=name), PNG)]))
    assert name in reader.text
    assert not reader.all("script") and [image["alt"] for image in reader.all("img")] == [name]


def test_without_plots_it_is_still_a_page():
    assert Reader(page()).all("table")


def test_page_numbers_and_plots_are_written(tmp_path):
    path = Page("Runs", "A lead.", [], plots=[plot("a"), plot("b")], numbers={"x": 1}).write(tmp_path / "new", "runs")
    assert path == tmp_path / "new" / "runs.html" and path.read_text().count("data:image/png;base64,") == 2
    assert json.loads((tmp_path / "new" / "runs.json").read_text()) == {"x": 1, "plots": ["a.png", "b.png"]}
    assert all((tmp_path / "new" / f"{name}.png").read_bytes().startswith(PNG) for name in "ab")


def test_plots_of_an_earlier_page_are_removed(tmp_path):
    """No other file is: a JSON file may be of another program, or damaged."""
    Page("Runs", "", [], plots=[plot("a"), plot("b")]).write(tmp_path, "runs")
    (tmp_path / "own.png").write_bytes(PNG)
    Page("Runs", "", [], plots=[plot("b"), plot("c")]).write(tmp_path, "runs")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["b.png", "c.png", "own.png"]
    out = tmp_path / "out"
    for text in ('{"plots": ["../own.png", 3]}', '{"plots": ["../own.png", "runs.html"]}', "{", "[]"):
        out.mkdir(exist_ok=True)
        (out / "runs.json").write_text(text)
        page = Page("Runs", "", []).write(out, "runs")
        assert page.exists() and (tmp_path / "own.png").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_work(tmp_path):
    assert check_folder(tmp_path / "new" / "below") == tmp_path / "new" / "below"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        with pytest.raises(ValueError, match=r"--out .*is a file, name a folder\."):
            check_folder(out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="cannot be written to"):
        check_folder(tmp_path / "closed" / "out")
