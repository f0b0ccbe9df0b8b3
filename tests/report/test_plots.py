"""Plots: extremes survive thinning, ticks are round, values are where they belong."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.report.plots import SIZE, Curve, Marker, Plot, PlotBlock, band, draw, heat_map, sparkline
from zslurm.report.thinning import column_means, keep_extremes, smooth

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000)


@given(values, st.integers(2, 50))
def test_thinning_keeps_the_ends_the_highest_and_the_lowest_point_in_order(y: list[float], columns: int) -> None:
    x = np.arange(len(y), dtype=float)
    kept_x, kept_y = keep_extremes(x, np.array(y), columns)
    assert len(kept_x) <= 2 * columns + 2
    assert (kept_x[0], kept_x[-1]) == (0, len(y) - 1)
    assert np.all(np.diff(kept_x) > 0)
    assert (kept_y.min(), kept_y.max()) == (min(y), max(y))
    assert [y[int(at)] for at in kept_x] == kept_y.tolist()


def test_one_spike_among_a_hundred_thousand_steps_is_kept_and_nan_is_left_out() -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[54_321], y[60_000] = 9.0, np.nan
    x, thin = keep_extremes(np.arange(100_000.0), y)
    assert 9.0 in thin
    assert not np.isnan(thin).any()
    assert len(x) <= 802


def test_means_of_columns_and_smoothing_keep_a_constant() -> None:
    x, y = column_means(np.arange(1000.0), np.full(1000, 7.0), 10)
    assert (len(x), set(y)) == (10, {7.0})
    assert smooth(np.array([np.nan, 7.0, np.nan, 7.0]), 10)[1:].tolist() == pytest.approx([7.0] * 3)


def test_a_point_is_drawn_where_the_page_reads_its_value_back() -> None:
    html = str(draw(Plot("a", "b", [Curve("c", np.array([0.0, 5.0, 10.0]), np.array([1.0, 3.0, 2.0]))])))
    low, high = (float(re.search(rf'data-{name}="(\S+)"', html)[1]) for name in ("y0", "y1"))  # type: ignore[index]
    (path,) = re.findall(r'data-name="c" d="M([^"]*)"', html)
    points = [tuple(map(int, point.split())) for point in path.split("L")]
    assert [x for x, _ in points] == [0, SIZE // 2, SIZE]
    assert [high - y / SIZE * (high - low) for _, y in points] == pytest.approx([1, 3, 2], abs=1e-3)


@pytest.mark.parametrize("y", [[2.0, 2.0], [0.0, 0.0], [1e-9, 2e-9], [-1e30, 1e30], [5.0]])
def test_any_range_of_values_can_be_drawn(y: list[float]) -> None:
    html = str(draw(Plot("a", "", [Curve("c", np.arange(len(y), dtype=float), np.array(y))])))
    assert "nan" not in html
    assert "inf" not in html
    assert html.count("<i ") >= 3


def test_without_a_point_there_is_no_plot() -> None:
    nothing = np.full(3, np.nan)
    assert str(draw(Plot("a", "", [Curve("c", np.arange(3.0), nothing)]))) == ""
    assert str(band([], 0, 1, [])) == ""
    assert sparkline(nothing) == ""


def test_names_are_no_markup() -> None:
    curve = Curve('<b>"x"', np.arange(3.0), np.arange(3.0))
    drawn = str(draw(Plot("<i>", "&", [curve, curve], markers=[Marker(1, "<u>")])))
    drawn += str(band([("<i>", [PlotBlock(0, 1, "p-steps", "<u>")])], 0, 1, [Marker(0, "<s>")]))
    assert not re.search(r"<b>\"|<i>|<u>|<s>", drawn.replace("<b>&lt;i&gt;</b>", ""))


def test_a_heat_map_is_a_picture_of_its_values() -> None:
    from matplotlib.image import imread

    matrix = np.array([[0.0, 0.5, 1.0], [np.nan, 1.0, 0.0]])
    html = str(heat_map("a", matrix, 0, 1, x=("first", "last"), y="2 rows", unit=""))
    (data,) = re.findall(r"base64,([^\"]+)", html)
    pixels = (imread(io.BytesIO(base64.b64decode(data))) * 255).round().astype(int)
    assert pixels.shape == (2, 3, 4)
    assert pixels[0, 0].tolist() == pixels[1, 2].tolist() == [68, 1, 84, 255]
    assert pixels[0, 2, :3].tolist() == [253, 231, 37]
    assert pixels[1, 0, 3] == 0, "no value is no colour"


def test_a_line_of_blocks_rises_with_its_values() -> None:
    assert sparkline(np.arange(8.0), 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(np.arange(10_000.0))) == 48
