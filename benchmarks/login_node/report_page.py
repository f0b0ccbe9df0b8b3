"""The report page of a long run: how long it takes to make, how large it is, and how soon a browser shows it.

The run's directory is written as a run of 100,000 steps would leave it: every field of a step's line, the load of
16 experts and the skip class in 40 layers every ten steps, tokens and epochs of six sources as often, the routing
of an evaluation every thousand, a checkpoint every 500. Opening is measured by the browser itself (headless
Chromium, a new profile each time): from the start of the navigation until the page has been loaded and laid out.
The aims are under 2 s and under 3 MB.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import write_result
from tests.report.browser import find_browser
from tests.report.runs import TimedStory, routed, step_row, submitted_at_zero
from zslurm.report.markdown import as_markdown
from zslurm.report.page import as_html
from zslurm.report.run_facts import read_runs
from zslurm.report.sections import build
from zslurm.train.sections.phases import ZAYA1_MID_TRAINING

STEPS = 100_000
LAYERS, CLASSES = 40, 17
_OPENINGS = 5
_MEASURE = """<script>
addEventListener("load", () => setTimeout(() => {
  document.body.getBoundingClientRect();
  document.body.dataset.opened = performance.now();
}));
</script>"""


def write_run(directory: Path, steps: int) -> TimedStory:
    """A run directory of so many steps in one attempt."""
    story = submitted_at_zero(directory)
    story.at(60).started(1)
    shares = [[round(1 / CLASSES, 5)] * CLASSES] * LAYERS
    with story.run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            when = story.clock + 60 + 2 * step
            row = step_row(step, 1, when)
            if step % 10 == 0:
                row |= {"load_shares": shares, "load_entropy_by_layer": [0.99] * LAYERS}
            file.write(json.dumps(row) + "\n")
            if step % 500 == 0:
                save = {"kind": "checkpoint", "attempt": 1, "step": step, "state": "COMMITTED", "bytes": 1 << 37}
                file.write(json.dumps(save | {"seconds": 9.0, "stall_s": 0.2, "time": when}) + "\n")
            if step % 10 == 0:
                sources = {name: {"tokens": step * 1000, "epochs": step / 1e5} for name in ZAYA1_MID_TRAINING}
                file.write(json.dumps({"kind": "sources", "attempt": 1, "step": step, "sources": sources}) + "\n")
    return routed(story, layers=LAYERS, classes=CLASSES, names=8, steps=range(1000, steps + 1, 1000))


def run(steps: int = STEPS) -> None:
    """Measure and write results/report_page.json."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        story = write_run(directory / "long", steps)
        started = time.perf_counter()
        facts = read_runs([story.run])
        read_s = time.perf_counter() - started
        report = build(facts)
        page = as_html(report)
        made_s = time.perf_counter() - started - read_s
        file = directory / "report.html"
        file.write_text(page.replace("</body>", f"{_MEASURE}</body>"))
        opened = []
        for number in range(_OPENINGS):
            (directory / str(number)).mkdir()
            document, console = find_browser(directory / str(number)).document(file)
            assert console == []
            (milliseconds,) = re.findall(r'data-opened="([\d.]+)"', document)
            opened.append(float(milliseconds) / 1000)
        write_result(
            "report_page",
            {
                "steps": steps,
                "metrics_bytes": story.run.metrics.stat().st_size,
                "page_bytes": len(page.encode()),
                "markdown_bytes": len(as_markdown(report).encode()),
                "read_s": round(read_s, 2),
                "make_s": round(made_s, 2),
                "open_s": {"median": round(statistics.median(opened), 3), "max": round(max(opened), 3)},
            },
        )
