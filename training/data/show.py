"""A batch as text, for --show_batch: the tokens that a model is trained on. show_html.py makes a
page of it."""

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from model import IGNORE_INDEX
from training.data.loader import PackedLoader, longest_first, make_batch
from training.data.packing import Span
from training.data.sources import RowReader
from training.data.tokens import PROMPT

NEAR = 8  # tokens before a stretch that it is decoded with
SHOWN_DOCUMENTS = 20  # of a sequence, in a terminal
SHOWN = 400  # characters of one stretch of targets, or of masked tokens
GREEN, END = "\033[32m", "\033[0m"


@dataclass
class Stretch:
    """Neighbouring tokens of a document, all targets or none, as text."""

    text: str
    is_target: bool
    heading: str = ""  # a line before it, where one of a document's texts begins: "leaf 1: chosen"


@dataclass
class ShownDocument:
    title: str  # its source and its numbers of tokens
    num_tokens: int
    num_targets: int
    stretches: list[Stretch]


@dataclass
class ShownSequence:
    title: str
    length: int  # tokens, padding included
    documents: list[ShownDocument]


def show_batch(
    loader: PackedLoader, tokenizer, color: bool = False, reader: RowReader | None = None
) -> str:
    """Returns the documents in the next `batch_size` sequences of the loader's global order, as
    text.

    Targets stand between [[ and ]], in green if `color` is set. Of a sequence the first documents
    are shown, and the others counted. `reader` is as in `read_batch`.
    """
    lines = list[str]()
    before, after = (f"{GREEN}[[", f"]]{END}") if color else ("[[", "]]")
    for sequence in read_batch(loader, tokenizer, SHOWN, reader):
        lines.append(sequence.title)
        for document in sequence.documents[:SHOWN_DOCUMENTS]:
            lines.append(f"--- {document.title}")
            text = ""
            for one in document.stretches:
                if one.heading:
                    lines += [text, one.heading] if text else [one.heading]
                    text = ""
                text += f"{before}{one.text}{after}" if one.is_target else one.text
            lines.append(text)
        rest = len(sequence.documents) - SHOWN_DOCUMENTS
        if rest > 0:
            lines.append(
                f"--- {_counted(rest, 'more document')}: --show_batch batch.html shows all"
            )
    return "\n".join(lines)


def read_batch(
    loader: PackedLoader, tokenizer, most: int, reader: RowReader | None = None
) -> list[ShownSequence]:
    """Returns the next `batch_size` sequences of the loader's global order, or all if the data have
    fewer.

    Args:
        most: characters of a stretch, at most.
        reader: the objective's, which says what each answer of a document is.
    """
    first, length, sequences = (
        loader.next_sequence,
        loader.packing.context_length,
        list[ShownSequence](),
    )
    for index in range(first, first + min(loader.batch_size, loader.sequences_per_epoch)):
        spans = loader.spans(index)
        batch = make_batch(loader.store, [spans], length)
        is_target = [False, *(batch.targets[0, :-1] != IGNORE_INDEX).tolist()]
        used = sum(stop - start for _, start, stop in spans)
        title = (
            f"sequence {index}: {_counted(len(spans), 'document')}, "
            f"{sum(is_target):,} of {length:,} tokens are trained on, {length - used:,} are padding"
        )
        sequences.append(ShownSequence(title, length, []))
        position = 0
        for span in longest_first(spans):
            document, start, stop = span
            places = range(position, position + stop - start)
            source, count = loader.store.source(document), sum(is_target[i] for i in places)
            title = f"{source}, tokens {start:,} to {stop - 1:,}, {count:,} of them trained on"
            targets = is_target[places.start : places.stop]
            texts = _texts_of(loader, span, targets, reader)
            if len(texts) == 1 and texts[0][1]:  # a prompt with its only answer
                title += f": {texts[0][1]}"
                texts = [(texts[0][0], "")]
            shown = ShownDocument(title, stop - start, count, [])
            tokens = batch.input_ids[0, places.start : places.stop].tolist()
            for part, heading in texts:
                before = list[int]()
                for kind, group in groupby(range(part.start, part.stop), targets.__getitem__):
                    ids = [tokens[i] for i in group]
                    text = _shown(ids, before, tokenizer, most)
                    shown.stretches.append(Stretch(text, kind, "" if before else heading))
                    before = ids[-NEAR:]
            sequences[-1].documents.append(shown)
            position = places.stop
    return sequences


def _texts_of(
    loader: PackedLoader, span: Span, targets: list[bool], reader: RowReader | None
) -> list[tuple[slice, str]]:
    """Returns the texts of a document, each as (its tokens, a line that says what it is).

    For a pair they are the trunk, which is the prompt without its last token, and two leaves.
    """
    columns = loader.store.read_columns(*span)
    if reader is None or "answer" not in columns:
        return [(slice(0, len(targets)), "")]
    answer, is_target = columns["answer"], np.array(targets)
    starts = [0, *(np.flatnonzero(np.diff(answer)) + 1).tolist()]
    has_trunk = answer[0] == PROMPT
    texts = []
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(answer)]), 1 - has_trunk):
        part = slice(start, stop)
        places = np.arange(start, stop)
        scored = places[is_target[part]] if is_target[part].any() else places
        title = reader.describe({name: column[scored] for name, column in columns.items()})
        if len(starts) > 1:
            count = f"{is_target[part].sum():,} of {stop - start:,} tokens trained on"
            title = f"leaf {number}: {title}, {count}"
        if has_trunk and not start:
            leaves = len(starts) - 1
            title = f"trunk: {_counted(stop, 'token')}, shared by {_counted(leaves, 'answer')}"
        texts.append((part, title))
    return texts


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _shown(ids: list[int], before: list[int], tokenizer, most: int) -> str:
    """Returns the text of ids that follow those `before`: alone they may lose the space that they
    begin with."""
    earlier = tokenizer.decode(before, with_special=True)
    text = tokenizer.decode(before + ids, with_special=True)
    text = (
        text[len(earlier) :]
        if text.startswith(earlier)
        else tokenizer.decode(ids, with_special=True)
    )
    if len(text) > most:
        text = f"{text[: most // 2]} ...{len(text) - most:,} characters... {text[-most // 2 :]}"
    return text
