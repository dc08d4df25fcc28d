"""A batch as text, for --show_batch: it shows the tokens that a model is trained on."""

from itertools import groupby

from model import IGNORE_INDEX
from training.data.loader import PackedLoader, longest_first, make_batch

NEAR = 8  # tokens before a stretch that it is decoded with
SHOWN = 400  # characters of one stretch of targets, or of masked tokens
GREEN, END = "\033[32m", "\033[0m"


def show_batch(loader: PackedLoader, tokenizer, color: bool = False) -> str:
    """Returns the documents in the next `batch_size` sequences of the loader's global order, as text.

    Targets stand between [[ and ]], in green if `color` is set.
    """
    first, length, lines = loader.next_sequence, loader.packing.context_length, []
    for index in range(first, first + loader.batch_size):
        spans = loader.spans(index)
        batch = make_batch(loader.store, [spans], length)
        is_target = [False, *(batch.targets[0, :-1] != IGNORE_INDEX).tolist()]
        used = sum(stop - start for _, start, stop in spans)
        lines.append(
            f"sequence {index}: {len(spans)} documents, {sum(is_target):,} of {length:,} tokens are trained on, "
            f"{length - used:,} are padding"
        )
        position = 0
        for document, start, stop in longest_first(spans):
            places = range(position, position + stop - start)
            source, count = loader.store.source(document), sum(is_target[i] for i in places)
            lines.append(f"--- {source}, tokens {start:,} to {stop - 1:,}, {count:,} of them trained on")
            stretches = [(batch.input_ids[0, [*group]], kind) for kind, group in groupby(places, is_target.__getitem__)]
            shown, before = "", list[int]()
            for ids, kind in stretches:
                shown += _shown(ids.tolist(), before, kind, tokenizer, color)
                before = ids[-NEAR:].tolist()
            lines.append(shown)
            position = places.stop
    return "\n".join(lines)


def _shown(ids: list[int], before: list[int], is_target: bool, tokenizer, color: bool) -> str:
    """Returns the text of ids that follow those `before`: alone they may lose the space that they begin with."""
    earlier = tokenizer.decode(before, with_special=True)
    text = tokenizer.decode(before + ids, with_special=True)
    text = text[len(earlier) :] if text.startswith(earlier) else tokenizer.decode(ids, with_special=True)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} ...{len(text) - SHOWN:,} characters... {text[-SHOWN // 2 :]}"
    if not is_target:
        return text
    return f"{GREEN}[[{text}]]{END}" if color else f"[[{text}]]"
