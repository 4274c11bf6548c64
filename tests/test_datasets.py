import json
import pathlib

import pytest
from helpers import run_command
from tfds_sets import builder_class

from configs import bit_hyperrule, jft
from vit_jax.data import catalogue, splits
from vit_jax.data.imagenet import OBJECTNET_CLASSES
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ROOT.parent / "shared" / "data" / "imagenet_classes.txt"


def listed(capsys, *words):
    """Returns what the verb prints as JSON, by name."""
    assert run_command("datasets", ["--json", *words]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["name"]: row for row in rows}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a tiny cifar10 in ArrayRecord and a dtd in another format."""
    tfds = pytest.importorskip("tensorflow_datasets")
    where, code = tmp_path_factory.mktemp("tfds"), tmp_path_factory.mktemp("code")

    features = {"label": tfds.features.ClassLabel(num_classes=7)}
    splits = {"train": lambda: [{"label": i} for i in range(5)]}

    def prepare(name, version):
        builder = builder_class(name, version, features, splits, code)
        builder(data_dir=where, file_format="array_record").download_and_prepare()

    prepare("cifar10", "3.0.2")
    prepare("dtd", "3.0.1")
    prepare("oxford_iiit_pet", "4.0.0")
    info = where / "dtd" / "3.0.1" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    return where


def test_the_table_says_what_is_prepared(prepared, capsys):
    assert run_command("datasets", ["--data_dir", prepared]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["name", "here", "images", "classes"]
    assert len(lines) == len(catalogue.ENTRIES)
    table = {line.split()[0]: line.split() for line in lines}
    assert table["cifar10"][1:4] == ["3.0.2", "50,000", "10"]
    assert table["vtab/dtd"][1:4] == ["tfrecord", "1,000", "47"]
    assert table["vtab/pets"][1:4] == ["4.0.0", "1,000", "37"]
    assert table["cifar100"][1:4] == ["no", "50,000", "100"]
    assert table["jft300m"][1:4] == ["-", "-", "-"]
    command = f"python -m vit_jax.prepare --dataset=cifar100 --data_dir={prepared}"
    assert " ".join(table["cifar100"][4:]) == command


def test_each_command_is_one_that_the_verb_for_it_takes(capsys):
    prepare = pytest.importorskip("vit_jax.prepare")
    for row in listed(capsys, "--data_dir", "/sets").values():
        _, command, words = row["how"].partition("python -m vit_jax.prepare ")
        assert bool(command) == (row["tfds"] != "")
        if command:
            found = prepare.parser().parse_args(words.split())
            assert found.data_dir == "/sets"


def test_a_named_set_comes_with_its_splits(prepared, capsys):
    words = ("cifar10", "imagenet2012_real", "--data_dir", str(prepared))
    assert run_command("datasets", words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  dev: train[98%:]" in lines
    assert "  needs --config.data.label_key=original_label" in lines
    (place,) = (line for line in lines if line.startswith("  in "))
    assert place == f"  in {prepared}/cifar10/3.0.2: train 5; 0.00 GiB"
    assert "ILSVRC2012_img_val.tar into a folder MANUAL, then: python" in lines[-3]
    assert lines[-3].endswith(f"--data_dir={prepared} --manual_dir=MANUAL")


def test_json_has_everything(prepared, capsys):
    rows = listed(capsys, "--data_dir", str(prepared))
    assert list(rows) == list(catalogue.ENTRIES)
    assert rows["cifar10"]["prepared"] == {
        "version": "3.0.2",
        "format": "array_record",
        "images": {"train": 5},
        "bytes": rows["cifar10"]["prepared"]["bytes"],
        "data_dir": f"{prepared}/cifar10/3.0.2",
    }
    assert rows["vtab/dtd"]["prepared"]["format"] == "tfrecord"
    assert rows["imagenet21k"]["splits"]["train"] == "full[51200:]"
    assert rows["cifar100"]["prepared"] is None


def test_an_unknown_name_lists_the_known():
    with pytest.raises(
        UserError, match="'imagenet' is not a data set of the paper: image"
    ):
        run_command("datasets", ["imagenet"])


@pytest.mark.parametrize("name", catalogue.ENTRIES)
def test_every_split_expression_can_be_read(name):
    sizes = dict.fromkeys(("train", "test", "validation", "full", "images"), 10**6)
    for split in catalogue.ENTRIES[name].splits.values():
        assert splits.select(split, sizes, name)


def test_the_held_out_share_is_that_of_table_4():
    tables = json.loads((ROOT / "tests" / "golden" / "paper_tables.json").read_text())
    shares = "10% Pets/Flowers, 2% CIFAR, 1% ImageNet"
    assert shares in tables["table4"]["common"]
    shares = {"imagenet2012": 99, "cifar10": 98, "cifar100": 98}
    shares |= {"oxford_iiit_pet": 90, "oxford_flowers102": 90}
    for name, percent in shares.items():
        found = catalogue.ENTRIES[name].splits
        assert found["dev train"] == f"train[:{percent}%]"
        assert found["dev"] == f"train[{percent}%:]"


def test_the_entries_agree_with_the_recipes():
    for name, (num_classes, images, _, test) in bit_hyperrule.DATASETS.items():
        entry = catalogue.ENTRIES[name]
        assert (entry.num_classes, entry.images) == (num_classes, images)
        assert entry.splits["test"] == test
    assert jft.get_config().data.name in catalogue.ENTRIES


def test_objectnet_has_113_classes_of_125_imagenet_classes():
    numbers = [n for found in OBJECTNET_CLASSES.values() for n in found]
    assert (len(OBJECTNET_CLASSES), len(numbers), len(set(numbers))) == (113, 125, 125)
    assert list(OBJECTNET_CLASSES) == sorted(OBJECTNET_CLASSES)


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("alarm_clock", {"analog clock", "digital clock"}),
        ("chair", {"barber chair", "folding chair", "rocking chair"}),
        ("hand_towel_or_rag", {"dishrag"}),
        ("tie", {"bow tie", "Windsor tie"}),
        ("winter_glove", {"mitten"}),
        ("wok", {"wok"}),
    ],
)
def test_objectnet_numbers_are_those_of_the_imagenet_classes(folder, names):
    if not NAMES.exists():
        pytest.skip(f"no {NAMES}")
    known = [line.split("\t")[1] for line in NAMES.read_text().splitlines()]
    assert {known[n] for n in OBJECTNET_CLASSES[folder]} == names
