"""Pages of HTML as tests read them: by a parser everywhere, and in headless Chromium where it is
installed."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
VOID = {
    "meta",
    "br",
    "hr",
    "img",
    "line",
    "polyline",
    "rect",
    "circle",
    "path",
}  # elements without an end
FETCHING = {
    "src",
    "href",
    "srcset",
    "data",
    "action",
    "poster",
    "background",
}  # attributes that load or lead elsewhere


class Page(HTMLParser):
    """Elements of a page, each as (name, attributes), and its text. Fails for what would reach a
    network or run.

    Attributes:
        texts: the text inside each element of a name, in their order: "h1", "pre" or "mark".
    """

    def __init__(self, content: str):
        super().__init__()
        self.elements, self.texts, self._open = (
            list[tuple[str, dict]](),
            dict[str, list[str]](),
            list[str](),
        )
        self.feed(content)
        self.close()
        assert not self._open, f"{self._open} are not ended"

    def handle_starttag(self, name, attributes):
        values = dict(attributes)
        assert name not in ("script", "link", "iframe", "object", "embed", "base", "form"), name
        assert not {*values} & FETCHING and not any(each.startswith("on") for each in values), (
            values
        )
        self.elements.append((name, values))
        if name not in VOID:
            self._open.append(name)
            self.texts.setdefault(name, []).append("")

    def handle_startendtag(self, name, attributes):
        self.handle_starttag(name, attributes)
        if name not in VOID:
            self._open.pop()

    def handle_endtag(self, name):
        assert self._open and self._open.pop() == name, name

    def handle_data(self, text):
        assert ("url(" not in text and "@import" not in text) or "style" not in self._open
        for name in {*self._open}:
            self.texts[name][-1] += text


def read_page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def run_chromium(folder: Path, *words: str) -> str:
    """Returns what headless Chromium prints. Its profile is a folder inside `folder`."""
    assert CHROMIUM is not None
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking"
    )
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *quiet.split(), "--disable-component-update", "--disable-sync", profile, *words],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout
