"""A batch as a page: its documents, with targets marked, and nothing in it that runs or loads."""

import json

import matplotlib.image
import numpy as np
import pytest

import train
from tests.browser import needs_chromium, read_page, run_chromium
from training.data.show import ShownDocument, ShownSequence, Stretch
from training.data.show_html import write_batch

HOSTILE = (
    "<script>document.body.innerHTML = ''</script><b onclick='x'>&amp; \x1b[31m \ud800 \u202e ]]>"
)


def sequences():
    stretches = [
        Stretch(f"\n{HOSTILE}?", False),
        Stretch("an answer\n", True),
        Stretch(HOSTILE, False),
    ]
    long = ShownDocument(f"{HOSTILE}.jsonl:7, 5 of 20", 20, 5, stretches)
    empty = ShownDocument("b.txt", 0, 0, [])
    return [ShownSequence("sequence 3", 32, [long, empty])]


def test_a_page_shows_texts_as_they_are(tmp_path):
    write_batch(tmp_path / "batch.html", sequences())
    page = read_page(tmp_path / "batch.html")
    shown = HOSTILE.replace("\x1b", "\u241b").replace("\ud800", "\\ud800")
    assert page.texts["pre"] == [
        f"\n\n{shown}?an answer\n{shown}",
        "\n",
    ]  # browsers drop the first line feed
    assert page.texts["mark"][1:] == ["an answer\n"]
    assert page.texts["h3"] == [f"{shown}.jsonl:7, 5 of 20", "b.txt"]
    widths = [
        values["style"] for name, values in page.elements if name == "div" and "style" in values
    ]
    assert widths == ["flex:20 0 0", "width:25.00%", "flex:0 0 0", "width:0.00%", "flex:12 0 0"]


@needs_chromium
def test_a_browser_colours_targets_and_runs_nothing(tmp_path):
    write_batch(tmp_path / "batch.html", sequences())
    picture = tmp_path / "page.png"
    run_chromium(
        tmp_path,
        f"--screenshot={picture}",
        "--window-size=800,500",
        f"file://{tmp_path}/batch.html",
    )
    pixels = np.round(255 * matplotlib.image.imread(picture)[..., :3]).astype(int)
    of_targets = (pixels == (0xC9, 0xEC, 0xD0)).all(-1)
    assert of_targets.any(1).sum() > 20 and of_targets.mean() < 0.05  # two lines of some words each
    assert (pixels < 100).all(-1).sum() > 1000  # letters: the script has not emptied the page


@pytest.fixture
def flags(tmp_path):
    rows = [{"prompt": "<i>?</i> ", "completion": letter} for letter in "abcd"]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = ["--context_length", "32", "--batch_size", "1", "--device", "cpu"]
    return ["--data", "data.jsonl", "--output_dir", "run", *sizes]


def test_the_flag_is_a_switch_or_takes_a_file(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.toml").write_text('show_batch = "of_toml.html"')
    (tmp_path / "switch.toml").write_text("show_batch = true")
    for words, file in (
        (["--show_batch", "a.html"], "a.html"), (["--show-batch=b.html"], "b.html"),
        (["--config", "page.toml"], "of_toml.html"),
        (["--config", "page.toml", "--show_batch", "c.html"], "c.html"),
    ):  # fmt: skip
        assert train.main([*flags, *words]) == 0 and capsys.readouterr().out == f"{file}\n"
        assert read_page(tmp_path / file).texts["pre"][0].startswith("\n<i>?</i> ")
    for words in (
        ["--show_batch"],
        ["--config", "switch.toml"],
        ["--config", "page.toml", "--show_batch"],
    ):
        assert train.main([*flags, *words]) == 0 and "<i>?</i> [[" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    (tmp_path / "folder.html").mkdir()
    for words, message in (
        (["--show_batch", "a.txt"], "show_batch a.txt is no name of a page; give a FILE.html, or "
                                    "--show_batch alone"),
        (["--show_batch=true"], "show_batch true is no name of a page"),
        (["--show_batch="], "empty string"),
        (["--no-show_batch=a.html"], "no-show_batch takes no word, got 'a.html'"),
        (["--show_batch", "folder.html"], "--show_batch 'folder.html' cannot be written to: Is a "
                                          "directory"),
        (["--show_batch", "none/a.html"], "cannot be written to: No such file or directory"),
        (["--data", ".", "--show_batch", "a.html"], "show_batch a.html lies in data ., which would "
                                                    "be read"),
    ):  # fmt: skip
        assert train.main([*flags, *words]) == 1 and message in capsys.readouterr().err
