"""The page stands on its own, and a browser draws it."""

import html as html_text
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from packer.errors import TargetExistsError, TargetWriteError
from packer.plan import load_plan, plan_in_memory
from packer.report import html as html_module
from packer.report import html_page, write_html
from tests import plans

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def lively_plan(layout: str = "padded", num_steps: int = 40):
    """Return a plan with drops, an LR factor, two ranks, several epochs."""
    generator = np.random.default_rng(1)
    num_rows = 4 * num_steps
    seqlens = [int(n) for n in np.clip(generator.lognormal(4, 1, 5 * num_rows), 1, 600)]
    groups = np.split(np.arange(5 * num_rows), num_rows)
    rows = [plans.Row(pieces=[(int(i), seqlens[i]) for i in group]) for group in groups]
    options = {"dp_size": 2, "grad_accum": 2, "layout": layout}
    facts = plans.facts([*seqlens, 9000], **options, max_tokens=3000, max_seqlen=600, epochs=2)
    scales = [float(x) for x in generator.uniform(0.5, 1.5, num_steps)]
    epoch = plans.epoch(rows, **options, lr_scales=scales)
    return plan_in_memory(facts, [epoch, epoch], dropped=plans.drops((5 * num_rows, 9000, 9000, "too_long")))


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_page_holds_all_it_needs(layout):
    page = html_page(lively_plan(layout))
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)|@import|url\(|fetch\(|XMLHttp", page)
    data = data_of(page)
    assert data["summary"]["num_steps"] == 80
    assert sum(data["survey"]["planned_lengths"]) == data["summary"]["planned_samples"]
    assert sum(data["survey"]["dropped_lengths"]["too_long"]) == 2
    assert ["max_tokens", 3000] in data["limits"]
    assert {step["name"] for step in data["steps"]} >= {"typical", "most padding"}
    for step in data["steps"]:
        assert len(step["microbatches"]) == 4


def test_names_cannot_break_out_of_the_page(tmp_path):
    name = "</script><b>{{script}}"
    place = tmp_path / name.replace("/", "-")
    plan = lively_plan(num_steps=2).save(place)
    page = html_page(plan)
    assert "<b>" not in page.split('id="data">')[0].split("<title>")[1].split("</title>")[0]
    assert data_of(page)["title"] == f"Plan {place.name}"
    assert page.count("No library, no network.") == 1


def test_very_large_steps_are_drawn_in_part(monkeypatch):
    monkeypatch.setattr(html_module, "SHOWN_MICROBATCHES", 3)
    monkeypatch.setattr(html_module, "SHOWN_SAMPLES", 2)
    for layout in ("padded", "packed"):
        for step in data_of(html_page(lively_plan(layout)))["steps"]:
            assert len(step["microbatches"]) == 3
            for box in step["microbatches"]:
                assert len(box["seqlens"]) <= 3
                assert sum(box["seqlens"]) + box["rest"] == box["num_tokens"]


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    plan = lively_plan(num_steps=2)
    write_html(plan, tmp_path / "report.html")
    before = (tmp_path / "report.html").read_text()
    assert before == html_page(plan)
    with pytest.raises(TargetWriteError, match=r"nowhere/report.html: there is no folder .*nowhere; make it"):
        write_html(plan, tmp_path / "nowhere" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TargetWriteError, match="folder"):
        write_html(plan, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "report.html"]


def test_a_plan_without_steps_has_a_page():
    plan = plan_in_memory(plans.facts([0]), [plans.epoch([])], dropped=plans.drops((0, 0, 0, "empty")))
    data = data_of(html_page(plan))
    assert data["survey"]["fixed_size"] is None
    assert data["steps"] == []


# Runs in the page: counts what is drawn, clicks a button, points at a chart, and leaves the findings behind.
PROBE = """
<script>
window.failures = [];
window.addEventListener("error", (event) => failures.push(event.message));
</script>
"""
CLICKS = """
<script type="module">
const count = (what) => document.querySelectorAll(what).length;
const found = { pictures: count(".box svg"), charts: count(".chart svg") };
const buttons = document.querySelectorAll(".choice button");
const before = document.querySelector(".choice + p").textContent;
buttons[buttons.length - 1].click();
found.changed = document.querySelector(".choice + p").textContent !== before;
const chart = document.querySelector(".chart");
const { left, top, width } = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: left + width / 4, clientY: top + 40 }));
found.tip = chart.querySelector(".tip").textContent;
found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.headings = [...document.querySelectorAll("h2")].map((h) => h.textContent);
found.failures = window.failures;
const report = { id: "found", textContent: JSON.stringify(found) };
document.body.append(Object.assign(document.createElement("pre"), report));
</script>
"""


def drawn(page: str, folder: Path, width: int) -> dict:
    """Let a browser draw a page, and return what was found on it."""
    page = page.replace("<head>", "<head>" + PROBE, 1).replace("</body>", CLICKS + "</body>", 1)
    (folder / "report.html").write_text(page)
    result = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1200"),
            *("--virtual-time-budget=2000", "--dump-dom", f"file://{folder / 'report.html'}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(html_text.unescape(re.search(r'<pre id="found">(.*?)</pre>', result.stdout)[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("width", [500, 1600])
def test_a_browser_draws_it(tmp_path, layout, width):
    found = drawn(html_page(lively_plan(layout)), tmp_path, width)
    assert found["failures"] == []
    assert found["pictures"] == 4
    assert found["charts"] == 5
    assert found["changed"]
    assert "planned" in found["tip"]
    assert found["wide"] <= 0, "the page scrolls sideways"
    assert {"What padding costs", "Mean length of a step's samples", "All numbers"} <= set(found["headings"])


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_the_shares_of_sources(tmp_path):
    page = html_page(plans.mixed_plan())
    data = data_of(page)
    assert list(data["survey"]["source_shares"]) == ["web", "code", "old"]
    found = drawn(page, tmp_path, 1000)
    assert found["failures"] == []
    assert found["charts"] == 6
    assert "Shares of the sources" in found["headings"]
    assert found["wide"] <= 0


def test_a_report_replaces_a_report_and_nothing_else(tmp_path):
    plan = lively_plan().save(tmp_path / "plan")
    for _ in range(2):
        write_html(plan, tmp_path / "report.html")
    with pytest.raises(TargetExistsError, match=r"plan\.json exists and is no report; choose another --html"):
        write_html(plan, tmp_path / "plan/plan.json")
    assert plan.fingerprint == load_plan(tmp_path / "plan").fingerprint
