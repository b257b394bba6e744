"""Measure how fast an HTML report draws and responds to clicks in headless Chromium.

    python benchmarks/html_speed.py [TRACE ...] [--blocks 100000] [--runs 5] [--json FILE]

Without a trace, examples/gpt.py runs on the ghost for enough steps to allocate about ``--blocks`` blocks. The
benchmark measures the time of ``page`` in Python, the file's size, the time from opening the file until the
page is completely drawn, and the time from a click on the timeline to the next frame. Exits with 1 if a page
of at most 100,000 blocks takes more than 2 s to open, or if the median click takes 100 ms or more. Needs
playwright and Chromium: see CONTRIBUTING.md.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import command_line, write_json
from playwright.sync_api import Browser, sync_playwright

import memfit
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import Trace
from memfit.report.html import run_report_html
from memfit.report.html.drawn_moments import MOST_BLOCKS

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
BLOCKS_PER_STEP = 985  # examples/gpt.py
OPEN, CLICK = 2_000, 100  # ms
CLICKS = (0.03, 0.21, 0.37, 0.5, 0.66, 0.83, 0.98)
_CLICK = """
async ([left, width, top]) => {
  const canvas = document.getElementById('timeline');
  canvas.setPointerCapture = () => {};
  const taken = [];
  for (const share of %s) {
    const at = { clientX: left + 58 + share * (width - 66), clientY: top + 200, pointerId: 1, button: 0 };
    const begin = performance.now();
    canvas.dispatchEvent(new PointerEvent('pointerdown', at));
    canvas.dispatchEvent(new PointerEvent('pointerup', at));
    await new Promise(requestAnimationFrame);
    await new Promise((done) => setTimeout(done));
    taken.push(performance.now() - begin);
  }
  return taken;
}
"""


def trained(blocks: int, folder: Path) -> Path:
    """Record the training of a GPT until it has allocated about ``blocks`` blocks; return the trace file."""
    path, steps = folder / "gpt.memfit", max(1, blocks // BLOCKS_PER_STEP)
    memfit.dry_run(EXAMPLE, ["--steps", str(steps)], steps=steps, output=path, stdout_to_stderr=True)
    return path


def in_python(trace: Trace) -> tuple[str, float]:
    """Return the HTML page of a trace, and the seconds to render it."""
    line = memory_timeline(trace)
    attribution, summary = attribute_allocations(trace, line), dry_run_of_trace(trace)
    begin = time.perf_counter()
    text = run_report_html(trace, line, attribution, summary)
    return text, time.perf_counter() - begin


def in_browser(browser: Browser, path: Path, runs: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds until the page is drawn, per run, and until the next frame, per click."""
    ready, clicks = [], []
    for _ in range(runs):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        shown = context.new_page()
        shown.goto(path.as_uri())
        shown.wait_for_selector("html[data-ready]", timeout=120_000)
        ready.append(float(shown.get_attribute("html", "data-ready") or "nan"))
        box = shown.locator("#timeline").bounding_box()
        if box is None:
            raise SystemExit(f"{path.name}: {shown.inner_text('#problem')}")
        clicks += shown.evaluate(_CLICK % list(CLICKS), [box["x"], box["width"], box["y"]])
        context.close()
    return ready, clicks


def main() -> int:
    """Measure and print a row per trace; return 1 if one exceeds its limits, 2 without Chromium."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--blocks", type=int, default=MOST_BLOCKS, help="blocks of the recorded trace")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        print(
            "Chromium was not found (on Debian: apt-get install chromium).",
            file=sys.stderr,
        )
        return 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in arguments.traces or [trained(arguments.blocks, folder)]:
            trace = memfit.read(path)
            text, seconds = in_python(trace)
            file = folder / "report.html"
            file.write_text(text)
            ready, clicks = in_browser(browser, file, arguments.runs)
            row = {
                "trace": path.name,
                "events": len(trace.events),
                "blocks": int((trace.events.action == 0).sum()),
                "python_s": round(seconds, 3),
                "bytes": len(text.encode()),
                "ready_ms": statistics.median(ready),
                "ready_most_ms": max(ready),
                "click_ms": round(statistics.median(clicks), 1),
                "click_most_ms": round(max(clicks), 1),
            }
            rows.append(row)
            print("  ".join(f"{key} {value:,}" if key != "trace" else value for key, value in row.items()))
        browser.close()
    write_json(arguments.json, rows)
    slow = any(
        row["click_ms"] >= CLICK or (row["blocks"] <= MOST_BLOCKS and row["ready_ms"] > OPEN) for row in rows
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
