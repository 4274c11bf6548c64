"""Charts and pictures of a report, and the numbers beside them."""

import csv
import io

import numpy as np
import pytest
import report_runs

from vit_jax.analysis import charts as drawing
from vit_jax.analysis.charts import Chart, Matrix, Series
from vit_jax.tools.report import pages, results, run_charts
from vit_jax.tools.report.blocks import Table

VARIANTS = ("Ti/16", "S/16", "R50x1", "L/16")


def test_csv_is_what_is_plotted(charts, parts):
    assert len(charts) == len(report_runs.blocks(parts, Chart)) >= 10
    for chart in charts.values():
        head, *rows = csv.reader(io.StringIO(drawing.to_csv(chart)))
        assert head[1:3] == [chart.x_label, chart.y_label]
        axes = drawing.draw(chart).axes[0]
        drawn = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert len(drawn) == len(chart.series) > 0
        for line, series in zip(drawn, chart.series, strict=True):
            x, y = line.get_data()
            own, rows = rows[: len(x)], rows[len(x) :]
            assert {row[0] for row in own} == {series.label}
            np.testing.assert_array_equal(x, [float(row[1]) for row in own])
            np.testing.assert_array_equal(y, [float(row[2]) for row in own])
        assert not rows


def test_a_spread_is_drawn_and_in_the_csv():
    series = Series("a", (1, 2), (3.5, 4.5), spread=(0.25, 0.5))
    chart = Chart("c", "title", "x", "y", (series, Series("_b", (1,), (2,))))
    text = drawing.to_csv(chart)
    assert text.splitlines()[:2] == ["series,x,y,standard deviation", "a,1,3.5,0.25"]
    assert text.splitlines()[-1] == "_b,1,2,"
    bars = drawing.draw(chart).axes[0].collections
    np.testing.assert_array_equal(bars[0].get_segments()[1], [[2, 4.0], [2, 5.0]])


def measured(chart):
    (series,) = (one for one in chart.series if "measured" in one.label)
    return series


def test_figures_have_ours_with_the_deviation_of_transfers(charts):
    for name in ("figure3", "figure5_imagenet"):
        assert measured(charts[name]).spread == pytest.approx((0.03,))
    average = charts["figure5_average"]
    assert measured(average).x == (223.5,)
    mean = (98.93 + 92.01 + 84.02 + 95.52 + 99.61) / 5
    assert measured(average).y == pytest.approx((mean,))
    # Of a mean over data sets nothing is known.
    assert measured(average).spread == (None,)
    assert "standard deviation" not in drawing.to_csv(average)
    series = {one.label: one for one in charts["figure5_imagenet"].series}
    assert series["ViT, published"].x == (55, 196, 224, 783, 1567, 4262)
    assert series["ViT, published"].y[-1] == 88.08


def test_variants_that_the_paper_lacks_look_different():
    models = [results.Model(f"m{v}", v, "ImageNet", 1_300_000) for v in VARIANTS]
    found = [results.Result(m, "ImageNet", 80, None, "", "run") for m in models]
    *_, chart = run_charts.paper_figures(found)
    looks = {(s.colour, s.marker) for s in chart.series if "measured" in s.label}
    assert len(looks) == len(VARIANTS)
    (same,) = (s for s in chart.series if s.label == "L/16, measured")
    (paper,) = (s for s in chart.series if s.label == "L/16, published")
    assert (same.colour, same.marker) == (paper.colour, paper.marker)


def test_pictures_of_names_that_look_alike_are_all_there(tmp_path):
    folders = [report_runs.study(tmp_path / name) for name in ("s-a", "s_a", "S_A")]
    parts = pages.sections(results.read_runs(folders))
    names = [chart.name for chart in report_runs.blocks(parts, Chart)]
    assert len({name.lower() for name in names}) == len(names)
    assert {"s_a_5_shot_by_images", "s_a_5_shot_by_images_2"} < set(names)


def test_runs_inside_a_study_and_a_transfer_have_curves(tmp_path):
    study = report_runs.study(tmp_path / "study")
    about = {"variant": "Ti/4", "dataset": "cifar10"}
    for name in ("ViT-64,3000/pretrain", "R+ViT-96,3000/pretrain"):
        report_runs.training(study / name / "run" / "seed0", **about)
    report_runs.training(study / "ViT-64,3000/finetune/run/seed0", **about)
    moved = report_runs.transfer(
        tmp_path / "moved", model="deit:Ti/16", mean=0.5, **about
    )
    report_runs.training(moved / "trials" / "rate0.01", **about)
    report_runs.training(moved / "runs" / "seed2", **about)
    parts = pages.sections(results.read_runs([study, moved]))
    (section,) = (part for part in parts if part.title == "Training curves")
    labels = {chart.name: [s.label for s in chart.series] for chart in section.blocks}
    assert labels == {
        "study_pretrain_loss": ["ViT-64,3000", "R+ViT-96,3000"],
        "study_finetune_loss": ["ViT-64,3000"],
        "moved_transfer_loss": ["rate0.01", "seed2"],
    }


def test_curves_are_by_step_and_by_images(charts):
    (scratch,) = (s for s in charts["loss_by_step"].series if s.label == "scratch")
    (same,) = (s for s in charts["loss_by_images"].series if s.label == "scratch")
    assert scratch.x == tuple(range(2, 41, 2))
    assert (same.x, same.y) == (tuple(64 * step for step in scratch.x), scratch.y)
    labels = {series.label for series in charts["top1_by_step"].series}
    assert {"scratch: test params", "scratch: test ema"} <= labels
    assert not any("train" in label for label in labels)


def test_a_confusion_matrix_is_drawn_from_what_an_evaluation_left(parts):
    (matrix,) = report_runs.blocks(parts, Matrix)
    assert matrix.classes == report_runs.CLASSES
    assert matrix.counts == ((51, 3, 0), (4, 40, 1), (0, 0, 0))
    assert drawing.to_csv(matrix).splitlines()[2] == "dog,4,40,1"
    axes = drawing.draw(matrix).axes[0]
    # The cells with examples, and none of a class without.
    assert [text.get_text() for text in axes.texts] == ["51", "3", "4", "40", "1"]
    opacity = axes.collections[0].get_facecolors()[:, 3]
    np.testing.assert_allclose(opacity[:2], [0.15 + 0.85 * n / 54 for n in (51, 3)])
    (table,) = (t for t in report_runs.blocks(parts, Table) if "by class" in t.title)
    assert table.rows == (("dog", "45", "88.89"), ("cat", "54", "94.44"))


def test_a_run_that_goes_on_is_drawn_without_its_images(tmp_path):
    folder = report_runs.training(tmp_path / "run", variant="B/16", dataset="x")
    (folder / "report.json").unlink()
    parts = pages.sections(results.read_runs([folder]))
    names = {chart.name for chart in report_runs.blocks(parts, Chart)}
    assert names == {"loss_by_step", "top1_by_step"}
    assert "Compute" in parts[-1].blocks[0].text  # What is missing is said.
