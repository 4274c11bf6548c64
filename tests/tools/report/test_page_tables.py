"""The paper's tables with ours beside them, and what counts as ours."""

import json

import pytest
import report_runs
from report_runs import cell

from vit_jax.tools.report import paper_tables, results
from vit_jax.training import run_report


def test_table_2_has_ours_beside_the_published_column_and_the_difference(found, read):
    table = paper_tables.table_2(found, read)
    own = "measured: L/16 (paper:L/16-i21k)"
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
    table = paper_tables.table_2(found, read)
    (own,) = (name for name in table.head if "B/16" in name)
    assert own.startswith("measured: B/16 (") and own.endswith("/b16_jft)")
    assert not any("difference from B/16" in name for name in table.head)
    assert cell(table, own, "ImageNet") == "84.02 ± 0.03"
    days = 223.5 / 1.833
    assert cell(table, own, "TPUv3-core-days") == f"{days:.0f}"
    # Not all of its tasks were there.
    assert not any("Ti/16" in name for name in table.head)


def test_table_5_places_ours_by_its_pretraining(found):
    table = paper_tables.table_5(found)
    (own,) = (name for name in table.head if name.startswith("measured: B/16"))
    difference = "difference from B/16"
    assert cell(table, own, "JFT-300M", "Flowers") == "99.61 ± 0.03"
    assert cell(table, difference, "JFT-300M", "Flowers") == "+0.05"
    assert cell(table, difference, "JFT-300M", "Pets") == "\N{MINUS SIGN}0.28"
    assert cell(table, own, "ImageNet-21k", "Flowers") == "-"
    assert cell(table, "B/16", "ImageNet-21k", "Flowers") == "99.38"
    assert not any("Ti/" in name for name in table.head)


def test_table_6_has_ours_below_the_same_model_and_epochs(found):
    table = paper_tables.table_6(found)
    place = [row[:2] for row in table.rows].index(("ViT-B/16", "7"))
    own, difference = table.rows[place + 1 : place + 3]
    assert own[0].startswith("measured: B/16 (")
    assert own[1:] == ("7", "84.02", "-", "98.93", "92.01", "95.52", "99.61", "224")
    minus = "\N{MINUS SIGN}"
    shown = (f"{minus}0.13", "-", f"{minus}0.07", "+0.14", f"{minus}0.28", "+0.05")
    assert difference == ("difference", "", *shown, f"{minus}0.5")
    assert table.kind(place + 1, 2) == "measured"
    # From another pretraining: at the end, without a difference.
    *_, large, tiny = table.rows
    assert large[:5] == ("measured: L/16 (paper:L/16-i21k)", "-", "-", "-", "99.21")
    assert tiny[0].startswith("measured: Ti/4 (")
    assert (tiny[1], tiny[5], tiny[-1]) == ("0.0512", "50.00", "0.0625")


def test_table_9_lists_tasks_and_gives_a_mean_only_of_all(read):
    table = paper_tables.table_9(read)
    own = "measured: L/16 (paper:L/16-i21k)"
    assert cell(table, own, "natural", "Caltech101") == "50.0"
    difference = "difference from L/16 I21k"
    assert cell(table, difference, "structured", "DMLab") == "+34.1"
    assert cell(table, own, "all", "Mean") == "68.0"
    some = "measured: Ti/16 (deit:Ti/16)"
    assert cell(table, some, "structured", "DMLab") == "-"
    assert cell(table, some, "structured", "dSpr-Loc") == "78.0"
    assert cell(table, some, "all", "Mean") == "-"


def test_without_runs_that_match_ours_is_empty(tmp_path):
    about = {"variant": "Ti/2", "dataset": "digits", "images": 1_442}
    read = results.read_runs([report_runs.training(tmp_path / "digits", **about)])
    for table in paper_tables.paper_tables(results.collect(read), read):
        ours = {
            text
            for i, row in enumerate(table.rows)
            for j, text in enumerate(row)
            if j >= table.labels and table.kind(i, j)
        }
        assert ours == {"-"}


def test_published_numbers_are_in_the_tables_as_they_are(found, read):
    told = run_report.published_tables()
    two, five, six, nine = paper_tables.paper_tables(found, read)
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


def test_names_of_table_6():
    names = {"B/16": "ViT-B/16", "R50+B/16": "R50x1+ViT-B/16", "R152x2": "ResNet152x2"}
    names["R50x1+L/32"] = "R50x1+ViT-L/32"
    assert {name: paper_tables.name_in_table_6(name) for name in names} == names


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
    keys = {"variant": "B/16", "dataset": "cifar10", "init": "paper:B/16-i21k"}
    folder = report_runs.training(tmp_path / "run", **keys)
    about = json.loads((folder / "report.json").read_text())
    about["final"] = {"dev": about["final"]["test"], "knn": about["final"]["test"]}
    report_runs.write(folder, "report.json", about)
    found = results.collect(results.read_runs([folder]))
    assert {r.dataset for r in found} == {"CIFAR-10 (dev)", "CIFAR-10 (knn)"}
    assert not any("B/16 (" in name for name in paper_tables.table_5(found).head)


def test_only_full_fine_tuning_stands_beside_the_paper(tmp_path):
    about = {"model": "paper:B/16-i21k", "variant": "B/16"}
    same, tasks = about | {"dataset": "cifar10"}, dict.fromkeys(report_runs.TASKS, 0.5)
    folders = [
        report_runs.transfer(tmp_path / "head", mean=0.5, mode="head", **same),
        report_runs.transfer(tmp_path / "full", mean=0.75, **same),
        report_runs.transfer(tmp_path / "two", mean=0.25, mode="head_then_all", **same),
        report_runs.vtab(tmp_path / "vtab", mode="head", tasks=tasks, **about),
    ]
    read = results.read_runs(folders)
    found = results.collect(read)
    assert {result.run: result.how for result in found} == {
        "head": "transfer, head, 384x512, 3 runs",
        "full": "transfer, full, layer decay 0.75, 384x512, 3 runs",
        "two": "transfer, head then all, 384x512, 3 runs",
    }
    two, five, six, nine = paper_tables.paper_tables(found, read)
    own = "measured: B/16 (paper:B/16-i21k)"
    assert cell(two, own, "CIFAR-10") == "75.00 ± 0.03"
    assert cell(two, own, "VTAB19") == "-"
    assert cell(five, own, "ImageNet-21k", "CIFAR-10") == "75.00 ± 0.03"
    assert six.rows[-1][4] == "75.00"
    assert not any("B/16" in name for name in nine.head)


def test_evaluations_are_told_with_their_data_set_and_few_shots(tmp_path):
    evals = {
        "fewshot": {"kind": "fewshot", "dataset": "flowers", "splits": ["train", "t"]},
        "knn": {"kind": "knn", "dataset": "flowers", "splits": ["train", "test"]},
        "imagenet": {"kind": "classification", "dataset": "imagenet2012_real"},
        "labels": {"kind": "real", "dataset": "imagenet2012_real"},
        "cifar10": {"kind": "knn", "dataset": "cifar10"},
    }
    few = {"5shot": 0.5, "5shot_std": 0.25, "5shot_short": 2, "5shot_l2_1.0": 0.1}
    scores = {"fewshot": few, "knn": {"top1": 0.25}, "imagenet": {"top1": 0.75}}
    scores |= {"labels": {"top1": 0.5}, "cifar10": {"top1": 0.125}}
    told = {name: {"weights": one} for name, one in scores.items()}
    about = {"model": "deit:Ti/16", "variant": "Ti/16", "results": told, "evals": evals}
    folder = report_runs.evaluation(tmp_path / "run", **about)
    found = results.collect(results.read_runs([folder]))
    fewer = " (2 classes have fewer images)"
    assert [(r.dataset, r.value, r.spread, r.how, r.tabled) for r in found] == [
        ("flowers", 50, 25, f"evaluate, fewshot on t, 5-shot{fewer}, weights", False),
        ("flowers", 25, None, "evaluate, knn on test, weights", False),
        ("ImageNet", 75, None, "evaluate, imagenet, weights", True),
        ("ReaL", 50, None, "evaluate, labels, weights", True),
        ("CIFAR-10", 12.5, None, "evaluate, cifar10, weights", False),
    ]
