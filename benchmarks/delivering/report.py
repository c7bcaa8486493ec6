"""Turns rates into Markdown: tables and targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from delivering.contestants import CONTESTANTS, MEASURES, TARGETS, Measure
from delivering.measure import Samples

#: By measure and contestant.
Results = dict[tuple[str, str], Samples]
_OURS = "taas"


def tables(results: Results) -> str:
    """A table for each measure: median (least to most)."""
    measured = {measure for measure, _ in results}
    return "\n".join(line for each in MEASURES if each.key in measured for line in _table(results, each))


def _table(results: Results, measure: Measure) -> Iterator[str]:
    yield f"### {measure.title}\n"
    yield f"| | {measure.unit} | ours : theirs |"
    yield "| --- | --- | --- |"
    notes: list[str] = []
    for contestant in CONTESTANTS:
        samples = results.get((measure.key, contestant.key))
        if contestant.measure == measure.key and samples is not None:
            ratio = _ratio(results, measure.key, contestant.key)
            text = "" if ratio is None or contestant.key == _OURS else f"{ratio:.2f}"
            yield f"| {contestant.title} | {_cell(samples, measure, notes)} | {text} |"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"
    if notes:
        yield ""


def _cell(samples: Samples, measure: Measure, notes: list[str]) -> str:
    values = [rate * measure.units_an_element for rate in samples.rates.values()]
    text = _number(statistics.median(values)) if values else "none"
    if len(values) > 1:
        text += f" ({_number(min(values))} to {_number(max(values))})"
    problems = {samples.unavailable: 1} if samples.unavailable is not None else dict(samples.problems)
    for problem, count in problems.items():
        note = f"{count} of {len(values) + count}: {problem}" if values else problem
        if note not in notes:
            notes.append(note)
        text += f" [{notes.index(note) + 1}]"
    return text


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _ratio(results: Results, measure: str, other: str) -> float | None:
    """Ours to theirs: the median of the rounds, since what else a machine does changes from round to round."""
    ours, theirs = (results.get((measure, key), Samples()).rates for key in (_OURS, other))
    ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
    return statistics.median(ratios) if ratios else None


def targets(results: Results) -> str:
    """Whether each target is met; those without measurements are named as such."""
    measured = {measure for measure, _ in results}
    lines = []
    for target in TARGETS:
        if target.measure not in measured:
            continue
        ratio = _ratio(results, target.measure, target.other)
        verdict = "not measured"
        if ratio is not None:
            verdict = f"{'met' if target.is_met(ratio) else 'NOT met'} ({ratio:.2f})"
        lines.append(f"- {target.text}: {verdict}")
    return "\n".join(lines)
