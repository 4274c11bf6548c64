import numpy as np
import pytest
from PIL import Image

from vit_jax.evaluators import metric_names, result_tables
from vit_jax.evaluators.protocol import Confusion
from vit_jax.training import run_report


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("5shot", 0.5, "50.00%"),
        ("5shot_std", 0.01, "1.00%"),
        ("5shot_l2_1024", 0.25, "25.00%"),
        ("25shot_l2_0.5_std", 0.02, "2.00%"),
        ("25shot_short", 3, "3"),
        ("top1", 1.0, "100.00%"),
        ("top1_overlap", 0.5, "50.00%"),
        ("held_out_top1", 0.5, "50.00%"),
        ("ece", 0.125, "12.50%"),
        ("balanced_accuracy", 0.5, "50.00%"),
        ("map", 0.5, "50.00%"),
        ("micro_f1@0.5", 0.5, "50.00%"),
        ("image_to_text_recall5", 0.5, "50.00%"),
        ("color_accuracy", 0.5, "50.00%"),
        ("loss", 0.5, "0.5"),
        ("l2", 0.001, "0.001"),
        ("examples", 46_837, "46,837"),
    ],
)
def test_fractions_are_percentages_and_counts_are_whole(metric, value, text):
    assert metric_names.text(metric, value) == text


def test_accuracies_of_fewer_images_than_shots_say_so_beside_the_number():
    scores = {"5shot": 0.5, "5shot_std": 0.1, "25shot": 0.75, "25shot_short": 3}
    scores |= {"25shot_l2_1": 0.7, "25shot_l2_1_std": 0.1, "100shot": 0.8}
    scores["100shot_short"] = 1
    lines = result_tables.table({"few": {"weights": scores}}, {}).splitlines()
    shown = [line.split(maxsplit=2)[1:] for line in lines]
    assert shown == [
        ["5shot", "50.00%"],
        ["5shot_std", "10.00%"],
        ["25shot", "75.00% (3 classes have fewer images)"],
        ["25shot_l2_1", "70.00% (3 classes have fewer images)"],
        ["25shot_l2_1_std", "10.00%"],
        ["100shot", "80.00% (1 class has fewer images)"],
    ]
    assert run_report.scores_line({"few": {"params": scores}}) == (
        "top-1: few/params/5shot 50.00%, few/params/25shot 75.00% (3 classes have fewer "
        "images), few/params/100shot 80.00% (1 class has fewer images)"
    )


def test_a_picture_is_replaced_as_a_whole(tmp_path, monkeypatch):
    table = Confusion(np.eye(3, dtype=int))
    names = result_tables.write(tmp_path, {"results": {}}, {"test": table})
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    path = tmp_path / "test_confusion.png"
    before = path.read_bytes()

    def broken(self, stream, kind):
        stream.write(b"half")
        raise OSError("full")

    monkeypatch.setattr(Image.Image, "save", broken)
    with pytest.raises(ValueError, match="cannot be written"):
        result_tables.write(tmp_path, {"results": {}}, {"test": table})
    assert path.read_bytes() == before


def test_a_trial_leaves_nothing_but_the_folder(tmp_path):
    result_tables.prepare(tmp_path / "deep/er")
    assert list((tmp_path / "deep/er").iterdir()) == []


def test_names_of_classes_are_escaped():
    table = Confusion(np.eye(1, dtype=int), ("a\x1b[31m\nerror: no",))
    last = result_tables.table({"test": {"weights": {}}}, {"test": table}).splitlines()
    assert len(last) == 1
    assert last[0].endswith(r"100.00% a\x1b[31m\nerror: no")
