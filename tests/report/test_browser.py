"""The report in a real browser: from disk, offline, by mouse and by keyboard; what records say stays text."""

import shutil

import pytest

from analysis.report import words
from tests.report.conftest import CASE, HOSTILE

playwright = pytest.importorskip("playwright.sync_api", reason="the report's browser tests need playwright")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")

ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--force-device-scale-factor=1"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=list(ARGUMENTS))
        yield started
        started.close()


class Opened:
    """A page, with what it said on its console and asked of the network."""

    def __init__(self, browser, report, **options):
        self.time_us = {(r["impl"], r["case"]): r["time_us"] for r in report.rows("results") if r["replica"] == 0}
        context = browser.new_context(viewport={"width": 1400, "height": 1000}, **options)
        context.set_offline(True)
        context.set_default_timeout(20_000)
        self.page = context.new_page()
        self.troubles, self.requests = [], []
        self.page.on("console", lambda said: self.troubles.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))
        self.page.goto(report.path.as_uri())
        self.page.locator("html[data-ready]").wait_for()

    def figure(self, caption, section="#rooflines"):
        """The drawn figure of this caption."""
        figure = self.page.locator(f"{section} figure").filter(has=self.page.get_by_text(caption, exact=True))
        figure.scroll_into_view_if_needed()
        figure.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
        return figure

    def point(self, figure, impl, case):
        """Where on the screen a record's point lies."""
        return figure.evaluate(
            """(figure, [impl, name]) => {
                const { points, plot } = figure.figure;
                const at = points.find(({ row, curve }) => plot.data[curve].text[plot.data[curve].rows.indexOf(row)]
                    .startsWith(`<b>${impl}</b><br>${name}<br>`));
                const frame = plot._fullLayout, box = plot.getBoundingClientRect();
                const on = (axis, value) => axis._offset + axis.d2p(value);
                return [box.x + on(frame.xaxis, at.x), box.y + on(frame.yaxis, at.y)];
            }""",
            [impl, case],
        )

    def hovered(self, figure):
        """What the hover label says, line by line."""
        figure.locator(".hoverlayer .hovertext").first.wait_for()
        return figure.locator(".hoverlayer .hovertext text").evaluate_all(
            "texts => texts.flatMap(t => t.querySelectorAll('tspan.line').length "
            "? [...t.querySelectorAll('tspan.line')].map(l => l.textContent) : [t.textContent])"
        )


@pytest.fixture
def opened(browser, full, write):
    one = Opened(browser, write(full))
    yield one
    assert one.troubles == []
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    one.page.context.close()


def shown(opened):
    """Implementations in the table, by case."""
    return opened.page.locator("#table").evaluate(
        "table => Object.fromEntries([...table.tBodies].map(body => [body.querySelector('code').textContent, "
        "[...body.querySelectorAll('tr[data-row] th')].map(th => th.textContent)]))"
    )


def test_everything_is_drawn_without_errors_or_requests(opened):
    page = opened.page
    for caption in ("f32",):
        assert opened.figure(caption).locator(".scatterlayer .point").count() > 8
    assert opened.figure("GEMM", "#series").locator(".scatterlayer .point").count() >= 12
    assert opened.figure("Bandwidth over working set", "#machine").locator(".scatterlayer .point").count() == 3
    assert len(shown(opened)) == 12
    assert opened.requests == [page.url]


def test_filters_choose_the_same_for_table_and_plots(opened):
    page, results = opened.page, opened.page.locator("#shown")
    assert results.inner_text() == "26 of 26 results, 12 of 12 cases"
    roofline = opened.figure("f32")
    before = roofline.locator(".scatterlayer .point").count()
    page.locator("#filters [name=stack]").select_option("xla")
    playwright.expect(results).to_have_text("5 of 26 results, 5 of 12 cases")
    assert {impl for impls in shown(opened).values() for impl in impls} == {"xla.jit", "xla.plain"}
    playwright.expect(roofline.locator("p.said")).to_contain_text("5 points.")
    assert roofline.locator(".scatterlayer .point").count() < before

    page.locator("#filters [name=verdict]").select_option("faster")
    playwright.expect(results).to_have_text("1 of 26 results, 1 of 12 cases")
    assert shown(opened) == {CASE: ["xla.jit"]}

    page.get_by_role("button", name="All", exact=True).click()
    playwright.expect(results).to_have_text("26 of 26 results, 12 of 12 cases")
    page.get_by_label("case or implementation").fill("512 tvm")
    playwright.expect(results).to_have_text("1 of 26 results, 1 of 12 cases")
    assert shown(opened) == {"gemm:512x512x512:f32": ["tvm.a"]}
    page.get_by_label("case or implementation").fill("no such thing")
    playwright.expect(page.locator("#page")).to_have_text("Nothing matches.")
    page.get_by_label("case or implementation").fill("")
    page.locator("#filters [name=answer]").select_option("leave")
    playwright.expect(results).to_have_text("4 of 26 results, 1 of 12 cases")
    page.locator("#filters [name=answer]").select_option("")
    page.locator("#filters [name=workload]").select_option("attention")
    playwright.expect(results).to_have_text("3 of 26 results, 1 of 12 cases")


def test_columns_sort_within_and_across_cases(opened):
    page = opened.page
    page.get_by_role("button", name="sort by speedup").click()
    head = page.locator("#table thead th[aria-sort]")
    assert head.get_attribute("aria-sort") == "descending"
    first, *_ = shown(opened).items()
    assert first == (CASE, ["xla.jit", "blas.default", "tvm.a", "iree.cpu"]) or first[1][0] == "xla.jit"
    page.get_by_role("button", name="sort by time").click()
    assert head.get_attribute("aria-sort") == "ascending"
    times = page.locator("#table tbody.case, #table tbody").evaluate_all(
        "bodies => bodies.map(b => b.querySelector('code').textContent)"
    )
    assert times[0] == "ceiling:launch"
    page.get_by_role("button", name="sort by time").click()
    page.get_by_role("button", name="sort by time").click()
    assert head.count() == 0


@pytest.mark.parametrize(("impl", "verdict"), [("xla.jit", "faster"), ("iree.cpu", "slower")])
def test_pointing_at_a_point_of_the_roofline_shows_its_record(opened, impl, verdict):
    figure = opened.figure("f32")
    opened.page.mouse.move(*opened.point(figure, impl, CASE))
    lines = opened.hovered(figure)
    assert lines[:2] == [impl, CASE]
    assert lines[2].startswith(f"{words.duration(opened.time_us[impl, CASE] * 1e-6)} [")
    assert lines[3] == words.scaled(2 * 1024**3 / opened.time_us[impl, CASE] * 1e6, "FLOP/s")
    assert verdict in lines[4]
    assert "% of the limit (compute)" in lines[5]
    assert "compute-bound, bound by" in lines[6]
    assert "run r1" in lines[-1]
    assert ("jax 0.10.2" in lines[-2]) == (impl == "xla.jit")


def test_points_against_size_show_their_record_and_their_quantity_can_be_chosen(opened):
    figure = opened.figure("GEMM", "#series")
    opened.page.mouse.move(*opened.point(figure, "tvm.a", "gemm:256x256x256:f32"))
    assert opened.hovered(figure)[:2] == ["tvm.a", "gemm:256x256x256:f32"]
    figure.get_by_label("GEMM: quantity").select_option("speedup")
    playwright.expect(figure.locator(".ytitle")).to_have_text("speedup over the baseline")
    figure.get_by_label("GEMM: quantity").select_option("of the limit")
    playwright.expect(figure.locator(".ytitle")).to_contain_text("% of what the ceilings allow")


def test_points_can_be_stepped_through_with_the_keyboard_and_are_spoken(opened):
    figure = opened.figure("f32")
    figure.locator(".plot").focus()
    spoken = []
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
        spoken.append(figure.locator("[aria-live]").inner_text())
        playwright.expect(figure.locator(".hoverlayer .hovertext")).to_contain_text(spoken[-1].split("; ")[0])
    assert len(set(spoken)) == 3
    opened.page.keyboard.press("ArrowLeft")
    assert figure.locator("[aria-live]").inner_text() == spoken[1]


def test_a_figure_can_be_read_as_a_table(opened):
    figure = opened.figure("f32")
    figure.get_by_text("The same as a table").click()
    rows = figure.locator("details tbody tr")
    wanted = rows.filter(has_text=CASE).filter(has_text="xla.jit")
    assert wanted.count() == 1
    assert "compute-bound" in wanted.inner_text()


def test_links_lead_to_a_case(opened):
    opened.page.locator("table.leave a", has_text=CASE).click()
    playwright.expect(opened.page.locator("#shown")).to_have_text("4 of 26 results, 1 of 12 cases")
    assert list(shown(opened)) == [CASE]


def test_light_and_dark(browser, full, write):
    report = write(full)
    for scheme in ("light", "dark"):
        one = Opened(browser, report, color_scheme=scheme)
        total = ".match(/\\d+/g).reduce((a, b) => a + Number(b), 0)"
        luminance = f"getComputedStyle(document.body).backgroundColor{total}"
        text = f"getComputedStyle(document.querySelector('#rooflines .xtitle')).fill{total}"
        one.figure("f32")
        before, ink = one.page.evaluate(luminance), one.page.evaluate(text)
        assert (before > 600) == (scheme == "light")
        assert (ink < 350) == (scheme == "light")
        button = one.page.get_by_role("button", name="Dark")
        assert button.get_attribute("aria-pressed") == str(scheme == "dark").lower()
        button.click()
        assert button.get_attribute("aria-pressed") == str(scheme == "light").lower()
        assert (one.page.evaluate(luminance) > 600) == (scheme == "dark")
        one.page.wait_for_timeout(300)
        assert (one.page.evaluate(text) < 350) == (scheme == "dark")
        assert one.troubles == []
        one.page.context.close()


def test_markup_in_records_stays_text(browser, hostile, write):
    one = Opened(browser, write(hostile))
    page = one.page
    figure = one.figure("f32")
    for _ in range(6):
        figure.locator(".plot").press("ArrowRight")
    label = figure.locator(".hoverlayer .hovertext")
    playwright.expect(label).to_contain_text(f"xla.{HOSTILE[:80]}")
    figure.get_by_text("The same as a table").click()
    for select in ("stack", "verdict"):
        page.locator(f"#filters [name={select}]").select_option(index=1)
        page.locator(f"#filters [name={select}]").select_option(index=0)
    page.get_by_label("case or implementation").fill("onerror")
    page.wait_for_timeout(300)
    assert HOSTILE in "".join(page.locator("#table th").all_inner_texts())
    assert page.locator("img").count() == 0
    assert page.evaluate("window.pwned") is None
    assert page.locator("b").evaluate_all("all => all.every(b => b.parentElement.classList.contains('iv'))")
    assert one.troubles == []
    assert one.requests == [page.url]
    page.context.close()


def test_an_empty_report_and_one_without_ceilings_open_without_errors(browser, records, tmp_path, write):
    (tmp_path / "none").mkdir()
    one = Opened(browser, write(tmp_path / "none"))
    assert "There is no result" in one.page.inner_text("main")
    assert not one.page.locator("#explore").is_visible()
    assert one.troubles == []
    records.paired(CASE, {"xla.jit": 0.5}, rounds=12)
    one = Opened(browser, write(records))
    playwright.expect(one.figure("f32").locator("p.said")).to_contain_text("No rate was measured for f32.")
    assert one.troubles == []


def test_devices_are_shown_one_at_a_time(browser, full, write):
    full.run("r2", machine="node", threads=8)
    full.ceilings(run="r2")
    full.paired(CASE, {"xla.jit": 1.5}, rounds=12, run="r2")
    one = Opened(browser, write(full))
    playwright.expect(one.page.locator("#shown")).to_have_text("9 of 9 results, 8 of 8 cases")
    assert "slower" in one.page.locator("#table tbody").first.inner_text()
    one.page.locator("#filters [name=place]").select_option(index=1)
    playwright.expect(one.page.locator("#shown")).to_have_text("26 of 26 results, 12 of 12 cases")
    one.page.locator("#answer a.explore").first.click()
    playwright.expect(one.page.locator("#shown")).to_have_text("9 of 9 results, 8 of 8 cases")
    assert one.troubles == []


def test_the_page_is_accessible(browser, full, write):
    """axe-core's rules, contrast in both palettes among them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    report = write(full)
    for options in ({"color_scheme": "light"}, {"color_scheme": "dark"}):
        one = Opened(browser, report, **options)
        one.figure("f32")
        found = axe.Axe().run(one.page).response["violations"]
        assert [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found] == []
        one.page.context.close()


def test_it_fits_a_narrow_window_and_prints(browser, full, write):
    report = write(full)
    one = Opened(browser, report)
    one.page.set_viewport_size({"width": 390, "height": 800})
    one.figure("f32")
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 390
    one.page.set_viewport_size({"width": 1400, "height": 1000})
    one.page.emulate_media(media="print")
    for hidden in ("#filters", "header nav", "#theme"):
        assert not one.page.locator(hidden).is_visible()
    assert one.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    assert one.troubles == []


def test_figures_fit_the_window_and_the_paper(browser, full, write):
    one = Opened(browser, write(full))
    figure = one.figure("f32")
    widths = "figure => [figure.figure.plot._fullLayout.width, figure.figure.plot.clientWidth]"
    drawn, frame = figure.evaluate(widths)
    assert drawn == frame > 900
    on_paper = one.page.evaluate("""() => {
        const plots = [...document.querySelectorAll("#rooflines .plot")];
        const sizes = () => plots.map((plot) => [plot._fullLayout.width, plot.clientWidth]);
        const measured = new Promise((done) => addEventListener("beforeprint", () => setTimeout(() => done(sizes()))));
        dispatchEvent(new Event("beforeprint"));
        return measured;
    }""")
    assert on_paper and all(drawn == frame < 500 for drawn, frame in on_paper)
    one.page.evaluate("dispatchEvent(new Event('afterprint'))")
    one.page.set_viewport_size({"width": 700, "height": 900})
    one.page.wait_for_function("figure => figure.figure.plot._fullLayout.width < 700", arg=figure.element_handle())
    drawn, frame = figure.evaluate(widths)
    assert drawn == frame > 500
    assert one.troubles == []


def test_a_series_of_many_sizes_is_drawn_evenly_spread(browser, records, write):
    for m in range(1, 801):
        for impl in ("xla.jit", "tvm.a"):
            records.result(f"gemm:{m}x64x64:f32", impl, [10.0 + m] * 6, samples=1)
    one = Opened(browser, write(records))
    figure = one.figure("GEMM", "#series")
    said = figure.locator("p.said").inner_text()
    assert said.startswith("M (rows of A): 800 from 1 to 800. 2 implementations;")
    sizes = figure.evaluate("figure => figure.figure.plot.data[0].x")
    assert f"{len(sizes)} of the sizes are drawn" in said
    # Small sizes are far apart on a logarithmic axis, and all of them remain.
    assert 200 < len(sizes) <= 600 and sizes[:20] == list(range(1, 21)) and sizes[-1] > 790
    assert figure.locator(".xtick text").count() <= 30
    assert one.troubles == []


def test_a_large_report_is_paged_and_its_points_thinned(browser, records, write):
    records.ceilings()
    for m in range(1, 61):
        for n in (64, 128, 256, 512):
            for impl in ("xla.jit", "tvm.a", "tvm.b", "tvm.c", "iree.cpu", "iree.gpu"):
                records.result(f"gemm:{m}x{n}x{m * 7}:f32", impl, [10.0 + m + len(impl)] * 6, samples=1)
    one = Opened(browser, write(records))
    page = one.page
    assert page.locator("#table tbody").count() == 25
    assert page.locator("#page").inner_text() == "Cases 1 to 25 of 247"
    page.get_by_role("button", name="Next").click()
    assert page.locator("#page").inner_text() == "Cases 26 to 50 of 247"
    page.get_by_role("button", name="Previous").click()
    assert page.get_by_role("button", name="Previous").is_disabled()
    figure = one.figure("f32")
    drawn = figure.locator(".scatterlayer .point").count()
    assert 400 < drawn <= 1300
    assert "1,440 points." in figure.locator("p.said").inner_text()
    assert "are drawn, evenly sampled" in figure.locator("p.said").inner_text()
    assert one.troubles == []
