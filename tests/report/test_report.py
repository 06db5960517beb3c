"""What is in a report's files, without a browser: the model under its schema, escaping, missing data."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from urllib.parse import urlparse

import jsonschema
import numpy as np
import pytest

from analysis.report import markdown, model
from tests.report.conftest import CASE, HOSTILE

SCHEMA = json.loads((files("analysis.report") / "schema.json").read_text())


def valid(report):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(report)


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and its text outside scripts and styles."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.found, self.text, self._raw = [], [], None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._raw = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._raw = None

    def handle_data(self, data):
        if self._raw is None:
            self.text.append(data)


def test_a_full_report_follows_its_schema_and_holds_what_was_planted(full, write):
    made = write(full)
    valid(made.json)
    rows = {(r["case"], r["impl"]): r for r in made.rows("results") if r["replica"] == 0}
    xla = rows[CASE, "xla.jit"]
    assert xla["verdict"] == "faster" and xla["ratio_low"] <= 0.5 <= xla["ratio_high"]
    assert xla["tflop_per_s"] == pytest.approx(2**31 / xla["time_us"] * 1e-6, rel=1e-5)
    assert made.json["stacks"][xla["versions"]]["versions"] == {"jax": "0.10.2"}
    assert made.json["runs"]["id"][xla["run"]] == "r1"
    (decided,) = [d for d in made.rows("decisions") if d["case"] == CASE]
    assert (decided["answer"], decided["choice"]) == ("leave", "xla.jit")
    (place,) = made.json["places"]
    assert place["ceilings"]["rates"] == {"bf16": 400e9, "f32": 100e9}
    assert place["ceilings"]["ridge_points"]["f32"] == pytest.approx(10.0)
    assert {"machine": "box", "threads": 2, "regime": "warm", "device_kind": "cpu"}.items() <= place.items()
    assert made.json["counts"] == {
        "results": len(rows),
        "timed": 4 + 9 + 2 + 7,
        "cases": 5,
        "implementations": 6,
        "runs": 1,
    }


def test_the_schema_refuses_what_is_no_report(full, write):
    report = write(full).json
    for damage in (
        lambda r: r.pop("results"),
        lambda r: r["results"].pop("case"),
        lambda r: r["results"]["time_us"].append("soon"),
        lambda r: r["decisions"]["answer"].append("maybe"),
        lambda r: r.update(more=1),
        lambda r: r["places"][0].pop("ceilings"),
    ):
        damaged = json.loads(json.dumps(report))
        damage(damaged)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate(damaged)


def test_columns_have_one_length(full, write):
    report = write(full).json
    for name in ("results", "decisions", "implementations", "cases", "runs"):
        assert len({len(column) for column in report[name].values()}) == 1, name


def test_the_page_carries_the_same_data_as_the_json(full, write):
    made = write(full)
    assert json.loads(made.embedded("data")) == made.json
    assert b"plotly.js" in made.embedded("plotly")[:300]


def test_the_page_needs_nothing_and_asks_for_nothing(full, write):
    elements = Elements(write(full).html).found
    for tag, attributes in elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            if name in attributes:
                assert urlparse(attributes[name]).scheme in ("", "data"), (tag, attributes)
                assert attributes[name].startswith(("#", "data:")), (tag, attributes)
    (policy,) = [a["content"] for t, a in elements if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    styles = re.search(r"<style>(.*?)</style>", write(full).html, re.DOTALL)[1]
    assert "url(" not in styles and "@import" not in styles


def test_the_answer_comes_first_and_can_be_read_without_a_script(full, write):
    made = write(full)
    text = " ".join(" ".join(Elements(made.html).text).split())
    answer = text.index("Leave blas.default in 1 of 4 cases, for xla.jit (1): 2.00\N{MULTIPLICATION SIGN} as fast.")
    assert answer < text.index("Where to leave the baseline") < text.index("Rooflines Each point")
    for wanted in (
        "No f32 here.",
        "O[0, 3] is 1.0, expected 2.0.",
        "jax 0.10.2",
        "c0ffee",
        "ceiling:rate:f32",
        "Noise floor",
    ):
        assert wanted in text


def test_whatever_records_say_stays_text(hostile, full, write):
    made = write(hostile)
    valid(made.json)
    elements = Elements(made.html)
    benign = {tag for tag, _ in Elements(write(full).html).found}
    assert {tag for tag, _ in elements.found} <= benign
    assert sum(tag == "script" for tag, _ in elements.found) == 3
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert not any("javascript:" in (a.get("href") or "").lower()[:20] for _, a in elements.found)
    assert HOSTILE in "".join(elements.text)
    assert made.embedded("data").count(b"onerror") > 5  # It is in there, and was not lost.


def test_markdown_from_records_stays_text(hostile, write):
    text = write(hostile).markdown
    assert "<img" not in text and "</script" not in text and "<b>" not in text
    assert "[x](" not in text
    assert not re.search(r"(?<!\\)`", text)
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") in (line.count(" | ") + 2, line.count("|"))
    rows = [line for line in text.splitlines() if line.startswith("| <code>gemm")]
    heads = [line for line in text.splitlines() if line.startswith("| leave the baseline in")]
    assert {row.count("|") for row in rows[:1]} == {heads[0].count("|")}


def test_markdown_answers_and_fits_a_comment(full, write):
    made = write(full)
    assert (
        "**Leave blas.default in 1 of 4 cases, for xla.jit (1): 2.00\N{MULTIPLICATION SIGN} as fast.**" in made.markdown
    )
    assert f"<code>{CASE}</code>" in made.markdown
    many = [{"place": 0, "status": "failed", "impl": "a.b", "reason": "x" * 300, "count": 1, "cases": ["c"]}] * 5000
    text = markdown.render(made.json | {"problems": many, "notes": ["y" * 900] * 300})
    assert len(text) < 65536
    assert "more are in report.json" in text


# -- what is missing --------------------------------------------------------------------------------------------------


def notes(made):
    return " ".join(made.json["notes"])


def test_an_empty_folder_says_so(tmp_path, write):
    (tmp_path / "empty").mkdir()
    made = write(tmp_path / "empty")
    valid(made.json)
    assert made.json["counts"]["results"] == 0
    assert "holds no records" in notes(made) and "ridgemark compare" in notes(made)
    assert "There is no result in these records." in made.html and "There is no result" in made.markdown


def test_one_implementation_only(records, write):
    records.result(CASE, "xla.jit", [1000.0] * 8)
    made = write(records)
    valid(made.json)
    assert "Only xla.jit was measured" in notes(made)
    assert "1 case has no time of the baseline" in notes(made)
    assert [d["answer"] for d in made.rows("decisions")] == ["no baseline"]


def test_several_machines_are_kept_apart_and_the_one_measured_last_comes_first(full, write):
    full.run("r2", machine="node", kind="cuda")
    full.result(CASE, "cublas.default", [10.0] * 8, run="r2", regime="burst", method="cupti")
    made = write(full)
    valid(made.json)
    assert [p["machine"] for p in made.json["places"]] == ["node", "box"]
    assert made.html.index("node, 2 threads, burst") < made.html.index("box, 2 threads, warm")
    assert made.markdown.index("## node") < made.markdown.index("## box")
    assert "never across" in notes(made)
    assert "node's device (node, 2 threads, burst): No ceilings were measured" in notes(made)
    assert {(r["place"], r["impl"]) for r in made.rows("results") if r["impl"] == "cublas.default"} == {
        (0, "cublas.default")
    }
    assert {d["place"] for d in made.rows("decisions") if d["choice"] == "xla.jit"} == {1}


def test_what_the_machine_is_is_written_with_units_and_once(full, write):
    gpu = {"name": "Some GPU", "memory_bytes": 80 << 30, "memory_bytes_per_s": 3.35e12, "max_clock_hz": 1.98e9}
    full.lines[0]["machine"] |= {"gpu": [gpu | {"power_limit_w": 700.0}], "memory_bytes": 1 << 30, "note": None}
    full.result(CASE, "blas.default", [10.0] * 8, regime="sustained")
    made = write(full)
    for text in ("80.0 GiB", "3.35 TB/s", "1.98 GHz", "700 W", "1.00 GiB"):
        assert made.html.count(f"<td>{text}</td>") == 1
    assert len(made.json["places"]) == 2 and made.html.count("as above: box") == 1


def test_mixed_schema_shows_what_can_be_read(full, tmp_path, write):
    path = tmp_path / "r1.jsonl"
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in full.lines) + '{"schema": 2, "kind": "run", "run": "x"}\n'
    )
    made = write(path)
    valid(made.json)
    assert "has schema 2; this ridgemark reads up to 1" in notes(made)
    assert any(d["choice"] == "xla.jit" for d in made.rows("decisions"))


def test_a_case_without_its_baseline(full, write):
    case = "gemm:64x64x64:f32"
    full.result(case, "blas.default", status="failed", reason="No.")
    full.result(case, "xla.jit", [10.0] * 8)
    made = write(full)
    assert f"1 case has no time of the baseline, so no ratio: {case}." in notes(made)
    assert "The baseline blas.default is failed: No." in json.dumps(made.json)


def test_a_machine_without_ceilings(records, write):
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    made = write(records)
    valid(made.json)
    assert "No ceilings were measured: there is no roofline" in notes(made)
    assert made.json["places"][0]["ceilings"] is None
    assert made.rows("decisions")[0]["answer"] == "leave"


def test_a_dtype_without_a_rate_and_results_beyond_the_ceilings(records, write):
    records.ceilings()
    records.paired("gemm:64x64x64:f16", {"xla.jit": 0.5}, rounds=12)
    records.result(CASE, "blas.default", [1.0] * 8)
    made = write(records)
    assert "No rate was measured for f16" in notes(made)
    assert "1 result is faster than the ceilings" in notes(made)


def test_without_an_a_a_pair_the_noise_is_unknown(records, write):
    records.result(CASE, "blas.default", [1000.0] * 8)
    records.result(CASE, "xla.jit", [500.0] * 8)
    made = write(records)
    assert "No A/A pair was measured" in notes(made)
    assert made.json["places"][0]["noise_floor"] is None


def test_runs_that_were_dirty_or_interrupted_are_said(full, write):
    full.run("r2")
    full.lines[-2]["dirty"] = True
    full.result(CASE, "xla.jit", [500.0] * 8, run="r2", complete=False)
    made = write(full)
    assert "Run r2 was measured on a checkout with changes" in notes(made)
    assert "Run r2 did not come to its end" in notes(made)
    assert "1 result has fewer rounds" in notes(made)
    assert "Results come from 2 runs" in notes(made)
    assert made.rows("runs")[1] | {"dirty": True, "interrupted": True} == made.rows("runs")[1]


def test_notes_are_limited(records, write):
    records.paired(CASE, {"xla.jit": 0.5})
    for i in range(300):
        records.lines.append({"schema": 1, "kind": "result", "run": f"r{i}", "case": 7})
    made = write(records)
    assert len(made.json["notes"]) == 201 and "more notes of this kind" in made.json["notes"][-1]


@pytest.mark.parametrize(
    "line",
    [
        {"machine": {"name": {"a": 1}}, "device": {"name": ["x"], "threads": "many", "kind": 3}},
        {"machine": {"name": "m", "caches": [1, {"kind": "data"}]}, "device": {}, "harness": [1], "plan": [1]},
        {"commit": 7, "dirty": "yes", "seed": "one", "started": 5, "machine": None, "device": None},
    ],
)
def test_headers_of_odd_types_still_give_a_report(records, line, write):
    records.lines[0] = {"schema": 1, "kind": "run", "run": "r1"} | line
    records.ceilings()
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12, method=["x"], reason={"a": 1}, flags=[1, None], config="text")
    valid(write(records).json)


# -- the model's own parts --------------------------------------------------------------------------------------------


def test_numbers_have_six_significant_digits():
    values = np.array([0.0, 1 / 3, -123456.789, 1.23456789e-9, 9.87654321e15, np.nan, np.inf, 1e-310])
    rounded = model._rounded(values)
    assert rounded[:5].tolist() == [0.0, 0.333333, -123457.0, 1.23457e-9, 9.87654e15]
    assert np.isnan(rounded[5]) and np.isinf(rounded[6])


def test_levels_are_the_caches_that_hold_the_probes(full, write):
    full.lines[0]["machine"]["caches"] = [
        {"level": 1, "kind": "data", "bytes": 32768, "shared_by": 1, "instances": 2},
        {"level": 1, "kind": "instruction", "bytes": 1 << 30, "shared_by": 1, "instances": 2},
        {"level": 2, "kind": "unified", "bytes": 1 << 20, "shared_by": 1, "instances": 2},
    ]
    (place,) = write(full).json["places"]
    assert [(level["name"], level["bytes"]) for level in place["ceilings"]["levels"]] == [
        ("L1", 65536.0),
        ("L2", float(1 << 20)),
        ("memory", float(64 << 20)),
    ]
    assert [level["bytes_per_s"] for level in place["ceilings"]["levels"]] == [100e9, 100e9, 10e9]


def test_without_known_caches_there_is_main_memory_only(full, write):
    (place,) = write(full).json["places"]
    assert [(level["name"], level["bytes_per_s"]) for level in place["ceilings"]["levels"]] == [("memory", 10e9)]


def test_problems_are_grouped_by_reason_and_the_gravest_come_first(full, write):
    first, second = write(full).json["problems"]
    assert (first["status"], first["impl"], first["count"]) == ("wrong", "tvm.a", 1)
    assert (second["status"], second["reason"], second["count"]) == ("unsupported", "No f32 here.", 3)
    assert second["cases"] == [f"gemm:{n}x{n}x{n}:f32" for n in (128, 256, 512)]


def test_series_hold_sizes_in_order(full, write):
    (series,) = write(full).json["series"]
    assert (series["title"], series["axis"]) == ("gemm:nxnxn:f32", "n = M = N = K")
    assert series["size"] == [128, 256, 512, 1024]
    assert series["case"][-1] == CASE


@pytest.mark.parametrize(
    ("cases", "title", "axis"),
    [
        ([f"gemm:{m}x4096x512:bf16:nt" for m in (1, 16, 64)], "gemm:Mx4096x512:bf16:nt", "M (rows of A)"),
        ([f"gemm:b8x{n}x{n}x{n}:f32:bias" for n in (8, 16, 32)], "gemm:b8xnxnxn:f32:bias", "n = M = N = K"),
        (
            [f"attention:b1h8s{s}d64:f32:causal" for s in (64, 128, 256)],
            "attention:b1h8sSd64:f32:causal",
            "sequence length",
        ),
        (
            [f"attention:b4h32kv8q1k{s}d128:bf16" for s in (64, 128, 256)],
            "attention:b4h32kv8q1kSd128:bf16",
            "keys (context length)",
        ),
    ],
)
def test_series_of_every_kind(records, write, cases, title, axis):
    for case in reversed(cases):
        records.result(case, "xla.jit", [10.0] * 8)
    (series,) = write(records).json["series"]
    assert (series["title"], series["axis"], series["case"]) == (title, axis, cases)


def test_a_report_replaces_an_earlier_one_and_leaves_nothing_else(full, records, write):
    made = write(full)
    assert sorted(p.name for p in made.folder.iterdir()) == ["index.html", "report.json", "report.md"]
