"""Measuring ratios: the things compared take turns in one process, so that what slows one slows all.

Each round runs every contestant once, in an order that is shuffled anew; a contestant's ratio is the median over the
rounds of its time over the baseline's time of the same round. The baseline is entered twice: the ratio of its second
entry is the noise. Peak memory is the kernel's high-water mark of resident memory, reset before each measurement.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

BASELINE = "bare forward"
AGAIN = "bare forward again (noise)"


def compare(baseline: Callable[[], object], others: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median ratio of each contestant's time to the baseline's; the baseline's seconds under its own name."""
    contestants = {BASELINE: baseline, AGAIN: baseline, **others}
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    shuffler = random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            gc.collect()
            started = time.perf_counter()
            contestants[name]()
            times[name].append(time.perf_counter() - started)
    base = times[BASELINE]
    ratios = {
        name: statistics.median(own / bare for own, bare in zip(measured, base, strict=True))
        for name, measured in times.items()
        if name != BASELINE
    }
    return {BASELINE: statistics.median(base), **ratios}


def peak_memory(run: Callable[[], object]) -> float | None:
    """MiB by which resident memory rises at most while `run` runs; None where the kernel does not say."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        gc.collect()
        reset.write_text("5")
        before = _field(status.read_text(), "VmRSS")
        run()
        return (_field(status.read_text(), "VmHWM") - before) / 1024
    except OSError:
        return None


def _field(status: str, name: str) -> int:
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def table(title: str, rows: dict[str, object]) -> None:
    """Prints a small table."""
    print(f"\n{title}")
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"  {name:<{width}}  {shown}")
