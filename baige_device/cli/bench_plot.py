"""The picture of a benchmark run: percent of the limit against multiprocessors used and against context length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baige_device.cli.bench_report import Result

__all__ = ["plot"]

_AXES = (("sms", "multiprocessors used"), ("context_tokens", "context length (tokens)"))


def plot(environment: dict[str, Any], results: list[Result], path: Path) -> None:
    """Draw one panel per quantity that the cases vary, and one bar per case when they vary neither."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(key, label) for key, label in _AXES if any(key in result.facts for result in results)]
    figure, axes = pyplot.subplots(1, max(1, len(panels)), figsize=(7 * max(1, len(panels)), 4.5), squeeze=False)
    for axis, (key, label) in zip(axes[0], panels, strict=False):
        for name, points in _curves(results, key).items():
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        axis.set_xlabel(label)
        axis.set_ylabel("percent of the measured limit")
        axis.set_ylim(0, 105)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    if not panels:
        axes[0][0].barh([f"{r.op} {r.case}" for r in results], [r.percent_of_limit for r in results])
        axes[0][0].set_xlabel("percent of the measured limit")
    title = f"{environment['card']}, {environment['date']}, torch {environment['versions']['torch']}"
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(results: list[Result], key: str) -> dict[str, list[tuple[float, float]]]:
    """Cases that differ in `key` alone make one curve, named by what they share (`facts["series"]`)."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if key in result.facts:
            name = f"{result.op} {result.facts.get('series', result.case)}"
            curves.setdefault(name, []).append((float(result.facts[key]), result.percent_of_limit))
    return {name: sorted(points) for name, points in curves.items()}
