"""What a report says of a study: table, ranking beside the paper, charts and laws."""

import numpy as np
import pytest
import report_runs

from vit_jax.analysis import charts as drawing
from vit_jax.analysis.charts import Chart
from vit_jax.tools.report import results, study_blocks
from vit_jax.tools.report.blocks import Table, Text

NAMES = ("none", "learned", "relative")


def blocks(folder):
    (run,) = results.read_runs([folder])
    return study_blocks.study_blocks(run)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return blocks(report_runs.study(tmp_path_factory.mktemp("report") / "study"))


def texts(found):
    return [block.text for block in found if isinstance(block, Text)]


def charts(found):
    return {block.name: block for block in found if isinstance(block, Chart)}


def ranked(folder, ours, paper, half):
    """Returns the blocks of a study of one axis with text values."""
    points = {k: {"top-1": (x, half)} for k, x in zip(NAMES, ours, strict=True)}
    published = dict(zip(NAMES, paper, strict=True))
    about = {"top-1": "test/top1"}, published, "table 0"
    return blocks(report_runs.small_study(folder / "study", "kind", points, *about))


def test_the_table_has_what_was_chosen_and_the_paper_beside_ours(told):
    table = next(block for block in told if isinstance(block, Table))
    assert table.head == (
        *("images", "model", "exaFLOPs", "learning_rate"),
        *("5-shot in %", "fine-tuned in %", "loss", "rank", "paper", "rank in paper"),
    )
    rows = {row[:2]: row[2:] for row in table.rows}
    assert rows["ViT-64", "3000"] == (
        *("0.0001", "0.002", "30.00 ± 2.00", "40.00 ± 1.00", "2.0001 ± 0.1000"),
        *("18", "50.00", "2"),
    )
    assert rows["ViT-128", "24000"][3:5] == ("-", "1.5780 ± 0.1000")
    assert rows["R+ViT-96", "48000"][5:] == ("1", "-", "-")
    assert "means over 2 seeds ± half of the 95 % interval" in table.note
    assert table.note.endswith("Paper: table 0.")


def test_pairs_are_compared_with_the_papers_order(tmp_path):
    (text, *_) = texts(ranked(tmp_path / "a", (0.1, 0.5, 0.6), (0.1, 0.6, 0.5), 0.2))
    assert text == (
        "Pairs of points with an order in the paper: 3; in the same order here: 2. Pairs that "
        "differ here by more than the root of the sum of their squared intervals: 2; "
        "those contrary to the paper: none."
    )
    (text, *_) = texts(ranked(tmp_path / "b", (0.1, 0.5, 0.6), (0.1, 0.6, 0.5), 0.01))
    assert text.endswith("contrary to the paper: relative over learned.")
    assert not texts(ranked(tmp_path / "c", (0.1, 0.5, 0.6), (None, None, 0.5), 0.01))


def test_an_axis_of_words_has_them_at_its_ticks(tmp_path):
    (chart,) = charts(ranked(tmp_path, (0.1, 0.5, 0.6), (None,) * 3, 0.01)).values()
    assert (chart.ticks, chart.tick_labels) == ((0, 1, 2), NAMES)
    (series,) = chart.series
    assert not series.line and series.y == (10.0, 50.0, 60.0)
    axes = drawing.draw(chart).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(NAMES)
    assert "half of the 95 % interval" in drawing.to_csv(chart).splitlines()[0]


def test_a_study_says_who_leads_and_leaves_out_what_is_missing(told):
    (said,) = (text for text in texts(told) if text.startswith("fine-tuned: "))
    assert said == (
        "fine-tuned: the highest is ResNet-32 at images 3,000 (48.00), ResNet-32 at images "
        "12,000 (53.56), ViT-128 at images 48,000 (68.33). The lead changes."
    )
    drawn = charts(told)
    lines = drawn["study_fine_tuned_by_images"].series
    assert {len(line.x) for line in lines} == {3}
    assert {line.label: line.colour for line in lines}["R+ViT-96"] == 1
    compute = drawn["study_5_shot_by_exaflops"]
    (line,) = (s for s in compute.series if s.label == "ViT, images 3,000")
    assert line.x == (1e-4, 2.5e-4, 6e-4)
    assert line.y == pytest.approx((30.0, 28.0, 25.0))
    assert line.spread == (2.0, 2.0, 2.0)


def test_scores_of_one_seed_have_no_intervals_and_missing_points_are_counted(tmp_path):
    sizes = (128, 1934.14, 71), (224, 69.7561, 9), (384, 3.8158, 4)
    points = {
        side: {"images/s": (speed, None), "batch": (most, None)}
        for side, speed, most in sizes
    }
    paths = {"images/s": "cost/images_per_second", "batch": "cost/largest_batch"}
    folder = report_runs.small_study(tmp_path / "study", "pixels", points, paths)
    found = blocks(folder)
    assert not any("points are done" in text for text in texts(found))
    (table,) = (block for block in found if isinstance(block, Table))
    cells = [row[-2:] for row in table.rows]
    assert cells == [("1934.1", "71"), ("69.8", "9"), ("3.8", "4")]
    assert table.note == "Scores are of one seed."
    assert charts(found)["study_images_s_by_pixels"].note == ""
    report_runs.change_study(folder, lambda content: content["points"].pop())
    assert "2 of the 3 points are done." in texts(blocks(folder))
    report_runs.change_study(folder, lambda content: content.update(points=[]))
    assert texts(blocks(folder)) == ["study has no finished point yet."]


def test_a_law_finds_the_numbers_that_made_the_points():
    x = np.array([3.0, 7.0, 20.0, 90.0, 400.0])
    y = 1.5 + 0.8 * (x / 3) ** -0.4
    (a, b, c), rest = study_blocks.fit_law(x.tolist(), y.tolist())
    np.testing.assert_allclose([a, b, c], [1.5, 0.8, 0.4], rtol=1e-3)
    assert np.abs(rest).max() < 1e-4
    noise = np.array([0.1, -0.1, 0.0, 0.05, -0.05])
    fit, rest = study_blocks.fit_law(x.tolist(), (y + noise).tolist())
    assert 0.02 < np.sqrt(np.mean(rest**2)) < 0.1
    assert (fit >= 0).all()


def test_the_law_of_a_study_is_told_with_its_residuals(told):
    (text,) = (text for text in texts(told) if "least squares" in text)
    assert text.startswith("loss = a + b images^-c, fitted by least squares. ViT-64: ")
    assert text.count("root mean square") == 5


def test_a_point_that_diverged_is_told_and_not_drawn(tmp_path):
    def diverge(content):
        first = content["points"][0]
        first |= {"exaflops": None, "scores": {}}
        first["stages"] = {"pretrain": {"trials": [], "chosen": None, "runs": []}}

    folder = report_runs.study(tmp_path / "study")
    report_runs.change_study(folder, diverge)
    found = blocks(folder)
    assert "Diverged, not part of any mean: ViT-64,3000, pretrain." in texts(found)
    for chart in charts(found).values():
        assert not any(value is None for s in chart.series for value in (*s.x, *s.y))


def test_the_course_of_an_evaluation_is_drawn_from_the_runs(tmp_path):
    folder = report_runs.study(tmp_path / "study")
    figure = {"x": "step", "y": "test/top1", "lines": ["model", "images"]}
    figure["colours"] = "model"
    report_runs.change_study(
        folder, lambda content: content["config"].update(figures=[figure])
    )
    report_runs.training(
        folder / "ViT-96,12000" / "pretrain" / "run" / "seed0",
        variant="Ti/4",
        dataset="cifar10",
    )
    (chart,) = charts(blocks(folder)).values()
    (series,) = chart.series
    assert series.label == "ViT-96, images 12,000"
    assert len(series.x) > 1 and max(series.y) > 1
