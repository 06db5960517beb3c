import pytest

from analysis.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (1234.5, "1,230"),
        (0.99999, "1.00"),
        (0.00012345, "0.000123"),
        (1e-5, "1.00e-05"),
        (2e7, "2.00e+07"),
    ],
)
def test_figures_keep_three_significant_digits(value, text):
    assert words.figure(value) == text


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (words.scaled(231e9, "FLOP/s"), "231 GFLOP/s"),
        (words.scaled(999.7e9, "FLOP/s"), "1.00 TFLOP/s"),
        (words.scaled(12.0, "B/s"), "12.0 B/s"),
        (words.scaled(None, "B/s"), "\N{EN DASH}"),
        (words.size(1 << 20), "1.00 MiB"),
        (words.size(512), "512 B"),
        (words.duration(63.4e-6), "63.4 µs"),
        (words.duration(1.5), "1.50 s"),
        (words.duration(3e-9), "3.00 ns"),
        (words.duration(0.0), "0 s"),
        (words.percent(0.0123), "1.2 %"),
        (words.percent(0.46), "46 %"),
        (words.percent(1.58), "158 %"),
        (words.factor(2.0824), "2.08\N{MULTIPLICATION SIGN}"),
        (words.interval(1.8906, 2.2716), "[1.89, 2.27]"),
        (words.calls(0.2), "at once"),
        (words.calls(2500.4), "2,500"),
        (words.calls(3.2e6), "3.20 million"),
        (words.count(1, "case"), "1 case"),
        (words.count(1200, "case"), "1,200 cases"),
        (words.listed(["a"]), "a"),
        (words.listed(["a", "b", "c"]), "a, b and c"),
        (words.listed("abcdef"), "a, b, c and 3 more"),
        (words.listed([]), ""),
    ],
)
def test_quantities_carry_their_units(made, text):
    assert made == text


def decided(answer, **fields):
    blank = {"workload": "gemm", "baseline": "blas.default", "choice": None, "speedup": None, "sol_fraction": None}
    return blank | {"answer": answer} | fields


def test_a_summary_counts_and_names():
    of = [
        decided("leave", choice="xla.jit", speedup=1.25, sol_fraction=0.5),
        decided("leave", choice="xla.jit", speedup=2.0, sol_fraction=0.25),
        decided("leave", choice="tvm.a", speedup=1.5),
        decided("tie"),
        decided("stay"),
        decided("stay"),
        decided("undecided"),
        decided("alone"),
    ]
    (summary,) = words.summaries(of, 0.02)
    assert summary.answers == {"leave": 3, "undecided": 1, "tie": 1, "stay": 2, "alone": 1}
    text = " ".join(summary.sentences)
    assert "Leave blas.default in 3 of 7 cases, for xla.jit (2) and tvm.a (1): 1.25" in text
    assert "to 2.00\N{MULTIPLICATION SIGN} as fast, median 1.50\N{MULTIPLICATION SIGN}." in text
    assert "Ties within 2.0 % in 1, nothing is faster in 2, 1 undecided." in text
    assert "1 case could not be compared: only the baseline was timed." in text
    assert "Where the limit is known, the choices reach 25 % to 50 %" in text


def test_a_summary_keeps_the_baseline_where_nothing_is_faster():
    (summary,) = words.summaries([decided("stay"), decided("tie")], 0.02)
    assert summary.sentences[0] == "Keep blas.default: nothing measured is faster for certain in 2 cases."


def test_every_answer_has_its_meaning():
    from analysis import decision

    assert tuple(words.ANSWERS) == decision.ANSWERS
