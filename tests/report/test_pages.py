"""Reports from folders as runs leave them."""

import csv
import html.parser
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import report_runs

from vit_jax.errors import UserError
from vit_jax.report import published
from vit_jax.report.pages import draw, make, results, runs, tables
from vit_jax.report.pages.blocks import Chart, Matrix, Series, Table

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return report_runs.everything(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def read(folders):
    return runs.read(folders)


@pytest.fixture(scope="module")
def parts(read):
    return make.sections(read)


@pytest.fixture(scope="module")
def found(read):
    return results.collect(read)


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """A report of everything; returns its folder."""
    out = tmp_path_factory.mktemp("report") / "deeper" / "report"
    make.make(folders, out)
    return out


class Page(html.parser.HTMLParser):
    """Checks that every element that is opened is closed, and collects attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.words.append(data)


def cell(table: Table, column: str, *labels: str) -> str:
    (row,) = (row for row in table.rows if row[: len(labels)] == labels)
    return row[table.head.index(column)]


def blocks(parts, kind):
    return [block for part in parts for block in part.blocks if isinstance(block, kind)]


def test_table_2_has_ours_beside_the_published_column_and_the_difference(found, read):
    table = tables.table_2(found, read)
    own = "ours: L/16 (paper:L/16-i21k)"
    place = table.head.index("L/16 I21k")
    assert table.head[place + 1 : place + 3] == (own, "difference from L/16 I21k")
    assert cell(table, "L/16 I21k", "CIFAR-10") == "99.15 ± 0.03"
    assert cell(table, own, "CIFAR-10") == "99.21 ± 0.03"
    assert cell(table, "difference from L/16 I21k", "CIFAR-10") == "+0.06"
    # What was not measured is nothing, as is what the paper does not have.
    assert cell(table, own, "Pets") == "-"
    assert cell(table, "difference from L/16 I21k", "Pets") == "-"
    assert cell(table, "NoisyStudent EffL2", "Pets") == "-"
    assert cell(table, own, "VTAB19") == "68.00 ± 0.46"


def test_table_2_gives_models_that_the_paper_lacks_no_difference(found, read):
    table = tables.table_2(found, read)
    (own,) = (name for name in table.head if "B/16" in name)
    assert own.startswith("ours: B/16 (") and own.endswith("/b16_jft)")
    assert not any("difference from B/16" in name for name in table.head)
    assert cell(table, own, "ImageNet") == "84.02 ± 0.03"
    days = 223.5 / 1.833
    assert cell(table, own, "TPUv3-core-days") == f"{days:.0f}"
    # Not all of its tasks were there.
    assert not any("Ti/16" in name for name in table.head)


def test_table_5_places_ours_by_its_pretraining(found):
    table = tables.table_5(found)
    (own,) = (name for name in table.head if name.startswith("ours: B/16"))
    difference = "difference from B/16"
    assert cell(table, own, "JFT-300M", "Flowers") == "99.61 ± 0.03"
    assert cell(table, difference, "JFT-300M", "Flowers") == "+0.05"
    assert cell(table, difference, "JFT-300M", "Pets") == "\N{MINUS SIGN}0.28"
    assert cell(table, own, "ImageNet-21k", "Flowers") == "-"
    assert cell(table, "B/16", "ImageNet-21k", "Flowers") == "99.38"
    assert not any("Ti/" in name for name in table.head)


def test_table_6_has_ours_below_the_same_model_and_epochs(found):
    table = tables.table_6(found)
    place = [row[:2] for row in table.rows].index(("ViT-B/16", "7"))
    own, difference = table.rows[place + 1 : place + 3]
    assert own[0].startswith("ours: B/16 (")
    assert own[1:] == ("7", "84.02", "-", "98.93", "92.01", "95.52", "99.61", "224")
    minus = "\N{MINUS SIGN}"
    shown = (f"{minus}0.13", "-", f"{minus}0.07", "+0.14", f"{minus}0.28", "+0.05")
    assert difference == ("difference", "", *shown, f"{minus}0.5")
    assert table.kind(place + 1, 2) == "ours"
    # From another pretraining: at the end, without a difference.
    *_, large, tiny = table.rows
    assert large[:5] == ("ours: L/16 (paper:L/16-i21k)", "-", "-", "-", "99.21")
    assert tiny[0].startswith("ours: Ti/4 (")
    assert (tiny[1], tiny[5], tiny[-1]) == ("0.0512", "50.00", "0.0625")


def test_table_9_lists_tasks_and_gives_a_mean_only_of_all(read):
    table = tables.table_9(read)
    own = "ours: L/16 (paper:L/16-i21k)"
    assert cell(table, own, "natural", "Caltech101") == "50.0"
    assert cell(table, "difference from L/16 I21k", "structured", "DMLab") == "+34.1"
    assert cell(table, own, "all", "Mean") == "68.0"
    some = "ours: Ti/16 (deit:Ti/16)"
    assert cell(table, some, "structured", "DMLab") == "-"
    assert cell(table, some, "structured", "dSpr-Loc") == "78.0"
    assert cell(table, some, "all", "Mean") == "-"


def test_without_runs_that_match_ours_is_empty(tmp_path):
    folder = report_runs.training(
        tmp_path / "digits", variant="Ti/2", dataset="digits", images=1_442
    )
    read = runs.read([folder])
    for table in tables.make(results.collect(read), read):
        ours = [
            text
            for i, row in enumerate(table.rows)
            for j, text in enumerate(row)
            if j >= table.labels and table.kind(i, j)
        ]
        assert ours
        assert set(ours) == {"-"}


def test_published_numbers_are_in_the_tables_as_they_are(found, read):
    told = published.tables()
    two, five, six, nine = tables.make(found, read)
    for name, row in told["table5"]["JFT-300M"].items():
        for column, value in zip(told["table5"]["cols"], row, strict=True):
            assert float(cell(five, column, "JFT-300M", name)) == value
    for column, value in zip(two.head[1:3], told["table2"]["Pets"], strict=False):
        assert cell(two, column, "Pets") == "{:.2f} ± {:.2f}".format(*value)
    for name, epochs, *values in told["table6"]["rows"]:
        shown = next(row for row in six.rows if row[:2] == (name, str(epochs)))
        assert [float(text) for text in shown[2:]] == values
    assert [float(row[nine.head.index("H/14 JFT")]) for row in nine.rows] == (
        told["table9"]["H/14 JFT"]
    )


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("B/16", "ViT-B/16"),
        ("R50+B/16", "R50x1+ViT-B/16"),
        ("R50x1+L/32", "R50x1+ViT-L/32"),
        ("R152x2", "ResNet152x2"),
    ],
)
def test_names_of_table_6(variant, name):
    assert tables.name_in_table_6(variant) == name


@pytest.mark.parametrize(
    ("source", "variant", "pretraining"),
    [
        ("paper:B/16-i21k", "B/16", "ImageNet-21k"),
        ("augreg:S/16-i1k-224", "S/16", "ImageNet-21k"),
        ("augreg-i1k:B/16-224", "B/16", "ImageNet"),
        ("deit:Ti/16", "Ti/16", "ImageNet"),
        ("gs://vit_models/imagenet21k/ViT-B_16.npz", "", "ImageNet-21k"),
        ("weights.npz", "", ""),
    ],
)
def test_what_published_weights_were_pretrained_on(source, variant, pretraining):
    model = results.model_of(source, "")
    assert (model.variant, model.pretraining) == (variant, pretraining)


def test_a_fine_tuned_run_is_of_what_it_began_with(found):
    (result,) = (result for result in found if result.run == "tuned")
    assert result.model.pretraining == "CIFAR-10"
    assert result.model.images == 50_000
    assert (result.dataset, result.value) == ("CIFAR-100", 50.0)
    (own,) = (result for result in found if result.run == "scratch")
    assert own.dataset == "CIFAR-10 (test)"  # No transfer, so in no table.


def test_held_out_parts_and_other_evaluations_are_in_no_table(tmp_path):
    folder = report_runs.training(
        tmp_path / "run", variant="B/16", dataset="cifar10", init="paper:B/16-i21k"
    )
    about = json.loads((folder / "report.json").read_text())
    about["final"] = {"dev": about["final"]["test"], "knn": about["final"]["test"]}
    report_runs.write(folder, "report.json", about)
    found = results.collect(runs.read([folder]))
    assert {r.dataset for r in found} == {"CIFAR-10 (dev)", "CIFAR-10 (knn)"}
    assert not any("B/16 (" in name for name in tables.table_5(found).head)


def test_csv_is_what_is_plotted(parts):
    charts = blocks(parts, Chart)
    assert len({chart.name for chart in charts}) == len(charts) > 10
    for chart in charts:
        head, *rows = csv.reader(io.StringIO(draw.table(chart)))
        assert head[1:3] == [chart.x_label, chart.y_label]
        axes = draw.figure(chart).axes[0]
        drawn = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert len(drawn) == len(chart.series) > 0
        place = 0
        for line, series in zip(drawn, chart.series, strict=True):
            x, y = line.get_data()
            own = rows[place : place + len(x)]
            assert {row[0] for row in own} == {series.label}
            np.testing.assert_array_equal(x, [float(row[1]) for row in own])
            np.testing.assert_array_equal(y, [float(row[2]) for row in own])
            place += len(x)
        assert place == len(rows)


def test_a_spread_is_drawn_and_in_the_csv():
    series = Series("a", (1, 2), (3.5, 4.5), spread=(0.25, 0.5))
    chart = Chart("c", "title", "x", "y", (series, Series("_b", (1,), (2,))))
    text = draw.table(chart)
    assert text.splitlines()[:2] == ["series,x,y,standard deviation", "a,1,3.5,0.25"]
    assert text.splitlines()[-1] == "_b,1,2,"
    bars = draw.figure(chart).axes[0].collections
    np.testing.assert_array_equal(bars[0].get_segments()[1], [[2, 4.0], [2, 5.0]])


def test_curves_are_by_step_and_by_images(parts):
    charts = {chart.name: chart for chart in blocks(parts, Chart)}
    (scratch,) = (s for s in charts["loss_by_step"].series if s.label == "scratch")
    (same,) = (s for s in charts["loss_by_images"].series if s.label == "scratch")
    assert scratch.x == tuple(range(2, 41, 2))
    assert same.x == tuple(64 * step for step in scratch.x)
    assert same.y == scratch.y
    labels = [series.label for series in charts["top1_by_step"].series]
    assert "scratch: test raw" in labels
    assert "scratch: test ema" in labels
    assert not any("train" in label for label in labels)


def test_figure_5_has_ours_where_all_five_data_sets_are(parts):
    charts = {chart.name: chart for chart in blocks(parts, Chart)}
    (own,) = (s for s in charts["figure5_average"].series if "ours" in s.label)
    assert own.x == (223.5,)
    mean = (98.93 + 92.01 + 84.02 + 95.52 + 99.61) / 5
    assert own.y == pytest.approx((mean,))
    (vit,) = (
        s for s in charts["figure5_imagenet"].series if s.label == "ViT, published"
    )
    assert vit.x == (55, 196, 224, 783, 1567, 4262)
    assert vit.y[-1] == 88.08


def test_a_study_says_who_leads_and_leaves_out_what_is_missing(parts):
    (section,) = (part for part in parts if part.title == "Scaling study")
    texts = [block.text for block in section.blocks if hasattr(block, "text")]
    (said,) = (text for text in texts if text.startswith("Fine-tuned"))
    assert said == (
        "Fine-tuned: the best is ResNet-32 at 3,000 images (48.00 %), ResNet-32 at "
        "12,000 images (53.56 %). The same family leads at every size: no crossover."
    )
    (said,) = (text for text in texts if text.startswith("Upstream"))
    assert "R+ViT-96 at 48,000 images (73.00 %). The family that leads changes" in said
    charts = {chart.name: chart for chart in section.blocks if isinstance(chart, Chart)}
    assert {len(s.x) for s in charts["study_finetuned_by_images"].series} == {2}
    compute = charts["study_5shot_by_compute"]
    (line,) = (s for s in compute.series if s.label == "ViT, 3,000 images")
    assert line.x == (1e-4, 2.5e-4, 6e-4)
    assert line.y == pytest.approx((30.0, 28.0, 25.0))


def test_the_page_is_whole_and_needs_nothing_else(written):
    text = (written / "index.html").read_text()
    page = Page(text)
    assert "script" not in page.seen
    assert page.seen.count("svg") == len(list(written.glob("plots/*.svg")))
    links = [v for k, v in page.attributes if k in ("href", "src", "data", "action")]
    assert links
    own = "#", "data:text/csv;base64,", "data:image/png;base64,"
    assert all(link.startswith(own) for link in links)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    ids = [value for key, value in page.attributes if key == "id"]
    # matplotlib uses some names twice within a picture, never across two.
    for name in (path.stem for path in written.glob("plots/*.svg")):
        assert any(value.startswith(f"{name}-") for value in ids)
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    # Names of others are text, whatever they look like.
    assert "<very>" not in text
    assert "color-scheme" in text


def test_every_plot_is_there_as_png_svg_and_csv_and_in_both_pages(written):
    stems = {path.stem for path in (written / "plots").iterdir()}
    markdown = (written / "report.md").read_text()
    for stem in stems:
        for suffix in ("png", "svg", "csv"):
            assert (written / "plots" / f"{stem}.{suffix}").stat().st_size > 50
        assert f"](plots/{stem}.png)" in markdown
    assert "| ImageNet | 88.55 ± 0.04 |" in markdown
    assert "ours: L/16 (paper:L/16-i21k)" in markdown
    assert not list(written.rglob("*.new"))


def test_the_same_runs_give_the_same_files(folders, tmp_path):
    for name in "ab":
        make.make(folders[-2:-1], tmp_path / name)
    paths = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(paths) > 8
    for path in paths:
        same = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert same.read_bytes() == path.read_bytes()


def test_a_confusion_matrix_is_drawn_from_what_an_evaluation_left(parts):
    (matrix,) = blocks(parts, Matrix)
    assert matrix.classes == report_runs.CLASSES
    assert matrix.counts == ((51, 3, 0), (4, 40, 1), (0, 0, 0))
    assert draw.table(matrix).splitlines()[2] == "dog,4,40,1"
    shown = draw.figure(matrix).axes[0].images[0].get_array()
    np.testing.assert_allclose(shown[0], [100 * 51 / 54, 100 * 3 / 54, 0])
    assert shown.mask[2].all()  # A class without an example.
    (table,) = (t for t in blocks(parts, Table) if "by class" in t.title)
    assert table.rows == (("dog", "45", "88.89"), ("cat", "54", "94.44"))


def test_a_sweep_is_told_with_what_was_chosen_and_what_diverged(parts):
    table = next(t for t in blocks(parts, Table) if t.title.endswith("on cifar10"))
    rows = {row[0]: row[2:] for row in table.rows}
    assert rows["rate 0.01, chosen"] == ("74.00", "12.5")
    assert rows["rate 1e+09"] == ("diverged", "-")
    assert rows["seed 2"] == ("99.03", "31")
    assert table.note == "Mean 98.93 %, standard deviation 0.03."


def test_tasks_that_are_absent_are_listed_with_the_remedy(parts):
    (table,) = (t for t in blocks(parts, Table) if "absent" in t.title)
    assert table.rows == (("DMLab", "python -m vit_jax.prepare --dataset=dmlab"),)


def test_a_run_that_goes_on_is_drawn_without_its_images(tmp_path):
    folder = report_runs.training(tmp_path / "run", variant="B/16", dataset="x")
    (folder / "report.json").unlink()
    parts = make.sections(runs.read([folder]))
    names = {chart.name for chart in blocks(parts, Chart)}
    assert names == {"loss_by_step", "top1_by_step"}
    assert "Compute" in parts[-1].blocks[0].text  # What is missing is said.


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            None,
            None,
            r"run holds none of report.json, .*: give the workdir of a training",
        ),
        (
            "study.json",
            '{"kind": "sca',
            r"study.json is not JSON \(.*\): it is damaged",
        ),
        ("study.json", "[1]", r"study.json lacks kind, points: give a folder that"),
        (
            "vtab.json",
            '{"kind": "transfer", "model": "a", "tasks": {}}',
            "vtab.json is of the kind 'transfer', not 'vtab'",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, file, text, message):
    folder = tmp_path / "run"
    folder.mkdir()
    if file:
        (folder / file).write_text(text)
    with pytest.raises(UserError, match=message):
        make.make([folder], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"absent is no folder with none of|absent is no"
    ):
        runs.read([tmp_path / "absent"])


def test_a_report_that_cannot_be_written_is_one_line(folders, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out=.*file cannot be written \("):
        make.make(folders[-1:], tmp_path / "file")


def test_names_are_as_short_as_they_can_be(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    for path in paths:
        report_runs.study(path)
    assert [run.name for run in runs.read(paths)] == ["a/run", "b/run", "other"]
    assert len(runs.read([paths[0], paths[0]])) == 1


def test_without_matplotlib_the_remedy_is_told(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'vit_jax\[plots\]'"):
        make.make(folders[-1:], tmp_path / "report")


def test_the_verb_writes_a_report_and_refuses_other_folders(folders, tmp_path):
    def report(*words):
        command = [sys.executable, "-m", "vit_jax.report", *map(str, words)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    done = report(folders[-2], f"--out={tmp_path / 'report'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(
        "report/index.html and report.md, with 4 plots in plots/\n"
    )
    failed = report(tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.count("\n") == 1
