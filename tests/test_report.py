"""Reports: what they say, that they fit, and that no token can spoil them. No model is needed."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from xml.etree import ElementTree

import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mainstem.experiments.outcome import Curves
from mainstem.report import as_html, as_json, as_text, print_tables
from mainstem.report import terminal as t
from mainstem.report import text as words
from mainstem.report.alike import block_groups, layers_text, shape_groups
from mainstem.report.basis_report_text import text_line
from mainstem.report.charts import interval_bars
from mainstem.report.curves import Course, courses
from mainstem.report.drawing import Tributary, stream
from mainstem.report.fitting import Fitting
from mainstem.report.lens_page import lens_figure
from mainstem.report.line_chart import line_chart
from mainstem.report.set_text import own_text
from mainstem.report.terminal import terminal
from mainstem.results.prompt_set import PromptRow

RESULTS = {
    "explanation": samples.explanation(),
    "refused": samples.explanation(holds=False),
    "contrast": samples.explanation(contrast=True),
    "negative": samples.explanation(negative=True),
    "empty": samples.explanation(empty=True),
    "queries": samples.explanation(queries=True),
    "lens": samples.lens_reading(),
    "lens of six": samples.lens_reading(6),
    "lens with units": samples.lens_reading(2, units=True),
    "anatomy": samples.anatomy(),
    "anatomy without shapes": samples.anatomy(shapes=False),
    "steer": samples.compared(),
    "steer without edits": samples.compared(edits=0),
    "patch": samples.patched(),
    "patch of pairs": samples.patched(pairs=3),
    "patch of heads": samples.patched(heads=True),
    "subspace": samples.subspace_reading(),
    "erasers": samples.subspace_reading("erasers"),
    "circuits": samples.circuit_reading(),
    "circuits with a skip trigram": samples.circuit_reading(asked=True),
    "trigram": samples.trigram_reading(),
    "trigram in no head": samples.trigram_reading(found=False),
    "experiment": samples.experiment(),
    "experiments": samples.reproduction(),
}
ALL = pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
WIDTHS = (60, 80, 100, 118, 140, 200)


# --- words and numbers ------------------------------------------------------------------------------------


@given(st.text())
def test_a_visible_token_holds_nothing_that_is_not_seen(token):
    shown = words.visible(token)
    assert shown and shown.isprintable() and " " not in shown and "\n" not in shown


@given(st.text(max_size=4), st.text(max_size=4))
def test_two_tokens_never_look_the_same(a, b):
    assert (words.visible(a) == words.visible(b)) == (a == b)


def test_visible_tokens():
    assert words.visible(" Paris") == "␣Paris"
    assert words.visible("\n\t\\") == "\\n\\t\\\\"
    assert words.visible("\u200b\u202e\x1b\x00") == "\\u200b\\u202e\\x1b\\x00"
    assert words.visible("\u0301") == "◌\u0301"
    assert words.visible("日本 é") == "日本␣é"


@given(st.floats(allow_nan=True), st.integers(1, 40))
def test_bars_keep_their_width(value, half):
    left, right = words.diverging(value, 10.0, half)
    assert len(left) == len(right) == half
    assert not (left.strip() and right.strip())


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_larger_value_has_no_shorter_bar(a, b):
    low, high = sorted((a, b))
    assert len(words.bar(low, 10.0, 12)) <= len(words.bar(high, 10.0, 12))
    assert words.bar(10.0, 10.0, 12) == "█" * 12


def test_numbers():
    assert [words.signed(x) for x in (1.234, -1.234, -0.001, math.nan, None)] == ["+1.23", "−1.23", "0.00", "–", "–"]
    assert [words.probability(p) for p in (0.7725, 0.0012, 3.1e-7)] == ["0.772", "0.0012", "3.1e-07"]
    assert [words.compact(x) for x in (0.9, -24.93, 1e-9, 123456.0)] == ["0.90", "−24.93", "1.0e-09", "1.2e+05"]
    assert words.plural(1, "token") == "1 token" and words.plural(1200, "part") == "1,200 parts"


def test_the_middle_of_a_long_list_is_left_out_but_never_what_matters():
    shown = words.gaps(range(1000), [500], 96)
    assert shown[0] == 0 and shown[-1] == 999 and 500 in shown and None in shown and len(shown) < 110
    assert words.gaps(range(5), [4], 96) == [0, 1, 2, 3, 4]


# --- JSON -------------------------------------------------------------------------------------------------


@ALL
def test_json_is_one_document_and_finite(result):
    document = json.loads(as_json(result), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    kind = {"circuits": "(circuits|trigram)"}.get(document["command"], document["command"].replace(" ", "/"))
    assert re.fullmatch(rf"mainstem/{kind}(/[a-z]+)?/1", document["schema"])
    assert {"provenance", "warnings", "model", "notes"} <= set(document)
    without = ("subspace", "circuits", "reproduce fake", "reproduce all")  # of weights alone, of prompts of their own
    assert "prompt" in document or document["command"] in without


def test_nan_is_null_in_json():
    values = json.loads(as_json(RESULTS["explanation"]))["values"]
    assert values[2]["additive"] is None and values[2]["increase"] is None


# --- tables -----------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("width", WIDTHS)
def test_tables_fit_and_are_plain_in_a_pipe(result, width):
    shown = as_text(result, width)
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    assert "\x1b" not in shown and "\u202e" not in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


@ALL
def test_no_colour_means_no_escape_of_colour(result, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    held = StringIO()
    print_tables(terminal(held, 100), result)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", held.getvalue())


def test_colours_change_no_word():
    held = StringIO()
    print_tables(terminal(held, 100, colour=True), RESULTS["explanation"])
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", held.getvalue())
    assert [line.rstrip() for line in coloured.splitlines()] == as_text(RESULTS["explanation"], 100).splitlines()
    assert "\x1b[" in held.getvalue()


@pytest.mark.parametrize("name", ["explanation", "lens"])
def test_all_tokens_are_shown_and_the_destination_is_marked(name):
    result, shown = RESULTS[name], as_text(RESULTS[name], 200)
    for place, token in enumerate(samples.NASTY):
        visible = words.visible(token)
        assert (f"{place} [{visible}]" if place == result.position else f"{place} {visible}") in shown


@pytest.mark.parametrize("width", [80, 140])
def test_what_an_explanation_says(width):
    shown = " ".join(as_text(RESULTS["explanation"], width).split())
    for expected in (
        "target ␣<Paris> p 0.770 log p −0.260 rank 1 id:7",
        "✓ sum 1,234 parts add up to the stream: error 2.0e-07, tolerance 1.0e-04, worth 5.0e-07 nats",
        "✓ labels 12 units",
        "✓ reads 12 projections",
        "the 3 of 1,000 units that write most for ␣<Paris>",
        "by log-probability increase (nats) (exact: 16 of them scored",
        "frozen norm",
        "recomputed norm",
        "▾increase",
        "sink",
        "note",
    ):
        assert expected in shown, expected
    assert shown.index("L1H0@3") < shown.index("L1N7") < shown.index("L0E3N40")


def test_a_certificate_that_fails_is_said_with_its_place():
    for shown in (" ".join(as_text(RESULTS["refused"], 140).split()), as_html(RESULTS["refused"])):
        assert "does not hold at the heads of L1.attn" in shown
        assert "does not hold at L1H0@3" in shown


def test_a_contrast_names_its_rivals_and_a_negative_list_says_against():
    assert "over ␣London" in as_text(RESULTS["contrast"], 100)
    assert "minus that of ␣London" in as_text(RESULTS["contrast"], 100)
    assert "write most against ␣<Paris>" in " ".join(as_text(RESULTS["negative"], 100).split())
    assert "no unit of these kinds" in as_text(RESULTS["empty"], 100)


def test_the_lens_shows_every_followed_token_at_every_width():
    for width in WIDTHS:
        shown = as_text(RESULTS["lens of six"], width)
        assert all(f"␣token{i}" in shown for i in range(6))
        assert shown.count("L1.mlp") >= 2


def test_what_an_anatomy_says():
    shown = " ".join(as_text(RESULTS["anatomy"], 140).split())
    for expected in (
        "L0, L1 2 blocks alike",
        "4 heads of 8 (2 key/value)",
        "query, then rms norm (gain 0.50 … 1.50)",
        "rms norm (gain 0.50 … 1.50), × 0.50 … 1.50",
        "a gate at blocks.2",
        "refused neurons: it is <no> product",
        "✗ neurons 64 refused at L2.mixer: it is <no> product",
        "12 × sources",
        "attends both ways",
        "with embed × 8.00",
        "a <reason>",
        "softcap 30.00",
        "L0 … L2 3 blocks alike",
        "[(n_heads d_head), d_model]",
    ):
        assert expected in shown, expected


def test_alike_blocks_are_found_once_with_their_ranges():
    groups = block_groups(samples.anatomy())
    assert [group.layers for group in groups] == [[0, 1], [2]]
    assert [factors for factors in groups[0].factors] == [[1.0, 1.0], [0.5, 1.5]]
    assert sum(len(rows) for _, rows in shape_groups(samples.anatomy().shapes or [])) == 4
    assert layers_text([0, 1, 2, 5, 7, 8]) == "L0 … L2, L5, L7, L8"


# --- pages ------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A page's elements, checked for balance as they come."""

    VOID = frozenset(["meta", "br"])
    PARAGRAPH_ENDS = frozenset(["p"])

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.data = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and self.elements[-1][1].get("id") == "document":
            self.data += data
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def count(self, tag):
        return sum(found == tag for found, _ in self.elements)


@ALL
def test_pages_are_whole_and_no_token_becomes_markup(result):
    page = Page(as_html(result))
    assert page.count("script") == 2 and page.count("style") == page.count("h1") == page.count("main") == 1
    assert "\u202e" not in "".join(page.text)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


@ALL
def test_pages_need_nothing_from_anywhere(result):
    text = as_html(result)
    page = Page(text)
    assert not page.attributes("src") and not page.count("link")
    assert {target.removeprefix("#") for target in page.attributes("href")} <= {*page.attributes("id")}
    assert not re.search(r"https?:|@import|url\(|//[a-z]+\.", text)
    assert "default-src 'none'" in page.attributes("content")[0]


@ALL
def test_pages_carry_their_document(result):
    assert json.loads(Page(as_html(result)).data) == json.loads(as_json(result))


@ALL
def test_pages_follow_light_and_dark_and_print(result):
    text = as_html(result)
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_an_explanations_page_says_what_its_tables_say():
    text = " ".join(" ".join(Page(as_html(RESULTS["explanation"])).text).split())
    for unit in ("L1H0@3", "L1N7", "L0E3N40", "L0.attn", "L1.mlp"):
        assert unit in text
    for expected in ("0.770", "1,234 parts add up", "sink", "frozen norm", "exact: 16 of them scored", "2.9"):
        assert expected in text, expected
    destination = [a for _, a in Page(as_html(RESULTS["explanation"])).elements if a.get("aria-current")]
    assert len(destination) == 1


def test_the_script_only_sorts():
    """Without JavaScript the page says the same: the script makes no text, and rows are in order."""
    text = as_html(RESULTS["explanation"])
    script = text[text.rindex("<script>") :]
    assert not re.search(r"innerHTML|textContent\s*=|createElement|write\(|fetch|XMLHttp", script)
    assert text.index(">L1H0@3<") < text.index(">L1N7<") < text.index(">L0E3N40<")


# --- drawings ---------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_a_stream_is_drawn_whatever_the_numbers(values):
    drawn = stream([Tributary(f"L{i}.attn", v) for i, v in enumerate(values)], " x", math.fsum(values))
    assert "nan" not in drawn and "inf" not in drawn
    assert drawn.count("<title>") == len(values) + 1
    Page(drawn)


def test_the_stems_end_is_as_wide_as_the_tributaries_together():
    values = [1.0, 2.0, -0.5, 4.0]
    drawn = stream([Tributary(f"L{i}.mlp", v) for i, v in enumerate(values)], " x", sum(values))
    largest = max(6.5, 4.0)
    stem = max(re.findall(r'class="stem-for" d="([^"]+)"', drawn), key=len)
    ys = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", stem)]
    assert max(ys) - min(ys) == pytest.approx(86.0 * 6.5 / largest, abs=0.2)


def test_labels_of_a_stream_never_cover_each_other():
    drawn = stream([Tributary(f"L{i}.mlp", 1.0 + i % 3) for i in range(61)], " x", 100.0)
    label = r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(end|start)"><tspan class="mono">([^<]+)</tspan> ([^<]+)'
    spans = []
    for x, y, anchor, name, number in re.findall(label, drawn):
        length = 7.2 * len(f"{name} {number}")
        left = float(x) - (length if anchor == "end" else 0.0)
        spans.append((float(y), left, left + length))
    assert len(spans) == 8
    for i, (y, left, right) in enumerate(spans):
        for other_y, other_left, other_right in spans[i + 1 :]:
            assert abs(y - other_y) > 12 or right < other_left or other_right < left


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=30))
def test_courses_are_drawn_whatever_the_numbers(values):
    drawn = courses([f"L{i}.attn" for i in range(len(values))], [Course(" x", values, "p 0.1")], "a course")
    assert "nan" not in drawn.lower().replace("finance", "")
    Page(f"<div>{drawn}</div>")


def _ticks(drawn: str) -> list[str]:
    return re.findall(r'text-anchor="end">([^<]+)</text>', drawn)


@pytest.mark.parametrize(
    "values, ticks",
    [([2.8, 3.6, 3.6, 3.4, 3.1], ["3.5", "3.0"]), ([0.61, 0.62, 0.6], ["0.62", "0.61", "0.60"]),
     ([-9.0, -4.0, -7.0], ["−5", "0"])],
)  # fmt: skip
def test_ticks_have_as_many_decimals_as_tell_them_apart(values, ticks):
    shown = _ticks(courses([f"L{i}.mlp" for i in range(len(values))], [Course("x", values, "")], "a course"))
    assert len(set(shown)) == len(shown) and set(ticks) <= set(shown)


def test_only_first_states_far_below_the_others_are_cut_off():
    names = [f"L{i}.mlp" for i in range(5)]
    assert "lower than the drawing" not in courses(names, [Course("x", [2.8, 3.6, 3.6, 3.4, 3.1], "")], "a course")
    assert "down to −500" in courses(names, [Course("x", [-500.0, -90.0, -9.0, -3.0, -1.0], "")], "a course")
    high = courses(names, [Course("x", [9.0, 2.0, 3.0, 1.0, 2.0], "")], "a course")
    ys = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", re.findall(r'points="([^"]+)"', high)[0])]
    assert ys[0] < min(ys[1:])  # the largest is above the others, first as it is


def test_the_name_of_a_line_is_shown_as_it_is():
    drawn = courses(["embed", "L0.mlp"], [Course("as it is", [1.0, 2.0], "")], "a course")
    assert '<tspan class="mono">as it is</tspan>' in drawn


def test_names_beside_bars_have_room():
    name = "everywhere, mean, first position apart"
    drawn = interval_bars([(name, 0.5, 0.1, 0.9), ("zero", -0.5, -0.7, 0.0)], "bars")
    x = float(re.findall(rf'<text x="([\d.]+)"[^>]*>{name}<', drawn)[0])
    assert x - 7.2 * len(name) >= 0
    assert all(float(left) > x for left in re.findall(r'<rect class="bar-for" x="([\d.]+)"', drawn))


points = st.lists(st.tuples(st.floats(), st.floats()), max_size=12)


@given(st.dictionaries(st.text(max_size=12), points, max_size=8), st.booleans())
def test_curves_are_drawn_whatever_the_numbers(lines, logarithmic):
    drawn = line_chart(Curves("title", "", "x <steps>", "y", lines, logarithmic))
    numbers = re.findall(r'(?:points|[xy][12]?)="([^"]*)"', drawn)
    assert not re.search("nan|inf", " ".join(numbers))
    assert all(-2 <= float(n) <= 1200 for text in numbers for n in re.split("[ ,]", text))
    Page(f"<div>{drawn}</div>")


def test_seeds_of_an_arm_share_colour_and_label():
    names = [f"{arm}, seed {seed}" for arm in "abcdefg" for seed in range(3)]
    drawn = line_chart(Curves("title", "", "x", "y", {name: [(0.0, 1.0), (1.0, 2.0)] for name in names}))
    css = re.findall(r'<polyline class="line ([^"]+)"', drawn)
    assert css[0] == css[1] == css[2] and len(set(css)) == 7 and len(css) == 21
    assert [text for text in re.findall(r">([a-g] 2.00)<", drawn)] == [f"{arm} 2.00" for arm in "abcdefg"]


def test_a_long_curve_is_thinned_and_keeps_its_end():
    drawn = line_chart(Curves("title", "", "x", "y", {"a": [(float(i), 1.0 * i) for i in range(100_001)]}))
    (line,) = re.findall(r'points="([^"]+)"', drawn)
    assert len(line.split()) <= 500 and line.split()[-1] == "840.0,30.0"


@given(st.lists(st.floats(-1e9, 1e9), max_size=100), st.booleans())
def test_sparklines_are_short_and_rise_with_the_values(values, logarithmic):
    drawn = words.sparkline(values, logarithmic)
    assert len(drawn) == min(len(values), 24)
    assert [*words.sparkline(sorted(values))] == sorted(words.sparkline(sorted(values)))


def test_a_unit_is_shown_with_its_null_and_its_sigmoids():
    result = RESULTS["lens with units"]
    page, table = as_html(result), " ".join(as_text(result, 140).split())
    for shown in (table, page):
        assert "200 random directions of this norm have a largest logit of 1.50 ± 0.20" in shown
        assert (
            "no more than what a random direction gives" in shown
            and "what it promotes is more than 99% of them give" in shown
        )
    assert "p 0.100 without it, 0.250 with it" in table
    assert page.count('class="ring') == page.count('class="dot') == 2 and "the unit’s before-softmax value" in page


def test_a_figure_stands_alone():
    drawn = lens_figure(RESULTS["lens with units"])
    root = ElementTree.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert drawn.count("<polyline") == 2 + 2 + 2 and "prefers-color-scheme: dark" in drawn
    assert not re.search(r"(href|src|url\()", drawn)
    used = {name for names in re.findall(r'class="([^"]+)"', drawn) for name in names.split()}
    assert all(f".{name}" in drawn for name in used)
    nasty = lens_figure(replace(RESULTS["lens"], model={**samples.model(), "name": "</svg><script>x</script>"}))
    ElementTree.fromstring(nasty)


def test_a_model_without_direct_attribution_has_no_drawn_stream():
    e = samples.explanation()
    bare = replace(e, layers=[replace(row, direct=None) for row in e.layers])
    assert "The stream</h2>" not in as_html(bare)
    assert "The stream</h2>" in as_html(e)


def test_queries_are_shown_where_they_were_asked_for():
    without, asked = samples.explanation(), samples.explanation(queries=True)
    assert "Queries" not in as_text(without, 118) and "Queries</h2>" not in as_html(without)
    text, page = as_text(asked, 118), as_html(asked)
    assert "promotes, through L1H0" in text and "promotes, through L1H0" in page
    assert "direct effect of its value on the target's logit 2.00 = +3.50 and −1.00, biases −0.50" in " ".join(
        text.split()
    )
    assert "no key for L0E3N40: <none>" in text and "no key for L0E3N40: &lt;none&gt;" in page
    shown = [line for line in text.splitlines() if line.strip().startswith("L0N3")]
    assert len(shown) == 1 and "−90.25" in shown[0]


def test_unknown_results_have_no_report():
    class Other:
        def as_dict(self):
            return {}

    with pytest.raises(TypeError, match="no report for Other"):
        as_html(Other())
    with pytest.raises(TypeError, match="no report for Other"):
        as_text(Other())


WIDE = Fitting(
    ["where", "in their place", *(f"number {i}" for i in range(12))],
    [
        ["attention", "mean, first position apart", *(f"−0.{i:03d}" for i in range(12))],
        ["everywhere", "–", *["–"] * 12],
    ],
    [False] * 14,
    t.lined,
)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_is_broken_and_no_column_lost_in_a_narrow_terminal(width):
    console = terminal(width=width, file=StringIO())
    console.print(WIDE)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert all(f"−0.{i:03d}" in printed for i in range(12)) and "position" in printed
    tables = len(re.findall(r"^ *where ", printed, re.M))
    assert printed.count("attention") == tables and (tables == 1) == (width == 200)


def test_an_absurdly_long_word_is_broken_rather_than_lost():
    console = terminal(width=30, file=StringIO())
    console.print(Fitting(["token", "number"], [["x" * 100, "−0.5"]], [False, False], t.lined))
    assert console.file.getvalue().count("x") == 100 and "−0.5" in console.file.getvalue()


@pytest.mark.parametrize("size", [1.0, 14.34, 143.4])
def test_effects_of_a_heat_map_are_whole_and_apart(size):
    effects = [[(-1) ** j * size * (1 + j / 7) for j in range(len(samples.patched().columns))] for _ in range(3)]
    printed = as_text(replace(samples.patched(), effects=effects), 80)
    cells = {f"{100 * effect:.0f}".replace("-", "−") for effect in effects[0]}
    rows = [line.split() for line in printed.splitlines() if re.match(r" *L[012] +[−\d]", line)]
    assert {cell for row in rows for cell in row[1:]} >= cells
    assert not any(cell not in cells for row in rows for cell in row[1:] if re.fullmatch(r"−?\d{3,}", cell))


def test_one_column_of_a_heat_map_has_its_name():
    one = samples.patched()
    made = replace(one, columns=["all positions"], effects=[row[:1] for row in one.effects], top=one.top[:0])
    assert "all positions" in as_text(made, 80)


def test_whole_numbers_of_a_prompt_are_whole_and_a_source_is_said_once():
    row = PromptRow("line 1", [], [], [], [], True, None, {"same": 2, "probability": 0.25})
    assert own_text(row) == "same 2; probability 0.25"
    text = {"name": "a.txt", "source": "a.txt", "tokens": 8, "windows": 1, "window": 8, "stride": 8}
    assert text_line(text) == "a.txt: 8 tokens in 1 window of 8, 8 apart"
    assert text_line(text | {"source": "b/a.txt"}).startswith("a.txt (b/a.txt): ")
