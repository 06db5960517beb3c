import functools
import http.server
import itertools
import json
import shutil
import threading

import pytest

from tests.tracking.conftest import Repository

SIZES = (256, 1024)
CULPRIT = 6
SUBJECT = "Rewrite the inner loop <b>of</b> the product"


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Ten commits with results; from the seventh on, xla.dot is 30 % slower in f32. And the site over them."""
    repository = Repository(tmp_path_factory.mktemp("history") / "repository")
    for number in range(10):
        commit = repository.commit(SUBJECT if number == CULPRIT else f"Change {number}")
        times = {("attention:b1h8s1024d64:f32:causal", "blas.sdpa"): 9000.0}
        for n, dtype in itertools.product(SIZES, ("f32", "bf16")):
            base = n**3 * 2e-5
            slow = 1.3 if number >= CULPRIT and dtype == "f32" else 1.0
            times[f"gemm:{n}x{n}x{n}:{dtype}", "blas.default"] = base
            times[f"gemm:{n}x{n}x{n}:{dtype}", "xla.dot"] = 0.9 * base * slow
            times[f"gemm:{n}x{n}x{n}:{dtype}", "iree.llvm_cpu"] = 2 * base
        repository.measure(times, commit=commit, noise=0.005)
    output = repository.run("benchmarks.tracking", "publish")
    assert "note" not in output
    return repository


def read(repository, name):
    return json.loads((repository.folder / "site" / name).read_text())


def graphs(repository):
    return {str(p.relative_to(repository.folder / "site")) for p in (repository.folder / "site" / "graphs").rglob("*")}


def test_the_planted_regression_is_found_at_its_commit_and_nothing_else_is(history):
    found = read(history, "regressions.json")["regressions"]
    culprit = history.commits[CULPRIT]
    revisions = {commit: int(r) for r, commit in read(history, "index.json")["revision_to_hash"].items()}
    assert {(name, state["impl"]) for name, _, state, *_ in found} == {
        (f"gemm.Square.{metric}[f32, n={n}]", "xla.dot") for metric in ("time", "ratio") for n in SIZES
    }
    for name, graph, state, number, last, best, jumps in found:
        ((before, after, old, new),) = jumps
        assert (before, after) == (None, revisions[culprit])
        assert new / old == pytest.approx(1.3, rel=0.02)
        assert last / best == pytest.approx(1.3, rel=0.02)
        assert state == {"machine": "box", "impl": "xla.dot"} and number is None
        assert graph in graphs(history) and name in read(history, "index.json")["benchmarks"]


def test_asv_show_and_compare_print_it(history):
    before, after = history.commits[CULPRIT - 1 : CULPRIT + 1]
    shown = history.run("asv", "show", after, "--bench", "gemm.Square.track_time")
    assert "xla.dot" in shown and "±" in shown
    compared = history.run("asv", "compare", before, after, "--only-changed")
    rows = [line for line in compared.splitlines() if line.startswith("| +")]
    assert len(rows) == 2 * len(SIZES) and all("xla.dot, f32" in row and "1.3" in row for row in rows)


def test_asv_refuses_what_has_no_meaning_here(history):
    first, last = history.commits[0], history.commits[-1]
    for command in (("run", f"{first}..{last}"), ("continuous", first, last)):
        assert "No range spec" in history.run("asv", *command, ok=(1,))
    found = history.run("asv", "find", f"{first}..{last}", "gemm.Square.track_time", ok=(1,))
    assert "Ridgemark measures the checkout as it is" in found


def test_every_series_has_a_graph_where_the_interface_looks_for_it(history):
    index = read(history, "index.json")
    assert set(index["params"]) == {"machine", "impl"}
    assert index["params"]["impl"] == ["blas.default", "blas.sdpa", "iree.llvm_cpu", "xla.dot"]
    # The interface starts with the first: a baseline, of the workload whose benchmarks it lists first.
    assert [state["impl"] for state in index["graph_param_list"]] == [
        *("blas.sdpa", "blas.default", "iree.llvm_cpu", "xla.dot"),
    ]
    assert "gemm.Square.time[f32, n=1024]" in index["benchmarks"]
    assert "attention.Prefill.time[b1h8d64:f32:causal, s=1024]" in index["benchmarks"]
    assert not any(benchmark["params"] for benchmark in index["benchmarks"].values())
    paths = graphs(history)
    assert "graphs/impl-xla.dot/machine-box/gemm.Square.time[f32, n=1024].json" in paths
    assert "graphs/impl-blas.sdpa/machine-box/attention.Prefill.time[b1h8d64_f32_causal, s=1024].json" in paths


def test_points_carry_their_interval_and_their_rounds(history):
    points = read(history, "graphs/impl-xla.dot/machine-box/gemm.Square.time[f32, n=1024].json")
    assert [revision for revision, _ in points] == sorted(revision for revision, _ in points)
    assert len(points) == len(history.commits)
    for _, point in points:
        assert point["lo"] <= point["v"] <= point["hi"] and len(point["samples"]) == 10
        assert min(point["samples"]) <= point["v"] <= max(point["samples"])
    assert points[0][1]["v"] == pytest.approx(0.9 * 1024**3 * 2e-5 * 1e-6, rel=0.02)


def test_commits_have_their_subjects(history):
    subjects = read(history, "commits.json")
    assert set(subjects) == set(history.commits) and subjects[history.commits[CULPRIT]] == SUBJECT


def test_publishing_again_keeps_the_report_and_nothing_else(history):
    site = history.folder / "site"
    (site / "report").mkdir(exist_ok=True)
    (site / "report" / "index.html").write_text("the report")
    (site / "graphs" / "stale.json").write_text("[]")
    history.run("benchmarks.tracking", "publish")
    assert (site / "report" / "index.html").read_text() == "the report"
    assert not (site / "graphs" / "stale.json").exists()


@pytest.fixture(scope="module")
def address(history):
    """The site, served on this machine."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Nothing."""

    handler = functools.partial(Handler, directory=str(history.folder / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the site's browser tests need playwright")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("Chromium is not installed here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def browse(browser, address):
    """Opens a part of the site. It may ask for nothing but what the site holds, and has nothing to complain of."""
    context = browser.new_context()
    context.set_default_timeout(30_000)
    troubles = []
    page = context.new_page()
    page.on("console", lambda said: troubles.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url}"))

    def opened(fragment):
        page.goto(f"{address}index.html{fragment}")
        return page

    yield opened
    context.close()
    assert troubles == [] and not [url for url in requests if not url.startswith((address, "data:", "blob:"))]


def test_the_overview_opens_on_times_and_links_the_report(browse):
    page = browse("")
    page.get_by_text("gemm.Square.time[f32, n=1024]").first.wait_for()
    assert page.get_by_text("gemm.Square.compile[f32, n=1024]").count() == 0
    link = page.get_by_role("link", name="Decision report")
    assert link.is_visible() and link.get_attribute("href") == "report/index.html"


def test_one_stack_across_commits_shows_the_step(browse):
    page = browse("#view=explore&bench=gemm.Square.time%5Bf32%2C%20n%3D1024%5D&f-impl=xla.dot")
    page.get_by_text("Distribution").first.wait_for()
    for milliseconds in ("19.2", "25.1"):  # before and after
        page.get_by_text(milliseconds).first.wait_for()


def test_one_gemm_across_stacks_is_in_the_comparison(browse):
    page = browse("#view=compare&envs=0,1,2,3")
    for impl in ("iree.llvm_cpu", "xla.dot"):
        page.get_by_text(f"impl={impl}").first.wait_for()


def test_the_regression_is_on_its_page(browse, history):
    page = browse("#view=regressions")
    page.get_by_text("gemm.Square.time[f32, n=1024]").first.wait_for()
    page.get_by_text(history.commits[CULPRIT][:8]).first.wait_for()


@pytest.mark.parametrize("view", ["heatmap", "grid", "inventory"])
def test_the_other_views_open(browse, view):
    page = browse(f"#view={view}")
    page.get_by_text("ridgemark").first.wait_for()
    page.wait_for_load_state("networkidle")
