"""A batch as text, for --show_batch: the tokens that a model is trained on.

show_html.py makes a page of it.
"""

from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from kernels.head_loss import IGNORE_INDEX
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
    """Returns the next `batch_size` sequences of the loader's global order as text.

    Targets stand between [[ and ]], in green if `color` is set. Of a sequence the first documents
    are shown, and the others counted. `reader` is as in `read_batch`.
    """
    lines: list[str] = []
    before, after = (f"{GREEN}[[", f"]]{END}") if color else ("[[", "]]")
    for sequence in read_batch(loader, tokenizer, SHOWN, reader):
        lines.append(sequence.title)
        for document in sequence.documents[:SHOWN_DOCUMENTS]:
            lines.append(f"--- {document.title}")
            text = ""
            for stretch in document.stretches:
                if stretch.heading:
                    lines += [text, stretch.heading] if text else [stretch.heading]
                    text = ""
                text += f"{before}{stretch.text}{after}" if stretch.is_target else stretch.text
            lines.append(text)
        rest = len(sequence.documents) - SHOWN_DOCUMENTS
        if rest > 0:
            count = _counted(rest, "more document")
            lines.append(f"--- {count}: --show_batch batch.html shows all")
    return "\n".join(lines)


def read_batch(
    loader: PackedLoader, tokenizer, most: int, reader: RowReader | None = None
) -> list[ShownSequence]:
    """Returns the next `batch_size` sequences of the loader's global order, or all if it has fewer.

    Args:
        most: characters of a stretch, at most.
        reader: the objective's, which says what each answer of a document is.
    """
    first, count = loader.next_sequence, min(loader.batch_size, loader.sequences_per_epoch)
    texts = _Texts(loader, tokenizer, most, reader)
    return [texts.sequence(index) for index in range(first, first + count)]


class _Texts:
    """Turns sequences of a loader into text; see read_batch."""

    def __init__(self, loader: PackedLoader, tokenizer, most: int, reader: RowReader | None):
        self._loader, self._tokenizer = loader, tokenizer
        self._most, self._reader = most, reader

    def sequence(self, index: int) -> ShownSequence:
        length, spans = self._loader.packing.context_length, self._loader.spans(index)
        batch = make_batch(self._loader.store, [spans], length)
        ids = batch.input_ids[0].tolist()
        is_target = [False, *(batch.targets[0, :-1] != IGNORE_INDEX).tolist()]
        documents, position = [], 0
        for span in longest_first(spans):
            end = position + span[2] - span[1]
            documents.append(self._document(span, ids[position:end], is_target[position:end]))
            position = end
        title = (
            f"sequence {index}: {_counted(len(spans), 'document')}, {sum(is_target):,} of "
            f"{length:,} tokens are trained on, {length - position:,} are padding"
        )
        return ShownSequence(title, length, documents)

    def _document(self, span: Span, ids: list[int], is_target: list[bool]) -> ShownDocument:
        number, start, stop = span
        source, count = self._loader.store.source(number), sum(is_target)
        title = f"{source}, tokens {start:,} to {stop - 1:,}, {count:,} of them trained on"
        texts = self._texts_of(span, is_target)
        if len(texts) == 1 and texts[0][1]:  # a prompt with its only answer
            title += f": {texts[0][1]}"
            texts = [(texts[0][0], "")]
        shown = ShownDocument(title, len(ids), count, [])
        for part, heading in texts:
            before: list[int] = []
            for kind, group in groupby(range(part.start, part.stop), is_target.__getitem__):
                stretch = [ids[i] for i in group]
                text = self._shown(stretch, before)
                shown.stretches.append(Stretch(text, kind, "" if before else heading))
                before = stretch[-NEAR:]
        return shown

    def _texts_of(self, span: Span, is_target: list[bool]) -> list[tuple[slice, str]]:
        """Returns the texts of a document, each as (its tokens, a line that says what it is).

        For a pair they are the trunk, which is the prompt without its last token, and two leaves.
        """
        columns = self._loader.store.read_columns(*span)
        if self._reader is None or "answer" not in columns:
            return [(slice(0, len(is_target)), "")]
        answer, are_targets = columns["answer"], np.array(is_target)
        borders = [0, *(np.flatnonzero(np.diff(answer)) + 1).tolist(), len(answer)]
        has_trunk = answer[0] == PROMPT
        texts = []
        for number, (start, stop) in enumerate(pairwise(borders), 1 - has_trunk):
            part = slice(start, stop)
            count = are_targets[part].sum()
            scored = np.flatnonzero(are_targets[part]) if count else np.arange(stop - start)
            title = self._reader.describe({name: x[part][scored] for name, x in columns.items()})
            if len(borders) > 2:
                trained = f"{count:,} of {stop - start:,} tokens trained on"
                title = f"leaf {number}: {title}, {trained}"
            if has_trunk and not start:
                answers = _counted(len(borders) - 2, "answer")
                title = f"trunk: {_counted(stop, 'token')}, shared by {answers}"
            texts.append((part, title))
        return texts

    def _shown(self, ids: list[int], before: list[int]) -> str:
        """Returns the text of ids that follow those `before`.

        Alone they may lose the space that they begin with.
        """
        earlier = self._tokenizer.decode(before, with_special=True)
        text = self._tokenizer.decode(before + ids, with_special=True)
        if text.startswith(earlier):
            text = text[len(earlier) :]
        else:
            text = self._tokenizer.decode(ids, with_special=True)
        left_out = len(text) - self._most
        if left_out > 0:
            half = self._most // 2
            text = f"{text[:half]} ...{left_out:,} characters... {text[-half:]}"
        return text


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
