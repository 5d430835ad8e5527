"""Plots: where points stand, what is written, and that nothing comes from elsewhere."""

import re
import xml.etree.ElementTree as ET

import pytest

from ambidex.plot.axis import Axis, number_text
from ambidex.plot.chart import Chart, Series, Span, Timeline


def test_axis_places_numbers_by_difference_or_by_factor() -> None:
    linear = Axis(low=0, high=10, start=100, end=200, is_log=False)
    assert [linear.place(value) for value in (0, 5, 10)] == [100, 150, 200]
    log = Axis(low=1, high=100, start=200, end=100, is_log=True)
    assert [log.place(value) for value in (1, 10, 100)] == pytest.approx([200, 150, 100])


@pytest.mark.parametrize(
    ("values", "is_log"), [([0, 3], False), ([7, 7], False), ([1, 1000], True), ([512, 512], True), ([0.9, 1.0], True)]
)
def test_ticks_are_few_and_on_the_axis(values: list[float], is_log: bool) -> None:
    axis = Axis.over(values, start=0, end=100, is_log=is_log)
    assert 1 <= len(axis.ticks()) <= 9
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks())
    assert all(0 < axis.place(value) < 100 for value in values)


def test_axis_from_zero_begins_there() -> None:
    assert Axis.over([5, 9], start=0, end=1, is_log=False, from_zero=True).low == 0
    with pytest.raises(ValueError, match="cannot hold 0"):
        Axis.over([0, 1], start=0, end=1, is_log=True)


def test_number_texts_are_short() -> None:
    assert [number_text(value) for value in (2048, 0.05, 3, 20_000, 1_048_576)] == ["2K", "0.05", "3", "20k", "1024K"]


def test_chart_is_xml_with_a_mark_for_each_point() -> None:
    chart = Chart(
        title="a < b & c", x_name="x", y_name="y", is_x_log=True,
        series=[Series(name="one", points=[(1, 2), (10, 3)], notes=["first", "second"]),
                Series(name="two", points=[(5, 1)], is_line=False), Series(name="none", points=[])],
    )  # fmt: skip
    svg = chart.svg()
    root = ET.fromstring(svg)
    titles = [node.text for node in root.iter() if node.tag.endswith("}title")]
    assert titles == ["one: first", "one: second", "two: 5, 1"]
    assert svg.count("<polyline") == 1
    assert ">none</text>" not in svg
    assert re.findall(r"https?://[^\s\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in svg


def test_chart_is_as_wide_as_its_names_and_writes_its_own_ticks() -> None:
    def chart(name: str) -> str:
        line = Series(name=name, points=[(256, 1), (512, 2)])
        front = Series(name="front", points=[(256, 1), (512, 2)], is_dashed=True, has_marks=False)
        return Chart(title="t", x_name="x", y_name="y", is_x_log=True, series=[line, front], x_ticks=[256, 512]).svg()

    widths = [float(ET.fromstring(chart(name)).attrib["width"]) for name in ("short", 50 * "w")]
    assert widths[0] == 720
    assert widths[1] > 900
    assert ">256</text>" in chart("a")
    assert ">300</text>" not in chart("a")
    assert chart("a").count("<title>") == 2, "a line without marks has none"


def test_chart_without_points_says_so() -> None:
    assert "nothing was measured" in Chart(title="t", x_name="x", y_name="y", series=[]).svg()
    assert "nothing was traced" in Timeline(title="t", spans=[]).svg()


def test_timeline_draws_each_span_on_its_track() -> None:
    spans = [
        Span(track="steps", kind="step", start_ms=0, end_ms=10),
        Span(track="CPU lane", kind="attend", start_ms=2, end_ms=6, note="layer <3>"),
    ]
    svg = Timeline(title="lanes", spans=spans).svg()
    root = ET.fromstring(svg)
    boxes = [node for node in root.iter() if node.tag.endswith("}rect") and list(node)]
    assert len(boxes) == 2
    assert float(boxes[0].attrib["width"]) == pytest.approx(2.5 * float(boxes[1].attrib["width"]), rel=1e-3)
    assert boxes[0].attrib["y"] != boxes[1].attrib["y"]
    assert "layer &lt;3&gt;" in svg
