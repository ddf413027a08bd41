"""The pictures of a page: nothing is cut off, and nothing is told by colour alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from page_kit import facts_of, options_for

from tiercache.sim.options import Share
from tiercache.sim.page.facts import Facts
from tiercache.sim.page.pictures import _AREAS, _LINES, _MIN, _STYLE, _drawings, _figure


@pytest.fixture(scope="module", params=["two tiers", "few sizes"])
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    options = options_for(tmp_path_factory.mktemp("page"))
    if request.param == "few sizes":
        options = replace(options, dram=Share(3.0), nvme=None, requests=3)
    return facts_of(options)


def test_everything_is_inside_the_picture_and_apart(facts: Facts) -> None:
    """Nothing is cut off, and no label of the axis below runs into the next."""
    before = dict(mpl.rcParams)
    for name, draw in _drawings(facts).items():
        with mpl.rc_context(_STYLE):
            figure = _figure(name, draw, facts)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            renderer = canvas.get_renderer()
            box, (axes,) = figure.get_tightbbox(renderer), figure.axes
            low, high = axes.get_xlim()
            labels = [each.label1 for each in axes.xaxis.get_major_ticks() if low <= each.get_loc() <= high]
            turned = any(each.get_rotation() for each in labels)
            places = sorted((extent.x0, extent.x1) for extent in (each.get_window_extent(renderer) for each in labels))
        width, height = figure.get_size_inches()
        assert box.x0 >= -0.01 and box.x1 <= width + 0.01, name
        assert box.y0 >= -0.01 and box.y1 <= height + 0.01, name
        assert turned or all(left[1] < right[0] for left, right in pairwise(places)), name
    assert dict(mpl.rcParams) == before


def test_there_are_styles_enough(facts: Facts) -> None:
    """The sweep without MIN, and every size of DRAM, have a line of their own."""
    assert len(facts.sweep) - 1 <= len(_LINES)
    assert len({each.dram_slots for each in facts.grid}) <= len(_LINES)


def test_lines_and_areas_differ_without_colour() -> None:
    lines = [(str(each["linestyle"]), each["marker"]) for each in (*_LINES, _MIN)]
    assert len({dash for dash, _ in lines}) == len({marker for _, marker in lines}) == len(lines)
    assert len({(each["hatch"], each["facecolor"] if not each["hatch"] else "") for each in _AREAS}) == len(_AREAS)
