"""A batch as a page of HTML, for `--show_batch batch.html`: targets are coloured."""

from collections.abc import Sequence
from pathlib import Path

from training.data.show import ShownDocument, ShownSequence
from training.host.files import replace_file
from training.host.pages import escaped, page

SHOWN_ON_A_PAGE = 20_000  # characters of one stretch of targets, or of masked tokens
STYLE = """
mark { background: var(--target); color: inherit; border-bottom: 1px solid var(--target-line); }
.bar { display: flex; height: 1.1rem; border: 1px solid var(--line); margin: .4rem 0; }
.bar > div { border-right: 1px solid var(--page); background: var(--line); min-width: 1px;
  box-sizing: border-box; }
.bar > div > div { height: 100%; background: var(--target-line); }
.bar > .padding { background:
  repeating-linear-gradient(45deg, transparent 0 4px, var(--line) 4px 5px); }
"""
EXPLANATION = """
<p><mark>Marked text is trained on</mark>: the model learns to predict these tokens. The text around
them is only read. A bar has a sequence's documents side by side, as wide as they are long, in
<b>green</b> the share of each that is trained on; the hatched rest is padding. Documents of a
sequence do not see each other.</p>
"""


def write_batch(path: Path, sequences: Sequence[ShownSequence]) -> None:
    """Writes the sequences of `read_batch` as a page that needs no other file."""
    body = EXPLANATION + "\n".join(map(_sequence, sequences))
    replace_file(path, page("What a run is trained on", body, STYLE))


def _sequence(sequence: ShownSequence) -> str:
    documents = "\n".join(_document(one) for one in sequence.documents)
    return f"<h2>{escaped(sequence.title)}</h2>\n{_bar(sequence)}\n{documents}"


def _bar(sequence: ShownSequence) -> str:
    """Returns a bar as long as the sequence: documents with their targets, then padding."""
    parts: list[str] = []
    for document in sequence.documents:
        targets = 100 * document.num_targets / max(1, document.num_tokens)
        tip = f'title="{escaped(document.title)}"'
        green = f'<div style="width:{targets:.2f}%"></div>'
        parts.append(f'<div {tip} style="flex:{document.num_tokens} 0 0">{green}</div>')
    padding = sequence.length - sum(one.num_tokens for one in sequence.documents)
    if padding > 0:
        parts.append(
            f'<div class="padding" title="{padding:,} padding" style="flex:{padding} 0 0"></div>'
        )
    return f'<div class="bar">{"".join(parts)}</div>'


def _document(document: ShownDocument) -> str:
    # A line feed right behind <pre> is dropped by browsers: this one is, and the text's own first
    # one stays.
    texts = [f"<h3>{escaped(document.title)}</h3>\n<pre>\n"]
    for i, stretch in enumerate(document.stretches):
        text = escaped(stretch.text)
        if stretch.heading:
            heading = f"<h4>{escaped(stretch.heading)}</h4>\n<pre>\n"
            texts = (
                [*texts, "</pre>\n", heading]
                if i
                else [f"<h3>{escaped(document.title)}</h3>\n{heading}"]
            )
        texts.append(f"<mark>{text}</mark>" if stretch.is_target else text)
    return "".join([*texts, "</pre>"])
