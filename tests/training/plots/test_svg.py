"""Panels as SVG in a page: what is drawn where, and that no text of a run becomes a part of the
page."""

import pytest

from tests.browser import Page
from training.plots.panels import Curve, Panel, panels_of
from training.plots.svg import HEIGHT, MOST_POINTS, WIDTH, draw_panels, labels_of, ticks_between


@pytest.mark.parametrize(
    ("low", "high", "most", "are_whole", "expected"),
    [(0.3, 1.1, 5, False, [0.4, 0.6, 0.8, 1.0]), (1, 6, 6, True, [1, 2, 3, 4, 5, 6]), (1, 2, 6, True, [1, 2]),
     (0, 1e-5, 2, False, [0, 5e-6, 1e-5]),
     (-3, 250_000, 6, True, [0, 50_000, 100_000, 150_000, 200_000, 250_000]),
     (7, 7, 5, False, [7]), (0.6, 1.4, 6, True, [1])],
)  # fmt: skip
def test_ticks_are_round(low, high, most, are_whole, expected):
    assert ticks_between(low, high, most, are_whole) == pytest.approx(expected)


@pytest.mark.parametrize(("ticks", "expected"), [
    ([0.69305, 0.6931, 0.69315, 0.6932], "0.69305 0.69310 0.69315 0.69320"),
    ([6.85, 6.86, 6.87], "6.85 6.86 6.87"), ([1.6, 1.62], "1.60 1.62"),
    ([0.0, 0.5, 1.0], "0.0 0.5 1.0"),
    ([-2000.0, 0.0, 2000.0], "-2,000 0 2,000"), ([1000.0, 1000.5], "1,000.0 1,000.5"),
    ([5, 10], "5 10"),
    ([0, 5e-6, 1e-5, 1.5e-5], "0 5e-06 1e-05 1.5e-05"), ([3e8, 3.5e8], "3e+08 3.5e+08"),
    ([0.25], "0.2500"), ([0], "0.000"),
])  # fmt: skip
def test_numbers_of_an_axis_differ(ticks, expected):
    assert labels_of(ticks) == expected.split()


def lines_of(page):
    """The places of each line of a page."""
    texts = [values["points"] for name, values in page.elements if name == "polyline"]
    return [[tuple(map(float, place.split(","))) for place in text.split()] for text in texts]


def test_a_line_goes_through_its_values():
    """From the lower left to the upper right; the limits are a twentieth beyond, the steps a bit
    inside."""
    page = Page(draw_panels([Panel("loss", [Curve("training", [1, 2, 3], [1.0, 2.0, 3.0])])]))
    [[first, middle, last]] = lines_of(page)
    assert (
        0 < first[0] < 0.02 * WIDTH
        and middle == (WIDTH / 2, HEIGHT / 2)
        and 0.98 * WIDTH < last[0] < WIDTH
    )
    assert first[1] == pytest.approx(HEIGHT * (1 - 0.1 / 2.2), abs=0.1) and last[1] < 0.1 * HEIGHT
    assert page.texts["figcaption"] == ["loss"] and {"1", "2", "3"} <= {*page.texts["text"]}
    assert "1.5" not in page.texts["text"][-3:]  # steps are whole


def test_a_long_curve_keeps_its_peaks():
    values = [float(step % 7) for step in range(20_000)]
    values[777] = 99.0
    page = Page(
        draw_panels([Panel("loss", [Curve("training", range(20_000), values, "faint", 1)])])
    )
    [places] = lines_of(page)
    assert len(places) <= MOST_POINTS and min(y for _, y in places) == pytest.approx(
        HEIGHT * 0.05 / 1.1, abs=0.2
    )


def test_texts_of_runs_are_shown_and_never_obeyed():
    hostile = '<script>x</script>"&\ud800'
    curves = [Curve(hostile, [1], [2.0], "dots"), Curve("spike", [1], [2.0], "crosses", 3)]
    page = Page(draw_panels([Panel(hostile, curves, left_out=[5, 6])]))
    assert page.texts["figcaption"] == [hostile.replace("\ud800", "\\ud800")]
    assert [text.strip() for text in page.texts["span"]] == [
        "\u25ac <script>x</script>\"&\\ud800", "\u25ac spike", "\u25ac 2 left out"
    ]  # fmt: skip
    assert [name for name, _ in page.elements].count("path") == 1


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-300, 1e299, -5.0, 3])
def test_any_number_is_drawn(value):
    rows = [
        {"step": step, "loss": value, "gradient_norm": value, "tokens_per_second": value}
        for step in range(5)
    ]
    page = Page(draw_panels(panels_of(rows, {})))
    for line in lines_of(page):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in line)
