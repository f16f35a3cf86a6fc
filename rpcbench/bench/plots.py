"""Plots as SVG: bars of ratios, and curves over logarithmic axes. No library, no font or script from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

_TEXT = 'font-family="sans-serif" font-size="12" fill="#333"'
_BAR, _OURS_SLOWER, _MARK = "#2a7", "#c54", "#333"
_COLOURS = ("#2a7", "#47c", "#c54", "#a5c")
_LINE = 22
_LABELS = 300
_SPACE = 420
_PLOT = 320
_MARGIN = 60

Point = tuple[float, float]


def bars(title: str, ratios: Sequence[tuple[str, float]]) -> str:
    """One bar a (label, ratio), on a logarithmic axis that begins at 1."""
    low = min(1.0, *(ratio for _, ratio in ratios))
    high = max(2.0, *(ratio for _, ratio in ratios))
    at = _Axis(low, high, _LABELS, _LABELS + _SPACE)
    return _drawing(_LABELS + _SPACE + 60, _LINE * (len(ratios) + 2), [
        _text(10, 16, title, "start"),
        *(part for number, row in enumerate(ratios, 1) for part in _bar(*row, y=_LINE * number + 8, at=at)),
        _line((at(1), 26), (at(1), _LINE * (len(ratios) + 1) + 8), _MARK),
    ])  # fmt: skip


def _bar(label: str, ratio: float, *, y: float, at: _Axis) -> Iterator[str]:
    left, right = sorted((at(1), at(ratio)))
    colour = _BAR if ratio >= 1 else _OURS_SLOWER
    yield _text(_LABELS - 60, y + 13, label, "end")
    yield f'<rect x="{left:.1f}" y="{y + 3}" width="{right - left:.1f}" height="{_LINE - 8}" fill="{colour}"/>'
    yield _text(max(right, at(1)) + 5, y + 13, f"{ratio:.2f}x", "start")


def curves(title: str, x: str, y: str, points: Mapping[str, Sequence[Point]]) -> str:
    """One curve a name, both axes logarithmic."""
    xs, ys = ([point[axis] for curve in points.values() for point in curve] for axis in (0, 1))
    across, up = _axis(xs, _MARGIN, _MARGIN + _SPACE), _axis(ys, _PLOT - _MARGIN, _MARGIN)
    parts = [_text(10, 16, title, "start"), _text(_MARGIN + _SPACE, _PLOT - 15, x, "end"), _text(10, 40, y, "start")]
    for at in _decades(xs):
        parts += [_line((across(at), _MARGIN), (across(at), _PLOT - _MARGIN), "#ddd")]
        parts += [_text(across(at), _PLOT - _MARGIN + 16, f"{at:g}", "middle")]
    for at in _decades(ys):
        parts += [
            _line((_MARGIN, up(at)), (_MARGIN + _SPACE, up(at)), "#ddd"),
            _text(10, up(at) + 4, f"{at:g}", "start"),
        ]
    for number, (name, curve) in enumerate(points.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in curve)
        parts += [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
        parts += [_text(_MARGIN + _SPACE + 10, _MARGIN + 20 * number, name, "start", colour)]
    return _drawing(_MARGIN + _SPACE + 220, _PLOT, parts)


class _Axis:
    """From values to places, logarithmic."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._begin = low, begin
        self._scale = (end - begin) / math.log(high / low)

    def __call__(self, value: float) -> float:
        return self._begin + self._scale * math.log(value / self._low)


def _axis(values: Sequence[float], begin: float, end: float) -> _Axis:
    return _Axis(min(values), max(*values, min(values) * 1.01), begin, end)


def _decades(values: Sequence[float]) -> list[float]:
    low, high = math.ceil(math.log10(min(values))), math.floor(math.log10(max(values)))
    return [10.0**power for power in range(low, high + 1)]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "") -> str:
    fill = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_TEXT}{fill}>{escape(text)}</text>'


def _line(begin: Point, end: Point, colour: str) -> str:
    return f'<line x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}"/>'


def _drawing(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
