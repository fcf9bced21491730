"""The pages in a real browser, without a network: they load, log no error and show their content."""

from __future__ import annotations

import pytest
from support.browser import browser, find_chromium
from support.commands import invoke
from support.rollout_logs import line, write_lines
from support.runs import write_run

from verl_ext.lab.report.command import main as report
from verl_ext.lab.waste.command import main as waste

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; tests/run.sh installs it where it can (apt-get, as root)"
)
EXECUTED = "document.title='executed'"
SCRIPT, IMAGE = f"<script>{EXECUTED}", f'"><img src=x onerror={EXECUTED}>'


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A report on runs whose names are markup, and a waste analysis of a file whose name is markup."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [write_run(folder / f"{name}.jsonl", [0.5, 0.6, 0.7], 100) for name in ("grpo", SCRIPT, IMAGE)]
    assert invoke(report, *runs, "--out", folder / "report").exit_code == 0
    rows = [line(str(prompt), float(i > prompt % 5), step) for step in (1, 2) for prompt in range(6) for i in range(4)]
    log = write_lines(folder / f"{IMAGE}.jsonl", [*rows, SCRIPT])
    assert invoke(waste, log, "--out", folder / "waste").exit_code == 0
    return {"report": folder / "report" / "report.html", "waste": folder / "waste" / "waste.html"}


@pytest.mark.parametrize("name", ["report", "waste"])
def test_it_loads_on_its_own(tab, pages, name):
    """The page requests only the file and its embedded content, without an error."""
    page = tab.open(pages[name])
    page.evaluate("Promise.all([...document.images].map(image => image.decode().catch(() => null))).then(() => 0)")
    assert page.errors == []
    assert page.requests[0] == pages[name].resolve().as_uri()
    assert {url.partition(":")[0] for url in page.requests[1:]} <= {"data"}


@pytest.mark.parametrize("name", ["report", "waste"])
def test_every_plot_is_drawn(tab, pages, name):
    page = tab.open(pages[name])
    widths = page.evaluate("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))")
    assert len(widths) == len(list(pages[name].parent.glob("*.png"))) > 3
    assert min(widths) > 500
    assert page.evaluate("[...document.images].every(image => image.getBoundingClientRect().height > 100)")


@pytest.mark.parametrize(
    ("name", "title", "texts"),
    [
        ("report", "Runs compared", ["grpo", SCRIPT, IMAGE, "rollouts to 70.0%", "200", "2,000"]),
        (
            "waste",
            "Where logged rollouts went",
            ["knapsack", "extremely hard", "not JSON", f"{IMAGE}.jsonl:49"],
        ),
    ],
)
def test_names_are_text_and_nothing_runs(tab, pages, name, title, texts):
    page = tab.open(pages[name])
    assert page.evaluate("document.title") == title
    assert page.evaluate("document.querySelectorAll('script, iframe, [onerror]').length") == 0
    cells = page.evaluate("[...document.querySelectorAll('th, td')].map(cell => cell.innerText)")
    assert all(any(text in cell for cell in cells) for text in texts)


@pytest.mark.parametrize("name", ["report", "waste"])
def test_it_fits_a_phone(tab, pages, name):
    """Wide tables scroll by themselves, the page does not."""
    page = tab.open(pages[name], width=390)
    assert page.evaluate("document.scrollingElement.scrollWidth") == 390


def test_the_test_would_see_what_goes_wrong(tab, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(f"<title>a</title><img src='http://example.org/a.png'><img src=x onerror={EXECUTED}>"
                    "<script>console.error('heard'); throw Error('thrown')</script>")  # fmt: skip
    page = tab.open(path)
    assert page.evaluate("document.title") == "executed" and "http://example.org/a.png" in page.requests
    assert any("heard" in error for error in page.errors) and any("Uncaught" in error for error in page.errors)
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in page.errors)
