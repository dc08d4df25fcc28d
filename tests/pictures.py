"""Compares places of texts in a picture: none may leave it, lie across an axis, or cover another
one."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg

PIXELS = 2.0  # a letter's edge may be so far outside


def check_texts(figure) -> None:
    """Draws a figure, and compares the boxes of its texts."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    alone = [] if figure._suptitle is None else [figure._suptitle]  # no other text may lie on them
    for axes in figure.axes:
        alone += [axes.title, axes._left_title, axes._right_title]
        for text in axes.texts:
            if getattr(text, "xycoords", None) == ("data", "axes fraction"):  # above the axes
                alone.append(text)
            else:
                _check_inside(text, axes.get_window_extent(renderer), renderer)
        labels = [_shown_labels(axes.xaxis), _shown_labels(axes.yaxis)]
        for shown in labels:
            _check_apart([label for label in shown if label.get_rotation() % 90 == 0], renderer)
        for text in (axes.xaxis.label, axes.yaxis.label, *labels[0], *labels[1]):
            _check_inside(text, figure.bbox, renderer)
    for text in alone:
        _check_inside(text, figure.bbox, renderer)
    _check_apart(alone, renderer)


def _shown_labels(axis) -> list:
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def _check_inside(text, around, renderer) -> None:
    box = text.get_window_extent(renderer)
    beyond = around.x0 - box.x0, box.x1 - around.x1, around.y0 - box.y0, box.y1 - around.y1
    assert not text.get_text() or max(beyond) < PIXELS, f"{text.get_text()!r} leaves its place"


def _check_apart(texts, renderer) -> None:
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()
    ]
    for (one, first), (other, second) in combinations(boxes, 2):
        width = min(first.x1, second.x1) - max(first.x0, second.x0)
        height = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(width, height) < PIXELS, f"{one!r} and {other!r} lie on each other"
