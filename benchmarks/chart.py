"""A comparison's ratios as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import OURS, TARGETS, ratio, summarize
from workloads import ROWS


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw how many times better ours is than each peer, row by row on a logarithmic axis, with the targets against
    upstream, in the format that the path's suffix names. False, and nothing drawn, without matplotlib or peers."""
    others = [name for name in result["engines"] if not name.startswith(OURS)]
    try:
        import matplotlib
    except ImportError:
        return False
    if not others:
        return False
    matplotlib.use("Agg")
    # Else every drawing of the same figures is another file.
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in ROWS if row in result["rows"] and OURS in result["rows"][row]["engines"]]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.25 * len(rows) * (len(others) + 1)), layout="constrained")
    height = 0.8 / len(others)
    for number, other in enumerate(others):
        bars = [(place + number * height, _ratio(result, row, other)) for place, row in enumerate(rows)]
        places, ratios = zip(*((place, value) for place, value in bars if value is not None), strict=True)
        drawn = axes.barh(places, [value - 1 for value in ratios], height, left=1, label=f"against {other}")
        axes.bar_label(drawn, [f"{value:.2f}x" for value in ratios], padding=3, fontsize=8)
    if "upstream" in others:
        first = others.index("upstream") * height
        axes.plot([TARGETS[row] for row in rows], [place + first for place in range(len(rows))], "k|", markersize=12)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15)
    axes.set_yticks([place + (len(others) - 1) * height / 2 for place in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.set_xlabel("times better than the other engine; a bar's mark is its target")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def _ratio(result: dict[str, Any], row: str, other: str) -> float | None:
    cells = result["rows"][row]
    if other not in cells["engines"]:
        return None
    ours, peer = (summarize(cells["engines"][name]["values"]).median for name in (OURS, other))
    return ratio(ours, peer, cells["unit"])
