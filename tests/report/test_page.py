"""The page and its data: true to the byte at the peak, small, readable without colors, and loading nothing."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from lightning_memguard.core.decision.decision import Budget, Decision, Request, decide, part_words
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.layers.layers import Layer, LayerTable, Weight
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.timeline import Timeline, timeline_of
from lightning_memguard.core.trace.trace import OPTIONAL_PARTS, PARTS, Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.report import charts
from lightning_memguard.report.page import Page, write_report
from lightning_memguard.report.page_data import CurvePoint, Report, curve_of
from lightning_memguard.units import GIB, KIB, MIB
from tests import tape

CUDA = AllocatorSettings()
CPU = AllocatorSettings(kind="exact")

STEP = Trace(
    8,
    "cuda",
    "fake",
    (
        Event("alloc", 0, 3 * MIB, "parameters", "setup", 0),
        Event("alloc", 1, 1000, "batch", "transfer", 0),
        Event("alloc", 2, 40 * MIB, "activations", "forward", 0, "head", "aten.addmm.default"),
        Event("free", 2, 40 * MIB, "activations", "backward", 0),
        Event("free", 1, 1000, "batch", "transfer", 0),
    ),
)
FOOTPRINT = Footprint(
    8,
    "cuda",
    43 * MIB + KIB,
    62 * MIB,
    462 * MIB,
    {"parameters": 3 * MIB, "activations": 40 * MIB, "batch": KIB},
    "forward",
    "head",
    "aten.addmm.default",
    notes=("the head is <large>",),
    doubts=(Doubt("process", (Peak(43 * MIB, 62 * MIB, 400 * MIB), Peak(43 * MIB, 62 * MIB, 500 * MIB))),),
)
BUDGET = Budget(GIB, GIB, 51 * MIB, "nvml", "NVIDIA L4")
DECISION = Decision(8, 4, 1, "tuned", FOOTPRINT, BUDGET, "memory")
RECORDS = tuple(EpochRecord(e, 8, FOOTPRINT, Measured(n * MIB, "NVML"), GIB) for e, n in enumerate((440, 470)))
CURVE = tuple(CurvePoint(n, n * 50 * MIB, n * 55 * MIB) for n in (1, 4, 8, 12))
LAYERS = LayerTable(
    8,
    (
        Layer("", "Net", (8, 10), is_leaf=False),
        Layer(
            "head", "Linear", (8, 10), weights=(Weight("head.weight", 90, 360, True),), activation_bytes=320, flops=1440
        ),
        Layer("tail", "Linear", (8, 10), weights=(Weight("tail.weight", 90, 360, False),), shared_with="head"),
    ),
)
FULL = Report("Net", DECISION, timeline_of(STEP, CUDA), CURVE, RECORDS, LAYERS)


class Read(HTMLParser):
    """Checks that elements are closed in order, and keeps text, attributes and elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if not set(self.open) & {"style", "script"}:
            self.text += text

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.seen if name == tag]


def written(report: Report, folder: Path) -> tuple[Read, dict]:
    page, data = write_report(folder, report)
    return Read(page.read_text("utf-8")), json.loads(data.read_text("utf-8"))


def random_trace(seed: int, events: int) -> Trace:
    chance = random.Random(seed)
    live: list[Event] = []
    rows = []
    for block in range(events):
        if len(live) > 200 or (live and chance.random() < 0.45):
            rows.append(live.pop(chance.randrange(len(live)))._replace(action="free", phase="backward"))
        else:
            live.append(
                Event(
                    "alloc",
                    block,
                    int(2 ** chance.uniform(3, 27)),
                    chance.choice((*PARTS, *OPTIONAL_PARTS)),
                    chance.choice(("forward", "backward")),
                    block * 2 // events,
                    f"encoder.layers.{block % 977}.attention.self.output",
                    f"aten.op{block % 31}.default",
                )
            )
            rows.append(live[-1])
    return Trace(4, "cuda", "fake", tuple(rows))


# The timeline


@pytest.mark.parametrize("settings", [CPU, CUDA, replace(CUDA, expandable_segments=True)], ids=["cpu", "cuda", "exp"])
@pytest.mark.parametrize("events", [1, 50, 479, 480, 481, 12_000])
def test_parts_at_its_highest_column_are_those_of_the_peak(settings: AllocatorSettings, events: int):
    trace = random_trace(events, events)
    expected = replay(trace, settings)
    timeline = timeline_of(trace, settings)
    peak = timeline.peak_column
    assert timeline.totals[peak] == expected.peak_allocated_bytes
    assert {part: row[peak] for part, row in timeline.parts.items() if row[peak]} == expected.parts
    assert timeline.events[peak] == expected.peak_event
    assert len(timeline.positions) == min(events, 480)
    if settings.kind == "cuda":
        assert max(timeline.reserved) <= expected.peak_reserved_bytes
        assert all(map(int.__le__, timeline.totals, timeline.reserved))


def test_of_equal_moments_in_a_column_it_shows_the_first_as_the_footprint_does():
    empty = [Event("alloc", 1 + n, 0) for n in range(1000)]
    trace = Trace(1, "cpu", "fake", (Event("alloc", 0, 8 * MIB, "parameters", "setup"), *empty))
    assert timeline_of(trace, CPU).events[0] == replay(trace, CPU).peak_event == trace.events[0]


def test_every_phase_keeps_its_highest_moment():
    spans = timeline_of(STEP, CPU).spans
    assert [(s.phase, s.first_event, s.last_event, s.peak_bytes) for s in spans] == [
        ("setup", 0, 0, 3 * MIB),
        ("transfer", 1, 1, 3 * MIB + 1000),
        ("forward", 2, 2, 43 * MIB + 1000),
        ("backward", 3, 3, 3 * MIB + 1000),
        ("transfer", 4, 4, 3 * MIB),
    ]


def test_where_the_step_does_not_fit_it_is_shown_all_the_same():
    assert timeline_of(STEP, replace(CUDA, capacity_bytes=30 * MIB)) == timeline_of(STEP, CUDA)


def test_a_trace_of_a_single_event_is_drawn():
    alone = Trace(1, "cpu", "cut", (Event("alloc", 0, 64, "parameters"),))
    assert "<svg" in charts.timeline(timeline_of(alone, CPU))


def test_a_trace_without_events_has_a_timeline_without_columns():
    assert timeline_of(Trace(1, "cpu", "fake", ()), CPU) == Timeline(0, batch_size=1)


# The page


def test_it_loads_nothing(tmp_path):
    page = write_report(tmp_path, FULL)[0].read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]|\bsrc\s*=|\bhref\s*=|url\(|@import|\bfetch\(|import\s*\(", page)


def test_it_shows_all_its_sections(tmp_path):
    read, _ = written(FULL, tmp_path)
    assert len(read.all("section")) == 5
    for words in (
        "Batch size 8 (was 4) fits: 500.0 of 973.0 MiB; no larger one does.",
        "In the forward pass of head (aten.addmm.default).",
        "budget 1.0 GiB, usable 973.0 MiB",
        "peak 43.0 MiB",
        "reserved by the allocator",
        "+5.0%",
        "Note: the head is <large>.",
        "Saved for backward",
        "90 frozen",
        "47.5%",  # of the budget, likely
        "at most 51.4%: fits",
    ):
        assert words in read.text


def test_it_says_in_words_what_its_pictures_show(tmp_path):
    read, _ = written(FULL, tmp_path)
    pictures = read.all("svg")
    assert [(picture["role"], bool(picture["aria-label"])) for picture in pictures] == [("img", True)] * 2
    assert "462.0 MiB at the chosen 8; 973.0 MiB are usable" in pictures[0]["aria-label"]
    assert "43.0 MiB, is in step 1, forward" in pictures[1]["aria-label"]
    assert all(attrs.get("scope") in ("row", "col") for attrs in read.all("th"))
    assert read.all("html")[0]["lang"] == "en"


def test_every_color_has_a_name_next_to_it(tmp_path):
    trace = random_trace(1, 900)
    read, _ = written(Report("Net", DECISION, timeline_of(trace, CUDA)), tmp_path)
    assert len({s["style"] for s in read.all("i") if s.get("class") == "swatch"}) == len((*PARTS, *OPTIONAL_PARTS))
    assert all(part_words(part) in read.text for part in (*PARTS, *OPTIONAL_PARTS))


def test_a_long_step_makes_no_large_page(tmp_path):
    layers = LayerTable(8, tuple(Layer(f"encoder.layers.{n}.attention", "Linear", (8, 256, 768)) for n in range(3000)))
    records = tuple(replace(RECORDS[0], epoch=epoch) for epoch in range(500))
    page, data = write_report(
        tmp_path, replace(FULL, timeline=timeline_of(random_trace(2, 30_000), CUDA), layers=layers, records=records)
    )
    assert page.stat().st_size < 300 * KIB
    assert len(json.loads(data.read_text())["epochs"]) == 500


def test_what_a_user_wrote_is_text_and_nothing_else(tmp_path):
    bad = "</script><script>alert(1)</script>&"
    events = tuple(event._replace(module=bad, operator=bad, phase="for<b>ward") for event in STEP.events)
    footprint = replace(FOOTPRINT, module=bad, operator=bad, notes=(bad,), phase=bad)
    decision = replace(DECISION, footprint=footprint, budget=replace(BUDGET, device=bad, source=bad), because=bad)
    layers = LayerTable(8, (Layer(bad, bad, (1,), shared_with=bad),))
    records = [replace(RECORDS[0], measured=Measured(MIB, bad))]
    report = Report(bad, decision, timeline_of(replace(STEP, events=events), CUDA), CURVE, records, layers)
    page = write_report(tmp_path, report)[0].read_text("utf-8")
    assert "<script>alert" not in page
    assert len(Read(page).all("script")) == 2


def test_a_step_that_is_known_in_part_is_not_called_fitting(tmp_path):
    footprint = replace(FOOTPRINT, method="states", notes=())
    decision = replace(DECISION, batch_size=4, outcome="kept", because="it raises", footprint=footprint)
    record = replace(RECORDS[0], predicted=footprint)
    read, data = written(Report("Net", decision, records=[record]), tmp_path)
    for words in ("whether it fits is unknown: it raises.", "at least: its activations are unknown", "What is known"):
        assert words in read.text
    assert "unknown whether it fits" in read.text
    assert "At the peak" not in read.text
    assert (data["decision"]["fits"], data["decision"]["verdict"]) == (False, "unknown")
    assert data["epochs"][0]["error_ratio"] is None


def test_what_does_not_fit_is_marked(tmp_path):
    small = replace(BUDGET, free_bytes=400 * MIB, margin_bytes=0)
    read, data = written(replace(FULL, decision=replace(DECISION, budget=small, outcome="checked")), tmp_path)
    assert "does NOT fit" in read.text
    assert data["decision"]["fits"] is False


def test_a_budget_far_away_does_not_press_the_curve_flat(tmp_path):
    far = replace(DECISION, budget=replace(BUDGET, total_bytes=90 * GIB, free_bytes=80 * GIB))
    read, _ = written(replace(FULL, decision=far), tmp_path)
    assert "usable: 80.0 GiB, far above" in read.text


def test_of_many_epochs_the_worst_is_among_those_shown(tmp_path):
    records = [replace(RECORDS[0], epoch=n, measured=Measured(462 * MIB, "NVML")) for n in range(100)]
    records[7] = replace(records[7], measured=Measured(231 * MIB, "NVML"))
    read, _ = written(replace(FULL, records=records), tmp_path)
    assert "24 of 100 epochs" in read.text
    assert "+100.0%" in read.text


def test_offloaded_steps_and_retries_are_columns_where_there_are_some(tmp_path):
    measured = replace(RECORDS[0].measured, alloc_retries=7)
    records = [replace(RECORDS[0], batch_size=16, offloaded=8, measured=measured), RECORDS[1]]
    read, data = written(replace(FULL, records=records), tmp_path)
    assert "Offloaded steps" in read.text
    assert "Cache emptied" in read.text
    assert [epoch["alloc_retries"] for epoch in data["epochs"]] == [7, None]
    assert [epoch["offloaded_steps"] for epoch in data["epochs"]] == [8, 0]
    plain = written(FULL, tmp_path)[0].text
    assert "Offloaded" not in plain
    assert "Cache emptied" not in plain


def test_its_style_script_and_frame_are_files_of_the_package(tmp_path):
    page = write_report(tmp_path, FULL)[0].read_text("utf-8")
    assets = {
        asset.name: asset.read_text("utf-8") for asset in (files("lightning_memguard.report") / "assets").iterdir()
    }
    assert set(assets) == {"page.css", "page.js", "page.html"}
    assert f"<style>\n{assets['page.css']}</style>" in page
    assert f"<script>\n{assets['page.js']}</script>" in page
    assert page.startswith(assets["page.html"].partition("{")[0])


# The data


def test_every_number_of_the_page_is_in_the_data_with_its_unit(tmp_path):
    _, data = written(FULL, tmp_path)
    assert data["footprint"]["parts_bytes"] == dict(FOOTPRINT.parts)
    assert data["budget"]["usable_bytes"] == BUDGET.usable_bytes
    assert data["curve"][1] == {"batch_size": 4, "peak_device_bytes": 200 * MIB, "most_device_bytes": 220 * MIB}
    assert data["epochs"][0]["measured_peak_bytes"] == 440 * MIB
    assert data["timeline"]["parts_bytes"]["activations"] == [0, 0, 40 * MIB, 0, 0]
    assert data["layers"][1]["activation_bytes"] == 320
    bytes_said = {nbytes for key, nbytes in leaves(data) if "bytes" in key}
    assert {n for _, n in leaves(data) if isinstance(n, int) and n > 4096} <= bytes_said


def leaves(value: object, key: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{key}.{name}")]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in leaves(inner, key)]
    return [(key, value)]


def test_what_could_not_be_measured_is_null(tmp_path):
    unknown = replace(RECORDS[0], measured=Measured(0, "nothing to ask"))
    read, data = written(replace(FULL, records=[unknown]), tmp_path)
    assert data["epochs"][0]["error_ratio"] is None
    assert "unknown" in read.text


def test_where_the_context_was_not_seen_both_peaks_are_shown_without_it(tmp_path):
    measured = Measured(60 * MIB, "torch.cuda reserved, context not seen", {}, 43 * MIB, 60 * MIB)
    read, data = written(replace(FULL, records=[replace(RECORDS[0], measured=measured)]), tmp_path)
    assert "context not seen. Both without the context, as other processes hide it." in read.text
    for words in ("62.0 MiB", "60.0 MiB", "+3.3%"):
        assert words in read.text
    (epoch,) = data["epochs"]
    assert epoch["error_ratio"] == pytest.approx(epoch["predicted_peak_reserved_bytes"] / (60 * MIB) - 1)
    assert "hide it" not in written(FULL, tmp_path)[0].text


def test_the_curve_has_the_chosen_and_the_requested_size():
    known = tape.read("mlp")
    budget = Budget(64 * MIB, 64 * MIB, 0, "given")
    decision = decide(known.footprint_at, budget, Request(8))
    curve = curve_of(known.footprint_at, decision)
    sizes = [point.batch_size for point in curve]
    assert {1, 8, decision.batch_size} <= set(sizes)
    assert sizes == sorted(set(sizes))
    assert max(p.batch_size for p in curve if p.most_device_bytes <= budget.usable_bytes) == decision.batch_size
    assert max(sizes) > decision.batch_size


def test_a_traced_step_shows_its_footprint(tmp_path):
    known = tape.read("mlp")
    footprint = known.footprint_at(32)
    decision = replace(DECISION, batch_size=32, footprint=footprint)
    _, data = written(Report("Net", decision, timeline_of(known.trace_at(32), CPU)), tmp_path)
    columns = list(zip(*data["timeline"]["parts_bytes"].values(), strict=True))
    assert max(map(sum, columns)) == data["footprint"]["peak_allocated_bytes"]
    assert data["timeline"]["reserved_bytes"] is None


# What can go wrong


def test_a_directory_is_made_and_written_again(tmp_path):
    for _ in range(2):
        page, data = write_report(tmp_path / "new" / "logs", FULL)
    assert sorted(path.name for path in page.parent.iterdir()) == [page.name, data.name]
    assert (page.name, data.name) == ("memguard_report.html", "memguard_report.json")


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemGuardError, match=r"cannot be written to .*file"):
        write_report(tmp_path / "file", FULL)


# In notebooks


@pytest.mark.parametrize(("record", "words"), [(FOOTPRINT, "At the peak"), (DECISION, "Usable"), (LAYERS, "By layer")])
def test_a_notebook_shows_a_record_as_the_page_does_with_a_style_of_its_own(record, words):
    shown = record._repr_html_()
    assert words in Read(shown).text
    rules = re.findall(r"(?:^|\})\s*([^{}@]+)\{", shown.partition(".memguard {")[2].partition("</style>")[0])
    assert not {rule.strip() for rule in rules} & {":root", "body", "html"}  # which would style the whole notebook


def test_a_notebook_shows_the_whole_page_in_a_frame(tmp_path):
    path, _ = write_report(tmp_path, FULL)
    (frame,) = Read(Page(path)._repr_html_()).all("iframe")
    assert frame["srcdoc"] == path.read_text("utf-8")


def test_records_are_text_until_the_report_is_loaded():
    code = (
        "from lightning_memguard.core.replay.footprint import Footprint; print(Footprint(1, '', 0, 0, 0)._repr_html_())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert answer.stdout == "None\n"
