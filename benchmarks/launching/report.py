"""Turns samples into Markdown: tables, targets, and what they were measured on."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launching.contestants import CONTESTANTS
from launching.measure import Samples

#: By contestant and number of ranks.
Results = dict[tuple[str, int], Samples]

_COLUMNS = (
    ("user", "user code on all ranks"),
    ("reduced", "first all_reduce on all ranks"),
    ("empty", "empty cell, to idle"),
    ("failure", "raise on one rank, to the error"),
    ("stop", "SIGINT, to idle"),
)
_OURS = "taas"


def tables(results: Results) -> str:
    """A table for each number of ranks; seconds, as median (least to most)."""
    return "\n".join(line for num_ranks in _numbers(results) for line in _table(results, num_ranks))


def _numbers(results: Results) -> list[int]:
    return sorted({num_ranks for _, num_ranks in results})


def _table(results: Results, num_ranks: int) -> Iterator[str]:
    titles = [title for _, title in _COLUMNS]
    titles.insert(2, "ours : theirs")
    yield f"### {num_ranks} ranks\n"
    yield f"| | {' | '.join(titles)} |"
    yield "| --- |" + " --- |" * len(titles)
    ours = _median(results, _OURS, num_ranks, "reduced")
    notes: list[str] = []
    for contestant in CONTESTANTS:
        samples = results.get((contestant.key, num_ranks))
        if samples is None:
            continue
        cells = [_cell(samples, measure, contestant.kinds, notes) for measure, _ in _COLUMNS]
        cells.insert(2, _ratio(ours, _median(results, contestant.key, num_ranks, "reduced")))
        yield f"| {contestant.title} | {' | '.join(cells)} |"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"
    yield ""


def _cell(samples: Samples, measure: str, kinds: tuple[str, ...], notes: list[str]) -> str:
    kind = "launch" if measure in ("user", "reduced") else measure
    if kind not in kinds:
        return "-"
    values = samples.seconds.get(measure, [])
    text = f"{statistics.median(values):.3f}" if values else "none"
    if len(values) > 1:
        text += f" ({min(values):.3f} to {max(values):.3f})"
    problems = samples.problems.get(kind, Counter())
    if samples.unavailable is not None:
        problems = Counter({samples.unavailable: 1})
    for problem, count in problems.items():
        note = f"{count} of {len(values) + count}: {problem}" if values else problem
        if note not in notes:
            notes.append(note)
        text += f" [{notes.index(note) + 1}]"
    return text


def _ratio(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return ""
    ratio = theirs / ours
    return f"1 : {ratio:.0f}" if ratio >= 10 else f"1 : {ratio:.2g}"


def _median(results: Results, key: str, num_ranks: int, measure: str) -> float | None:
    samples = results.get((key, num_ranks))
    values = samples.seconds.get(measure) if samples is not None else None
    return statistics.median(values) if values else None


# -- targets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Something we want to hold; ``test`` takes our median and the other's, or ours twice."""

    text: str
    num_ranks: int | None
    measure: str
    other: str
    test: Callable[[float, float], bool]


_TARGETS = (
    Target(
        "no slower than Accelerate's fork of the kernel, to the first all_reduce",
        None,
        "reduced",
        "accelerate",
        lambda ours, theirs: ours <= theirs,
    ),
    Target(
        "50 times faster than torchrun, to the first all_reduce",
        None,
        "reduced",
        "torchrun",
        lambda ours, theirs: 50 * ours <= theirs,
    ),
    Target("the whole empty cell in less than 1 s", 8, "empty", _OURS, lambda ours, _: ours < 1),
)


def targets(results: Results) -> str:
    """Whether each target is met; those without measurements are named as such."""
    lines = []
    for target in _TARGETS:
        for num_ranks in _numbers(results) if target.num_ranks is None else [target.num_ranks]:
            ours = _median(results, _OURS, num_ranks, target.measure)
            theirs = _median(results, target.other, num_ranks, target.measure)
            if ours is None or theirs is None:
                verdict = "not measured"
            else:
                verdict = "met" if target.test(ours, theirs) else "NOT met"
                verdict += f" ({ours:.3f} s" + (f", {theirs:.3f} s)" if target.other != _OURS else ")")
            lines.append(f"- {target.text}, {num_ranks} ranks: {verdict}")
    return "\n".join(lines)


# -- the machine -------------------------------------------------------------------------------------------------------


def hardware() -> str:
    """Processor, cores and memory."""
    model = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    cores = _field_count("/proc/cpuinfo", "processor")
    memory_kib = int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0])
    return f"{cores} cores of {model}, {memory_kib / 2**20:.0f} GiB memory, Linux {platform.release()}"


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _field_count(path: str, name: str) -> int:
    return sum(line.partition(":")[0].strip() == name for line in Path(path).read_text(encoding="utf-8").splitlines())
