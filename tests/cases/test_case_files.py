import pytest

from benchmarks.engine import cases
from impls.workloads.base import parse_case


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return cases.load(str(path))


def ids(entries):
    return [entry.case.id for entry in entries]


@pytest.mark.parametrize("name", cases.names())
def test_every_case_that_comes_with_ridgemark_parses_back_and_says_why(name):
    for entry in cases.load(name):
        assert parse_case(entry.case.id) == entry.case
        assert entry.why


def test_there_are_four_files_with_their_counts():
    assert cases.names() == ["flagship", "llm", "quick", "standard"]
    assert len(cases.load("quick")) == 6
    assert len(cases.load("flagship")) == 24


def test_quick_is_small_and_spans_memory_to_compute_bound():
    entries = cases.load("quick")
    assert all(entry.case.flops() < 5e9 and entry.case.total_bytes() < 100e6 for entry in entries)
    intensity = [entry.case.intensity() for entry in entries]
    assert min(intensity) < 5 and max(intensity) > 150
    assert {entry.case.workload for entry in entries} == {"gemm", "attention"}


def test_flagship_is_measured_in_both_regimes_and_others_in_burst():
    assert {entry.regimes for entry in cases.load("flagship")} == {("burst", "sustained")}
    assert {entry.regimes for entry in cases.load("standard")} == {("burst",)}


def test_standard_has_a_subset_for_cpus():
    everything, small = cases.load("standard"), cases.load("standard:cpu")
    assert 0 < len(small) < len(everything)
    assert all(entry.case.flops() < 20e9 for entry in small)
    assert {"square", "skinny", "epilogue", "batched", "grouped", "prefill", "decode", "backward"} <= set().union(
        *(entry.tags for entry in small)
    )


def test_a_user_s_file_works_the_same_way(tmp_path):
    entries = load(
        tmp_path,
        """
        about = "Mine."
        regimes = ["sustained"]
        [[case]]
        id = "gemm:64x32x16:f32"
        why = "because"
        tags = ["small"]
        [[sweep]]
        id = "gemm:{n}x{n}x{k}:{dtype}"
        over = { n = [64, 128], k = [8], dtype = ["f32", "bf16"] }
        regimes = ["burst"]
        """,
    )
    assert ids(entries) == [
        "gemm:64x32x16:f32",
        "gemm:64x64x8:f32",
        "gemm:64x64x8:bf16",
        "gemm:128x128x8:f32",
        "gemm:128x128x8:bf16",
    ]
    assert (entries[0].why, entries[0].tags, entries[0].regimes) == ("because", {"small"}, ("sustained",))
    assert entries[1].regimes == ("burst",)


ORDER = """
[[sweep]]
id = "gemm:{n}x8x8:f32"
over = { n = [3, 2] }
[[case]]
id = "gemm:1x8x8:f32"
why = '''WHY'''
[[sweep]]
id = "gemm:{n}x8x8:f32"
over = { n = [5] }
[[case]]
id = "gemm:4x8x8:f32"
"""


def test_cases_run_in_the_order_of_the_file(tmp_path):
    assert [e.case.m for e in load(tmp_path, ORDER)] == [3, 2, 1, 5, 4]


def test_where_a_text_looks_like_a_header_cases_come_kind_by_kind(tmp_path):
    entries = load(tmp_path, ORDER.replace("WHY", "\n[[case]]\n"))
    assert [e.case.m for e in entries] == [1, 4, 3, 2, 5]


def test_a_case_named_twice_is_measured_once_with_both_reasons(tmp_path):
    (entry,) = load(
        tmp_path,
        """
        [[case]]
        id = "gemm:64x32x16:f32:nn"
        why = "one"
        tags = ["a"]
        [[case]]
        id = "gemm:64x32x16:f32"
        why = "two"
        tags = ["b"]
        regimes = ["sustained"]
        """,
    )
    assert (entry.why, entry.tags, entry.regimes) == ("one; two", {"a", "b"}, ("burst", "sustained"))


def test_what_a_case_leaves_out_is_left_out_where_all_its_entries_do(tmp_path):
    entries = load(
        tmp_path,
        """
        [[case]]
        id = "gemm:64x32x16:f32"
        without = ["xla", "triton.split_k"]
        [[sweep]]
        id = "gemm:{n}x32x16:f32"
        over = { n = [64, 128] }
        without = ["xla", "iree.*"]
        """,
    )
    assert [entry.without for entry in entries] == [{"xla"}, {"xla", "iree.*"}]


def test_tags_after_a_colon_must_all_be_there(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [[case]]
        id = "gemm:1x32x16:f32"
        tags = ["a", "b"]
        [[case]]
        id = "gemm:2x32x16:f32"
        tags = ["a"]
        """
    )
    assert ids(cases.load(f"{path}:a")) == ["gemm:1x32x16:f32", "gemm:2x32x16:f32"]
    assert ids(cases.load(f"{path}:a+b")) == ["gemm:1x32x16:f32"]
    with pytest.raises(cases.CaseFileError, match=r"no case has the tags c; known: a, b"):
        cases.load(f"{path}:c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[case]\n", r"mine\.toml is not valid TOML: .*line 1"),
        ("", r"mine\.toml holds no case"),
        ("[[cases]]\nid = 'gemm:1x1x1:f32'\n", r"unknown key 'cases'; did you mean case\?"),
        ("[case]\nid = 'gemm:1x1x1:f32'\n", r"case must be a list"),
        ("case = [1]\n", r"write case as tables, \[\[case\]\]"),
        ("[[case]]\nwhy = 'x'\n", r"\[\[case\]\] number 1 has no id"),
        (
            "[[case]]\nid = 'gemm:1x1x1:f32'\n[[case]]\nid = 'gemm:0x1x1:f32'\n",
            r"number 2 \(gemm:0x1x1:f32\): .*is no case",
        ),
        ("[[case]]\nid = 'gemn:1x1x1:f32'\n", r"number 1 \(gemn:1x1x1:f32\).*gemm:\.\.\."),
        ("[[case]]\nid = 5\n", r"id must be a string"),
        ("[[case]]\nid = 'gemm:1x1x1:f32'\ntag = ['a']\n", r"unknown key 'tag'; did you mean tags\?"),
        ("[[case]]\nid = 'gemm:1x1x1:f32'\ntags = [1]\n", r"lists of strings; 1 is none"),
        ("[[case]]\nid = 'gemm:1x1x1:f32'\nregimes = ['warm']\n", r"write one or both of burst, sustained"),
        ("[[case]]\nid = 'gemm:1x1x1:f32'\nregimes = []\n", r"write one or both of burst, sustained"),
        ("[[sweep]]\nid = 'gemm:{n}x1x1:f32'\n", r"needs values to go over"),
        ("[[sweep]]\nid = 'gemm:{n}x1x1:f32'\nover = { n = 5 }\n", r"needs values to go over"),
        ("[[sweep]]\nid = 'gemm:{m}x1x1:f32'\nover = { n = [5] }\n", r"still has braces; `over` gives values for n"),
        ("[[model]]\nname = 'm'\n", r"\[\[model\]\] number 1 \(m\): the model has no source"),
    ],
)
def test_mistakes_name_the_file_the_entry_and_what_to_write(tmp_path, text, message):
    with pytest.raises(cases.CaseFileError, match=message) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "mine.toml") in str(caught.value)


def test_a_sweep_of_absurd_size_is_refused_before_it_is_made(tmp_path):
    values = list(range(1, 1001))
    text = f"[[sweep]]\nid = 'gemm:{{m}}x{{n}}x{{k}}:f32'\nover = {{ m = {values}, n = {values}, k = {values} }}\n"
    with pytest.raises(cases.CaseFileError, match="more than 20000 cases"):
        load(tmp_path, text)


def test_unknown_names_and_unreadable_files_are_sentences(tmp_path):
    with pytest.raises(cases.CaseFileError, match=r"no cases called 'quik': did you mean quick\?"):
        cases.load("quik")
    with pytest.raises(cases.CaseFileError, match="or the path of a TOML file"):
        cases.load(str(tmp_path / "nothing.toml"))
    path = tmp_path / "latin.toml"
    path.write_bytes(b'about = "\xe9"')
    with pytest.raises(cases.CaseFileError, match="not UTF-8"):
        cases.load(str(path))
