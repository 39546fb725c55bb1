import math
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import matplotlib.image
import pytest

from zdtrain.cli import main
from zdtrain.records import Run, StepRecord
from zdtrain.records.folder import create_run_folder
from zdtrain.records.writer import RunWriter
from zdtrain.report.series import build_charts, chart_title, thin_out
from zdtrain.report.svg import round_ticks, tick_labels

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def make_run(root, name, *, lr, scale=1.0, failed=False):
    folder = create_run_folder(root, name)
    writer = RunWriter(folder)
    writer.document("hparams.json", {"model": {"lr": lr, "width": 8}, "optimizers": [{"lr": lr, "eps": 0}]})
    for step in range(600):
        values = {"train_loss": scale / (1 + step / 50), "lr-SGD": lr, "grad_norm": 1.0 + step % 3}
        if step == 300:
            values["train_loss"] = math.nan
        if step % 100 == 99:
            values["val_loss"] = scale / (1 + step / 60)
        writer.add(StepRecord(step=step, epoch=step // 100, batch_idx=step % 100, values=values, wall_time=step / 100))
    if failed:
        writer.event("exception", type="RuntimeError", message="<b>boom</b>", traceback="…")
    writer.summarize(host_reads=3)
    writer.close("failed" if failed else "finished")
    return folder


@pytest.fixture
def runs(tmp_path):
    return [make_run(tmp_path, "first", lr=0.1), make_run(tmp_path, "second", lr=0.2, scale=2.0, failed=True)]


class Page(HTMLParser):
    """Counts elements and collects what a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.classes, self.fetched, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.classes += (attributes.get("class") or "").split()
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data") and tag != "a"]


def test_page_of_one_run_holds_its_curves_events_and_facts(runs, capsys):
    assert main(["report", str(runs[1])]) == 0
    path = runs[1] / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    page = Page(text)
    assert page.fetched == []
    assert "http" not in text
    assert page.classes.count("chart") == 4  # loss, learning rate, gradient norm, speed
    assert {"curve", "band", "mean", "marker"} <= set(page.classes)
    assert page.classes.count("key") == 2  # train_loss and val_loss differ in dashes
    assert "loss: train_loss, val_loss" in re.sub(r'<svg class="key".*?</svg>', "", text)
    for fact in ("learning rate", "gradient norm", "steps per second", "host_reads"):
        assert fact in text
    assert "&lt;b&gt;boom" in text


def test_comparison_shows_both_runs_and_only_the_settings_that_differ(runs, tmp_path):
    page = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "-o", str(page)]) == 0
    text = page.read_text()
    assert {"run0", "run1"} <= set(Page(text).classes)
    differences = text.split("Configuration differences")[1].split("</section>")[0]
    assert "model.lr" in differences
    assert "optimizers[0].lr" in differences
    assert "optimizers[0].eps" not in differences
    assert "model.width" not in differences


def test_picture_is_drawn(runs, tmp_path):
    picture = tmp_path / "curves.png"
    assert main(["report", *map(str, runs), "-o", str(tmp_path / "p.html"), "--png", str(picture)]) == 0
    pixels = matplotlib.image.imread(picture)
    assert len({tuple(pixel) for pixel in pixels[::5, ::5].reshape(-1, 4).round(1).tolist()}) > 20


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_shows_the_curves_offline(runs, tmp_path):
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    assert main(["report", *map(str, runs), "-o", str(page)]) == 0
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1300,1400", "--force-color-profile=srgb"]
    subprocess.run(
        [BROWSER, *flags, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True, timeout=100
    )
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    for color in ((0x25, 0x63, 0xEB), (0xD9, 0x48, 0x0F)):  # the first two runs' curves
        drawn = (abs(pixels - color).max(axis=-1) < 8).any(axis=0)
        assert drawn.sum() > 300  # the curves of a run cross hundreds of pixel columns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "run folder nowhere/at/all does not exist"),
        (["RUN", "-o", "/nonexistent/page.html"], "cannot write /nonexistent/page.html"),
        (["RUN"] * 7, "at most 6 can be compared"),
        (["RUN", "--png", "curves.jpgg"], "--png curves.jpgg: give a file that ends in .png"),
        (["RUN", "--outptu", "page.html"], "unknown option '--outptu'; did you mean '--output'?"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(runs, capsys, arguments, message):
    assert main(["report", *(str(runs[0]) if argument == "RUN" else argument for argument in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_any_value_and_any_name_can_be_drawn(tmp_path):
    folders = []
    for names in (["$x_$^{", "<script>", "[/b]", "\udc80", "_hidden", ""], ["loss", "a\nb"]):
        folders.append(create_run_folder(tmp_path, "odd"))
        writer = RunWriter(folders[-1])
        for step in range(40):
            value = [1e308 * (-1) ** step, 5e-324 * step, math.inf, 1e300, -1e300, 0.0][step % 6]
            writer.add(StepRecord(step=step, epoch=step // 9, values=dict.fromkeys(names, value), wall_time=step / 9))
        writer.close("finished")
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    assert main(["report", *map(str, folders), "-o", str(page), "--png", str(picture)]) == 0
    assert Page(page.read_text()).tags.count("script") == Page(page.read_text()).tags.count("figure") + 1
    assert picture.stat().st_size > 10_000


def test_values_that_are_not_finite_are_marked_and_counted(tmp_path):
    folder = create_run_folder(tmp_path, "bad")
    writer = RunWriter(folder)
    for step in range(40):
        values = {"loss": math.nan if step % 4 == 3 else 1.0, "norm": math.inf}
        writer.add(StepRecord(step=step, epoch=0, batch_idx=step, values=values, wall_time=step / 9))
    writer.close("finished")
    assert main(["report", str(folder), "--png", str(tmp_path / "bad.png")]) == 0
    text = (folder / "report.html").read_text()
    assert "loss: 10 of 40 values are not finite, the first at step 3" in text
    assert "norm: 40 of 40 values are not finite, the first at step 0" in text
    assert Page(text).classes.count("chart") == 3
    assert Page(text).classes.count("missing") == 2


def test_events_stand_at_the_step_that_they_name_and_many_of_them_stay_few(tmp_path):
    folder = create_run_folder(tmp_path, "noisy")
    writer = RunWriter(folder)
    for step in range(1000):
        writer.add(StepRecord(step=step, epoch=0, batch_idx=step, values={"loss": 1.0}, wall_time=step / 9))
    writer.event("stop", step=137)
    writer.event("checkpoint", global_step=500)
    for step in range(1000):
        writer.event("warned", step=step)
    writer.close("finished")
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    assert "<title>stop at step 137</title>" in text
    assert "<title>checkpoint at step 499</title>" in text
    assert text.count("<title>warned") <= 500  # as many as there are pixels
    assert "603 more in events.jsonl" not in text
    assert "602 more in events.jsonl" in text
    assert len(text) < 150_000


def test_a_long_run_with_many_events_is_drawn_soon(tmp_path):
    steps = list(range(100_000))
    run = Run(
        folder=tmp_path,
        steps=steps,
        epochs=[0] * len(steps),
        wall_times=[float(step) for step in steps],
        metrics={"loss": [1.0] * len(steps)},
        summary={"status": "finished"},
        hparams={},
        environment={},
        epoch_statistics=[],
        events=[{"kind": "fallback", "wall_time": 100.5 * number} for number in range(900)],
        is_complete=True,
    )
    start = time.perf_counter()
    (chart, _) = build_charts([run])
    assert time.perf_counter() - start < 5  # seconds; a search through all rows for every event takes half a minute
    assert [marker.step for marker in chart.markers[:3]] == [0.0, 100.0, 201.0]


def test_labels_of_an_axis_differ():
    assert tick_labels([99.99985, 99.9999, 99.99995, 100.0]) == ["99.99985", "99.9999", "99.99995", "100"]
    assert tick_labels([0.0, 0.5, 1.0]) == ["0", "0.5", "1"]


def test_a_run_without_rows_has_a_page(tmp_path):
    folder = create_run_folder(tmp_path, "empty")
    RunWriter(folder).close("failed")
    assert main(["report", str(folder)]) == 0
    assert "failed" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("train_loss_step", "loss"),
        ("val_loss", "loss"),
        ("test/acc", "acc"),
        ("lr-AdamW", "learning rate"),
        ("grad_norm", "gradient norm"),
        ("train_", "train_"),
    ],
)
def test_metrics_of_one_kind_share_a_chart(metric, title):
    assert chart_title(metric) == title


def test_thinning_keeps_peaks_and_order():
    values = [0.0] * 5000
    values[1234], values[4321] = 9.0, -9.0
    steps, kept = thin_out(list(range(5000)), values)
    assert len(steps) <= 400
    assert steps == sorted(steps)
    assert {9.0, -9.0} <= set(kept)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 17.0), (1e-6, 2e-6), (5.0, 5.0), (0.0, 0.0)])
def test_ticks_are_few_round_and_span_the_values(low, high):
    ticks = round_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low
    assert ticks[-1] >= high
