"""Results for people: a page with pictures of what bench.py measured, and the tables in the README.

    python report.py results/smollm2.json --out runs/page                   # report.html, and each picture as an .svg
    python report.py results/bench.json results/sweep.json --out runs/page  # several results on one page
    python report.py --readme                                               # write the README's tables anew
    python report.py --readme --check                                       # exit status 1 when they would change

Prints the name of what it wrote. The page needs no network. Pictures are SVG written by hand: text in them takes the
colours and the font of the page, light or dark, and a test can read the figures back; matplotlib would freeze both.
"""

import functools
import html
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from string import Template

from checkpoint import Parser, write_atomically

ROOT = Path(__file__).parent

TEMPLATE = Template((ROOT / "report.html").read_text(encoding="utf-8"))

# Column of the table: key of the row, heading, form, factor, what it says
COLUMNS = (
    ("tokens_per_second", "tokens/s", ".1f", 1, "tokens per second, reading the prompt apart"),
    ("ratio_to_plain", "to plain", ".2f", 1, "speed to plain of the same batch and temperature, median of paired runs"),
    ("ratio_quartiles", "quartiles", ".2f", 1, "of those ratios"),
    ("predicted_ratio", "predicted", ".2f", 1, "speed to plain by the cost model"),
    ("alpha", "alpha", ".2f", 1, "chance that a draft is accepted, given that it was judged"),
    ("tokens_per_target_pass", "tokens/pass", ".2f", 1, "tokens per pass of the target"),
    ("mean_layers", "layers", ".1f", 1, "layers run per token, flushes included"),
    ("exited", "exited %", ".1f", 100, "share of tokens that came from an early exit"),
    ("equal", "equal %", ".1f", 100, "share of tokens equal to plain's, position by position"),
    ("agreement", "agreement %", ".1f", 100, "share of tokens that the full model would have emitted too, by audit"),
    ("kl", "KL, nats", ".4f", 1, "per token, from the law that it was drawn from to that of the first full model"),
    ("nll_difference", "NLL, nats", "+.4f", 1, "negative log-likelihood per token under the full model, less plain's"),
    ("pass_rate", "pass rate", "", 1, "tasks passed, and the difference to plain with its interval"),
    ("first_token_seconds", "first, ms", ".1f", 1e3, "time to the first token"),
    ("token_seconds_p50", "p50, ms", ".1f", 1e3, "median time between tokens; those of one round come 0 apart"),
    ("token_seconds_p95", "p95, ms", ".1f", 1e3, "time between tokens that 95% stay below"),
    ("time_shares", "draft, verify, other %", ".0f", 100, "where the time goes"),
    ("bandwidth_share", "memory %", ".0f", 100, "of the memory speed measured on this machine"),
    ("compute_share", "compute %", ".0f", 100, "of the arithmetic speed measured on this machine"),
    ("peak_bytes", "peak, MB", ".0f", 1e-6, "weights, keys and values held, counted from their shapes"),
)  # fmt: skip

# Measure of quality: key, factor, what the axis says, values that it always shows, whether less is better
MEASURES = (
    ("kl", 1, "KL to the full model, nats per token", (0.0, 0.01), True),
    ("equal", 100, "tokens equal to plain's, %", (95.0, 100.0), False),
    ("nll_difference", 1, "NLL above plain's, nats per token", (0.0, 0.01), True),
    ("pass_rate", 100, "pass rate less plain's, percentage points", (-5.0, 0.0), False),
)

# Verdict of a gate: sign and class in the table, mark in a picture
VERDICTS = {
    "passed": ("✓", "good", "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0"),
    "unsure": ("?", "open", "M0,-6l6,6l-6,6l-6,-6z"),
    "failed": ("✗", "bad", "M-5,-5L5,5M-5,5L5,-5"),
    "none": ("", "", "M-4,-4h8v8h-8z"),
}


def clean(value) -> str:
    """Text of a result, fit for HTML and XML: escaped, and without control characters, which no entity can hold."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in str(value)))


def known(value) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def listed(holder: dict, key: str) -> list[dict]:
    return [row for row in holder.get(key) or [] if isinstance(row, dict)]


def about(result: dict) -> list[str]:
    """Where and when, as far as the result says."""
    threads = f"{result['threads']} threads" if result.get("threads") else None
    versions = [f"{name} {result[name.lower()]}" for name in ("Python", "torch", "commit") if result.get(name.lower())]
    return [str(fact) for fact in (result.get("machine"), threads, *versions, result.get("date")) if fact]


# -------------------------------------------------------------------------------------------------------- pictures


def text(x: float, y: float, words, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{clean(words)}</text>'


def rect(kind: str, x: float, y: float, width: float, height: float, tip: str = "", style: str = "") -> str:
    shape = f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{style}>'
    return f"{shape}<title>{clean(tip)}</title></rect>"


def line(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="{kind}" d="M{x:.1f},{y:.1f}L{to_x:.1f},{to_y:.1f}"/>'


def svg(width: float, height: float, name: str, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{clean(name)}">{"".join(parts)}</svg>'


def standalone(picture: str) -> str:
    """A picture of the page as a file of its own, with the page's colours."""
    style = TEMPLATE.template.partition("/* pictures")[2].partition("*/")[2].partition("/* page */")[0]
    named = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return named.replace(">", f"><style>{style}</style>", 1)


def shortened(name, width: float) -> str:
    """At most `width` pixels, at 6.6 a character: more than a proportional font of 12 pixels takes on average."""
    n = max(int(width / 6.6), 2)
    return str(name) if len(str(name)) <= n else str(name)[: n - 1] + "…"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, three to seven of them."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(m * unit for m in (5, 2, 1) if (high - low) / (m * unit) >= 2.5)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def scale(low: float, high: float, start: float, end: float):
    return lambda value: start + (value - low) / (high - low) * (end - start)


def places(spots: list[tuple[float, float]], names: list[str], width: float, bottom: float) -> list[tuple]:
    """Box (x, y, to_x, to_y) of each name: beside its mark, or as far above or below as it takes to cover nothing."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    boxes = {}
    for i in sorted(range(len(spots)), key=lambda i: -spots[i][0]):  # from the right, so that leads do not cross names
        (x, y), wide = spots[i], 6.6 * len(names[i])
        heights = [y + side * step for step in range(0, 2000, 8) for side in (1, -1)]
        for at, middle in [(at, height) for at in (x + 10, x - 10 - wide) for height in heights]:
            box = (at, middle - 7, at + wide, middle + 7)
            inside = box[0] >= 2 and box[2] <= width and box[1] >= 20 and box[3] <= bottom
            if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
                break
        boxes[i] = box
        taken.append(box)
    return [boxes[i] for i in range(len(spots))]


def scatter(points: list[tuple], x_label: str, y_label: str, shown, less_is_better=False, diagonal=False) -> str:
    """A mark and a name for each (row, x, y); the axes hold what `shown` = (x values, y values) name as well."""
    width, left, right, top = 570, 50, 430, 40
    height = 300 + 15 * max(0, len(points) - 7)
    bottom = height - 66
    xs, ys = ([point[axis] for point in points] + list(shown[axis - 1]) for axis in (1, 2))
    if diagonal:
        xs = ys = xs + ys
    (low_x, high_x), (low_y, high_y) = ((min(v), max(v)) for v in (xs, ys))
    at_x = scale(low_x, high_x, left + 14, right)
    at_y = scale(low_y, high_y, *((top + 10, bottom - 14) if less_is_better else (bottom - 14, top + 10)))
    parts = [text(4, 16, y_label + (" (less is better, at the top)" if less_is_better else ""), "bold")]
    parts += [line("rule", left, bottom, width - 4, bottom), text(left, bottom + 36, x_label, "bold")]
    if diagonal:  # a nested svg cuts off what leaves it
        size = f'x="{left}" y="{top}" width="{right - left + 14}" height="{bottom - top}"'
        size += f' viewBox="{left} {top} {right - left + 14} {bottom - top}"'
        far = 2 * high_x
        band = " ".join(f"{at_x(x):.1f},{at_y(f * x):.1f}" for x, f in ((0, 0.9), (far, 0.9), (far, 1.1), (0, 1.1)))
        cut = line("lead", at_x(0), at_y(0), at_x(far), at_y(far))
        parts += [f'<svg {size}><polygon class="band" points="{band}"/>{cut}</svg>']
        parts += [text(width - 4, 16, "band: within 10% of the prediction", "dim small", "end")]
    for value in ticks(low_x, high_x):
        parts += [line("rule", at_x(value), bottom, at_x(value), bottom + 4)]
        parts += [text(at_x(value), bottom + 16, f"{value:g}", "dim tick-x", "middle")]
    for value in ticks(low_y, high_y):
        parts += [line("rule", left, at_y(value), width - 4, at_y(value))]
        parts += [text(left - 5, at_y(value) + 4, f"{value:g}", "dim tick-y", "end")]
    verdicts = [verdict_of(row) for row, _, _ in points]
    spots = [(at_x(x), at_y(y)) for _, x, y in points]
    words = [shortened(row["mode"], 230) for row, _, _ in points]
    words = [f"{name} ({v})" if v in ("failed", "unsure") else name for name, v in zip(words, verdicts)]
    boxes = places(spots, words, width - 4, bottom - 4)
    for (x, y), box in zip(spots, boxes):
        if abs((box[1] + box[3]) / 2 - y) > 10:
            parts.append(line("lead", x, y, box[0] if box[0] > x else box[2], (box[1] + box[3]) / 2))
    for (row, x, y), spot, verdict in zip(points, spots, verdicts):
        shape = f'class="mark {verdict}" transform="translate({spot[0]:.2f},{spot[1]:.2f})" d="{VERDICTS[verdict][2]}"'
        parts.append(f"<path {shape}><title>{clean(row['mode'])}: {x:.4g}, {y:.4g}</title></path>")
    parts += [text(box[0], box[3] - 3, name, "name") for box, name in zip(boxes, words)]
    x = 12
    for verdict in (v for v in VERDICTS if v in verdicts):
        parts.append(f'<path class="{verdict}" transform="translate({x},{height - 10})" d="{VERDICTS[verdict][2]}"/>')
        parts.append(text(x + 12, height - 6, "no gate" if verdict == "none" else f"gate {verdict}", "dim"))
        x += 110
    return svg(width, height, f"{y_label} against {x_label}", parts)


def verdict_of(row: dict) -> str:
    verdict = (row.get("gate") or {}).get("verdict")
    return verdict if verdict in VERDICTS else "none"


def quality_of(row: dict, key: str) -> float | None:
    return known((row.get(key) or {}).get("difference") if key == "pass_rate" else row.get(key))


def speed_against_quality(rows: list[dict], key: str) -> str | None:
    """Modes at (speed to plain, quality); None where fewer than two have both. The best stand at the top right."""
    [(factor, label, shown, less)] = [rest for name, *rest in MEASURES if name == key]
    points = [(row, known(row.get("ratio_to_plain")), quality_of(row, key)) for row in rows]
    points = [(row, x, factor * y) for row, x, y in points if x is not None and y is not None]
    return scatter(points, "speed to plain, times", label, ((1.0, 1.2), shown), less) if len(points) > 1 else None


def predicted_against_measured(rows: list[dict]) -> str | None:
    points = [(row, known(row.get("predicted_ratio")), known(row.get("ratio_to_plain"))) for row in rows]
    points = [point for point in points if None not in point]
    labels = ("predicted speed to plain, times", "measured speed to plain, times")
    return scatter(points, *labels, ((0.9, 1.2), ()), diagonal=True) if points else None


def bars(panels: list[tuple[str, list[tuple]]], x_label: str, y_label: str) -> str | None:
    """A small chart for each (mode, [(tick, share, tip), ...]), all on one scale from 0."""
    if not panels:
        return None
    most = math.ceil(10 * max(share for _, columns in panels for _, share, _ in columns)) / 10 or 1.0
    n_wide = 2 if max(len(columns) for _, columns in panels) <= 9 else 1
    width, tall, room = 372 / n_wide, 128, 34
    parts = [text(4, 14, y_label, "bold")]
    for i, (name, columns) in enumerate(panels):
        left, top = i % n_wide * width, 24 + i // n_wide * tall
        base, slot = top + 98, min((width - room - 10) / len(columns), 40)
        at_y = scale(0.0, most, base, top + 36)
        parts.append(text(left + 4, top + 14, shortened(name, width - 8)))
        for value in (0.0, most):
            parts.append(line("rule", left + room - 4, at_y(value), left + width - 8, at_y(value)))
            parts.append(text(left + room - 7, at_y(value) + 4, f"{value:.0%}", "dim small tick-y", "end"))
        every = math.ceil((20 if most >= 0.995 else 15) / slot)  # "100" takes more room
        for j, (tick, share, tip) in enumerate(columns):
            middle = left + room + (j + 0.5) * slot
            tip = f"{name}: {tip}"
            parts.append(rect("bar", middle - slot * 0.4, at_y(share), slot * 0.8, base - at_y(share), tip))
            if j % every == 0:
                parts.append(text(middle, base + 13, tick, "dim small", "middle"))
                words = "<1" if 0 < share < 0.005 else f"{share * 100:.0f}"
                parts.append(text(middle, at_y(share) - 3, words, "small", "middle"))
    height = 24 + math.ceil(len(panels) / n_wide) * tall + 12
    return svg(372, height, f"{y_label} by {x_label}", [*parts, text(368, height - 6, x_label, "bold", "end")])


def acceptance(rows: list[dict]) -> str | None:
    """Of the drafts at each position of a round, the share that was accepted."""
    panels = []
    for row in rows:
        pairs = list(zip(row.get("accepted_by_position") or [], row.get("drafted_by_position") or []))
        columns = [(i + 1, n / of, f"position {i + 1}: {n} of {of}") for i, (n, of) in enumerate(pairs) if of]
        panels += [(row["mode"], columns)] if columns else []
    return bars(panels, "position of the draft in its round", "drafts accepted, % of those drafted there")


def shares(counts: dict, what: str) -> list[tuple]:
    total = sum(counts.values())
    return [(key, n / total, f"{what} {key}: {n} of {total}") for key, n in counts.items()] if total else []


def accepted_lengths(rows: list[dict]) -> str | None:
    counts = [(row["mode"], dict(enumerate(row.get("accepted_histogram") or []))) for row in rows]
    panels = [(name, shares(n, "accepted")) for name, n in counts if len(n) > 1 and any(n.values())]
    return bars(panels, "drafts accepted in a round", "rounds, % of all")


def exit_layers(rows: list[dict]) -> str | None:
    counts = [(row["mode"], row.get("exit_histogram") or {}) for row in rows]
    counts = [(name, dict(sorted((int(layer), n) for layer, n in histogram.items()))) for name, histogram in counts]
    panels = [(name, shares(histogram, "layer")) for name, histogram in counts if any(histogram.values())]
    return bars(panels, "layers run before the exit", "tokens, % of those that exited")


def timeline(rows: list[dict]) -> str | None:
    """One round of each mode, all on one axis of milliseconds."""
    rows = [row for row in rows if listed(row, "timeline")]
    if not rows:
        return None
    end = max(part["start"] + part["seconds"] for row in rows for part in row["timeline"]) * 1e3 or 1.0
    at_x, parts = scale(0.0, end, 8, 356), []
    for i, row in enumerate(rows):
        top = 6 + 52 * i
        parts.append(text(8, top + 12, shortened(row["mode"], 350)))
        for part in row["timeline"]:
            kind, start, length = part["what"], part["start"] * 1e3, part["seconds"] * 1e3
            kind = kind if kind in ("draft", "verify") else "other"
            tip = f"{row['mode']}: {part['what']}, {length:.3g} ms from {start:.3g} ms"
            parts.append(rect(f"{kind} part", at_x(start), top + 18, at_x(length) - at_x(0), 12, tip))
        x = 8
        for kind in ("draft", "verify", "other"):
            total = sum(part["seconds"] for part in row["timeline"] if part["what"] == kind) * 1e3
            parts.append(rect(kind, x, top + 35, 8, 8) + text(x + 12, top + 43, f"{kind} {total:.3g} ms", "dim small"))
            x += 116
    height = 6 + 52 * len(rows) + 40
    for value in ticks(0.0, end):
        parts.insert(0, line("rule", at_x(value), 6, at_x(value), height - 36))
        parts.append(text(at_x(value), height - 24, f"{value:g}", "dim tick-x", "middle"))
    parts.append(text(364, height - 6, "ms from the round's start", "bold", "end"))
    return svg(372, height, "time line of one round", parts)


def numbers_first(key) -> tuple:
    return (0, key) if isinstance(key, int | float) else (1, str(key))


def heat_map(drafter: str, sweep: list[dict]) -> str:
    """Speed to plain of a drafter, a row for each K and a column for each temperature; the best K of each is framed."""
    cells = {(row.get("draft_len"), row.get("temperature")): known(row.get("ratio_to_plain")) for row in sweep}
    lengths, heats = (sorted({key[i] for key in cells}, key=numbers_first) for i in (0, 1))
    strongest = max([abs(math.log(ratio)) for ratio in cells.values() if ratio and ratio > 0] + [0.1])
    parts = [text(4, 14, shortened(f"{drafter}: speed to plain", 360), "bold"), text(4, 34, "drafts K", "dim")]
    for j, heat in enumerate(heats):
        ratios = [ratio for (_, h), ratio in cells.items() if h == heat and ratio is not None]
        parts.append(text(96 + 60 * j, 34, heat, "dim", "middle"))
        for i, length in enumerate(lengths):
            x, y, ratio = 68 + 60 * j, 42 + 28 * i, cells.get((length, heat))
            if ratio is not None:
                weight = min(abs(math.log(max(ratio, 1e-9))) / strongest, 1) * 0.45
                tip = f"K {length}, temperature {heat}: {ratio:.4g}"
                kind = "faster" if ratio >= 1 else "slower"
                parts.append(rect(f"cell {kind}", x, y, 56, 24, tip, f' fill-opacity="{weight:.3f}"'))
                parts += [rect("best", x, y, 56, 24, tip)] if ratio == max(ratios) else []
            parts.append(text(x + 28, y + 16, "–" if ratio is None else f"{ratio:.2f}", "", "middle"))
    parts += [text(56, 58 + 28 * i, length, "dim", "end") for i, length in enumerate(lengths)]
    height, width = 42 + 28 * len(lengths) + 44, max(372, 76 + 60 * len(heats))
    notes = ("columns: temperature; framed: the best K", "blue: faster than plain, orange: slower")
    parts += [text(4, height - 26 + 16 * i, note, "dim small") for i, note in enumerate(notes)]
    return svg(width, height, f"speed of {drafter} by K and temperature", parts)


def heat_maps(result: dict) -> dict[str, str]:
    """Of each drafter and batch of a sweep its picture."""
    by_drafter = {}
    for row in listed(result, "sweep"):
        batch = f", batch {row['batch']}" if row.get("batch") is not None else ""
        by_drafter.setdefault(f"{row.get('drafter')}{batch}", []).append(row)
    return {drafter: heat_map(drafter, rows) for drafter, rows in by_drafter.items()}


# name of the file: how to draw it from rows that share a plain decoding (None: nothing to draw), caption
PICTURES = {
    **{
        f"speed-{key}": (functools.partial(speed_against_quality, key=key), f"Speed against quality: {label}")
        for key, _, label, *_ in MEASURES
    },
    "predicted": (predicted_against_measured, "Predicted against measured speed"),
    "acceptance": (acceptance, "Acceptance by position"),
    "lengths": (accepted_lengths, "Accepted lengths"),
    "exits": (exit_layers, "Exits by layer"),
    "timeline": (timeline, "One round of each mode"),
}


# ------------------------------------------------------------------------------------------------------------ page


def grouped(results: list[tuple[str, dict]]) -> dict[str, list[dict]]:
    """Rows that were compared with the same plain decoding, under the name of their file, batch and temperature."""
    groups = {}
    for file, result in results:
        for row in listed(result, "rows"):
            if "mode" in row:
                about = [f"{key} {row[key]}" for key in ("batch", "temperature") if row.get(key) is not None]
                groups.setdefault(": ".join(filter(None, (file, ", ".join(about)))), []).append(row)
    return groups


def cell(row: dict, key: str, form: str, factor: float) -> str:
    value = row.get(key)
    if key == "pass_rate" and isinstance(value, dict):
        figures = [value.get("difference"), *(value.get("interval") or [])]  # its interval behind it
        figures = " ".join(f"{figure:+.2f}" for figure in figures if known(figure) is not None)
        return clean(f"{value.get('passed')} of {value.get('asked')}: {figures}")
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    between = " / " if isinstance(value, dict) else "–"
    return between.join(format(v * factor, form) for v in values if known(v) is not None)


def verdict_cell(row: dict) -> str:
    sign, kind, _ = VERDICTS[verdict_of(row)]
    return f'<span class="gate {kind}">{sign} {clean((row.get("gate") or {}).get("verdict", ""))}</span>'


def gate_figures(row: dict) -> str:
    gate = row.get("gate") or {}
    figures = [f"{key} {gate[key]:.3g}" for key in ("value", "bound") if known(gate.get(key)) is not None]
    return clean(", ".join([gate["kind"], *figures] if gate.get("kind") else figures))


def mode_table(groups: dict[str, list[dict]]) -> str:
    every = [row for rows in groups.values() for row in rows]
    columns = [column for column in COLUMNS if any(cell(row, column[0], *column[2:4]) for row in every)]
    heads = "".join(f'<th title="{what}">{head}</th>' for _, head, _, _, what in columns)
    lines = []
    for title, rows in groups.items():
        lines.append(f'<tr><th class="group" colspan="{3 + len(columns)}"><span>{clean(title)}</span></th></tr>')
        for row in rows:
            figures = "".join(f"<td>{cell(row, key, form, factor)}</td>" for key, _, form, factor, _ in columns)
            name = f'<th scope="row">{clean(row["mode"])}</th>'
            verdict, why = (f'<td class="words">{words}</td>' for words in (verdict_cell(row), gate_figures(row)))
            lines.append(f"<tr>{name}{verdict}{figures}{why}</tr>")
    head = f'<tr><th>mode</th><th class="words">gate</th>{heads}<th class="words">what the gate saw</th></tr>'
    notes = "".join(f"<li><b>{head}</b>: {what}</li>" for _, head, _, _, what in columns)
    table = f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div>'
    return f"{table}<details><summary>What the columns say</summary><ul>{notes}</ul></details>"


def plain_table(rows: list[dict]) -> str:
    """Whatever the rows hold, in their own order."""

    def shown(value) -> str:
        if isinstance(value, int | float):
            return f"<td>{value:.4g}</td>" if isinstance(value, float) else f"<td>{value}</td>"
        words = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return f'<td class="words">{clean(words)}</td>'

    keys = list(dict.fromkeys(key for row in rows for key in row))
    heads = "".join(f'<th class="words">{clean(key.replace("_", " "))}</th>' for key in keys)
    lines = "".join(f"<tr>{''.join(shown(row.get(key)) for key in keys)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


def items(result: dict, key: str) -> list[dict]:
    return [{"name": name, "value": value} for name, value in (result.get(key) or {}).items()]


def folded(title: str, rows: list[dict]) -> str:
    return f"<details><summary>{title}</summary>{plain_table(rows)}</details>" if rows else ""


def gates(groups: dict[str, list[dict]]) -> str:
    """How many passed, and each that did not with its reason."""
    judged = [(title, row) for title, rows in groups.items() for row in rows if row.get("gate")]
    verdicts = [verdict_of(row) for _, row in judged]
    words = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v != "none" and v in verdicts)
    lines = [f"<p><b>Gates:</b> {words or 'none was checked'}.</p>"] if groups else []
    for (title, row), verdict in zip(judged, verdicts):
        if verdict != "passed":
            about = clean(f"{title}, {row['mode']}" if len(groups) > 1 else row["mode"])
            why = clean(row["gate"].get("why") or "")
            lines.append(f"<p>{about}: {verdict_cell(row)}, {gate_figures(row)}. {why}</p>")
    return "".join(lines)


def first_lines(file: str, result: dict) -> str:
    """What was measured, where, when, at which commit."""
    facts = about(result)
    seconds = known(result.get("seconds"))
    facts += [] if seconds is None else [f"took {seconds:.0f} s"]
    ceilings = result.get("ceilings") or {}
    for key, unit in (("bytes_per_second", "memory {:.1f} GB/s"), ("flops_per_second", "arithmetic {:.1f} GFLOP/s")):
        facts += [] if known(ceilings.get(key)) is None else [unit.format(ceilings[key] / 1e9)]
    cut = "<b>✗ interrupted: what had been measured until then.</b> " if result.get("interrupted") else ""
    command = f"<code>{clean(result.get('command', 'command unknown'))}</code>"
    return f'<p class="about">{cut}<b>{clean(file)}</b>: {command}<br>{clean(" · ".join(facts))}</p>'


def write_page(results: list[tuple[str, dict]], folder: str | Path) -> Path:
    """report.html and its pictures in `folder` (made when missing), from (file name, result) pairs; its path."""
    folder, groups, drawn, sections = Path(folder), grouped(results), {}, []
    folder.mkdir(parents=True, exist_ok=True)

    def section(title: str, pictures: list[tuple], tables: str = "") -> None:
        figures = []
        for name, picture, caption in pictures:
            n = sum(other.split(".")[0] == name for other in drawn)  # later ones of a name are NAME.2, NAME.3
            name = f"{name}.{n + 1}" if n else name
            drawn[name] = picture
            figures.append(f"<figure><div>{picture}</div><figcaption>{caption} ({name}.svg)</figcaption></figure>")
        if figures or tables:
            body = f'<div class="pictures">{"".join(figures)}</div>'
            sections.append(f"<section><h2>{clean(title)}</h2>{body}{tables}</section>")

    for title, rows in groups.items():
        pictures = [(name, draw(rows), caption) for name, (draw, caption) in PICTURES.items()]
        section(title, [picture for picture in pictures if picture[1]])
    for file, result in results:
        maps = [("sweep", picture, "Sweep of K") for picture in heat_maps(result).values()]
        figures = folded("All figures of the sweep", listed(result, "sweep"))
        section(f"{file}: draft lengths and temperatures", maps, figures)
        tables = {"what each step adds": listed(result, "stack"), "prediction": items(result, "predict")}
        tables["rows"] = [row for row in listed(result, "rows") if "mode" not in row]
        for title, rows in tables.items():
            section(f"{file}: {title}", [], plain_table(rows) if rows else "")
        section(f"{file}: flags", [], folded("All flags", items(result, "flags")))
    for name, picture in drawn.items():
        write_text(folder / f"{name}.svg", standalone(picture))
    models = dict.fromkeys(str((result.get("flags") or {}).get("model") or file) for file, result in results)
    first = "".join(first_lines(file, result) for file, result in results) + gates(groups)
    page = TEMPLATE.substitute(
        title=clean(f"nanospec: {', '.join(models)}"),
        first=first + (mode_table(groups) if groups else ""),
        sections="".join(sections),
    )
    write_text(folder / "report.html", page)
    return folder / "report.html"


def write_report(result: dict, folder: str | Path) -> Path:
    """Write folder/report.html, one page without outside parts, and folder/NAME.svg for each picture in it.

    result  as bench.py writes it; whatever is missing or None is left out of the page
    Returns the page's path; OSError where the folder cannot be written. The folder is made when missing.
    """
    return write_page([((result.get("flags") or {}).get("out") or "this run", result)], folder)


def write_text(path: Path, words: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(words, encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------- README

MARKER = re.compile(r"(<!-- results: (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def exit_table(config: dict) -> str:
    """Heads of a frozen model on texts that they did not learn from."""
    figures = config["meta"]["figures"]
    texts, keys = list(next(iter(figures.values()))), ("agreement", "overlap", "auroc", "calibration_error")
    lines = [["exit after layer", *texts], ["---"] * (1 + len(texts))]
    for layer, by_text in figures.items():
        cells = [[f"{by_text[t][k]:.{3 if k == keys[-1] else 2}f}" for k in keys] for t in texts]
        lines.append([layer, *map(" / ".join, cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def block(readme: Path, file: str, what: str) -> tuple[str, dict[Path, str]]:
    """What stands between the markers of a result file, and the picture files that it needs."""
    import bench  # here, because bench.py imports this file

    result = read_result(readme.parent / file)
    files = {}
    tables = {"speed": (bench.table, "rows"), "quality": (bench.quality_table, "rows"),
              "stack": (bench.stack_table, "stack"), "sweep": (bench.sweep_table, "sweep")}  # fmt: skip
    if what in tables:
        draw, key = tables[what]
        shown = f"```\n{draw(result[key])}\n```\n"
    elif what == "exits":
        shown, result = exit_table(result), result["meta"]
    elif what == "heat":
        pictures, shown = heat_maps(result), ""
        if not pictures:
            raise ValueError(f"{readme.name}: {file} holds no sweep to draw {what} from: take the marker out")
        for i, (drafter, picture) in enumerate(pictures.items(), 1):
            path = Path(file).with_name(f"{Path(file).stem}-heat-{i}.svg")
            files[readme.parent / path] = standalone(picture)
            shown += f"![Speed to plain by K and temperature: {drafter}]({path.as_posix()})\n"
    elif what in PICTURES:
        draw, caption = PICTURES[what]
        picture = draw(next(iter(grouped([("", result)]).values()), []))
        if picture is None:
            raise ValueError(f"{readme.name}: {file} holds nothing to draw {what} from: take the marker out")
        path = Path(file).with_name(f"{Path(file).stem}-{what}.svg")
        files[readme.parent / path] = standalone(picture)
        shown = f"![{caption}]({path.as_posix()})\n"
    else:
        raise ValueError(
            f"{readme.name}: a marker asks for {what}: choose exits, heat, {', '.join([*tables, *PICTURES])}"
        )
    command = f"`{result['command']}`; " if result.get("command") else ""
    return f"{shown}\n`{file}`: {command}{', '.join(about(result))}.\n", files


def write_readme(readme: Path, check: bool = False) -> int:
    """Fill the README's markers from their files. With `check` nothing is written; 1 says that something would be."""
    before, files = readme.read_text(encoding="utf-8"), {}

    def filled(match) -> str:
        words, pictures = block(readme, match[2], match[3])
        files.update(pictures)
        return f"{match[1]}{words}{match[5]}"

    marked = MARKER.findall(before)
    if len(marked) != before.count("<!-- results:") or any("<!-- results:" in body for *_, body, _ in marked):
        raise ValueError(f"{readme.name}: each <!-- results: FILE WHAT --> needs a line of its own and an <!-- end -->")
    files[readme] = MARKER.sub(filled, before)
    stale = [path for path, words in files.items() if not path.exists() or path.read_text(encoding="utf-8") != words]
    for path in stale:
        print(f"{path.name} {'is not what its results say: python report.py --readme' if check else 'written'}")
        if not check:
            write_text(path, files[path])
    return int(check and bool(stale))


def read_result(path: str | Path) -> dict:
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    if isinstance(result, dict):
        return result
    raise ValueError(f"{path} holds a {type(result).__name__}: a result of bench.py is a JSON object")


def main(argv=None) -> int:
    parser = Parser("report.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="*", metavar="FILE", help="what bench.py wrote; several go on one page")
    parser.add_argument("--out", default="", help="folder for the page and its pictures")
    parser.add_argument("--readme", action="store_true", help="write the README's tables anew from their result files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when the README is stale")
    flags = parser.parse_args(argv)
    if bool(flags.results) == (flags.readme or flags.check) or bool(flags.results) != bool(flags.out):
        parser.error("give result files and --out FOLDER for a page, or --readme or --check for the README")
    try:
        if not flags.results:
            return write_readme(ROOT / "README.md", flags.check)
        print(write_page([(file, read_result(file)) for file in flags.results], flags.out))
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
