"""Images and labels by a table: CSV, TSV, JSON Lines and Parquet."""

import csv
import itertools
import json
import os
import shutil

import image_folder
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vit_jax.data import pipeline
from vit_jax.data.config import DataConfig
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources.open import open_source
from vit_jax.errors import NoSplit, UserError

KINDS = ["csv", "tsv", "json", "jsonl", "parquet"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    image_folder.write(root)
    return root


def write(path, rows):
    kind = path.suffix[1:]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(
                file, rows[0], delimiter="\t" if kind == "tsv" else ","
            )
            table.writeheader()
            table.writerows(rows)
    return path


def rows_of(root, *, split=True, label=lambda name: name):
    return [
        {"image": str(path.relative_to(root)), "label": label(path.parent.name)}
        | ({"split": path.parent.parent.name} if split else {})
        for path in sorted(root.rglob("*.png"))
    ]


def data(place, **stated):
    stated = {"num_classes": 3, "image_size": (16, 16)} | stated
    stated |= {"train_transform": "resize", "eval_transform": "resize"}
    return DataConfig(name="table", data_dir=str(place), **stated)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_reads_what_the_folders_hold(root, kind):
    place = write(root / f"photos.{kind}", rows_of(root))
    folder = DataConfig(name="folder", data_dir=str(root), num_classes=3)
    for split in ("train", "val", "train[:50%]", "train+val"):
        ours, theirs = open_source(data(place), split), open_source(folder, split)
        assert ours.class_names == theirs.class_names == ("ant", "bee", "cat")
        assert len(ours) == len(theirs)
        for i in range(len(theirs)):
            assert ours[i] == theirs[i]
            assert ours.record_id(i) == theirs.record_id(i)
    source = open_source(data(place), "train")
    assert list(source.locate(["train/ant/0.png"])) == [
        source.paths.index("train/ant/0.png")
    ]


def test_a_table_a_split_and_a_table_without_splits(root, tmp_path):
    os.symlink(root / "train", tmp_path / "train")
    os.symlink(root / "val", tmp_path / "val")
    rows = rows_of(root)
    for split in ("train", "val"):
        write(tmp_path / f"{split}.csv", [r for r in rows if r["split"] == split])
    assert len(open_source(data(tmp_path), "val")) == 4
    whole = write(tmp_path / "train.csv", rows_of(root, split=False))
    found = open_source(data(whole, split="all[:80%]"), "all[80%:]")
    assert len(found) == 5 and found.class_names == ("ant", "bee", "cat")


def columns(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}


@pytest.mark.parametrize(
    "layout",
    [
        columns,
        lambda rows: {k: dict(enumerate(c)) for k, c in columns(rows).items()},
        None,
    ],
    ids=["lists", "pandas", "lines"],
)
def test_json_has_records_or_columns_in_every_layout(root, layout):
    rows, place = rows_of(root), root / "layout.json"
    lines = "\n".join(map(json.dumps, rows))
    place.write_text(json.dumps(layout(rows)) if layout else lines)
    expected = open_source(data(write(root / "rows.json", rows)), "train")
    found = open_source(data(place), "train")
    assert [found[i] for i in range(19)] == [expected[i] for i in range(19)]
    place.write_text('{"image": ["a.png"], "label": []}')
    with pytest.raises(UserError, match="layout.json cannot be read"):
        open_source(data(place), "train")


def test_json_in_a_folder_is_a_table_if_it_is_named_as_a_split(root, tmp_path):
    for split in ("train", "val"):
        os.symlink(root / split, tmp_path / split)
        rows = [row for row in rows_of(root) if row["split"] == split]
        write(tmp_path / f"{split}.json", rows)
    (tmp_path / "classes.json").write_text('{"ant": 0}')
    assert len(open_source(data(tmp_path), "train")) == 19
    assert len(open_source(data(tmp_path), "val")) == 4
    write(tmp_path / "val.csv", rows[:1])
    assert len(open_source(data(tmp_path), "val")) == 1


def test_numbers_are_classes_in_their_order(root, tmp_path):
    number = {"ant": 10, "bee": 9, "cat": 2}.get
    for kind in KINDS:  # Of absolute paths in columns of other names.
        rows = [
            {"file": str(root / r["image"]), "kind": r["label"], "split": r["split"]}
            for r in rows_of(root, label=number)
        ]
        place = write(tmp_path / f"numbers.{kind}", rows)
        source = open_source(data(place, image_key="file", label_key="kind"), "train")
        assert source.class_names == ("2", "9", "10")
        classes = np.bincount([source[i]["label"] for i in range(19)])
        assert classes.tolist() == [4, 6, 9]


def test_names_of_macos_are_those_of_other_systems(root):
    rows = rows_of(root, label=lambda name: "e\u0301" if name == "cat" else name)
    rows[-1]["label"] = "\u00e9"
    source = open_source(data(write(root / "macos.csv", rows)), "train+val")
    assert source.class_names == ("ant", "bee", "\u00e9")


def test_classes_that_are_equal_as_numbers_have_one_order(root):
    spelt = [f"{'0' * zeros}{n}" for n in (3, 2) for zeros in range(4)]
    rows = rows_of(root)
    rows = [row | {"label": spelt[i % 8]} for i, row in enumerate(rows)]
    source = open_source(data(write(root / "zeros.csv", rows), num_classes=8), "train")
    assert source.class_names == (
        *("0002", "002", "02", "2"),
        *("0003", "003", "03", "3"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_several_labels_an_image(root, kind):
    def label(name):
        found = {"ant": ["ant"], "bee": ["cat", "bee"], "cat": []}[name]
        return found if kind not in ("csv", "tsv") else "|".join(found)

    place = write(root / f"several.{kind}", rows_of(root, label=label))
    config = data(place, multi_label=True)
    source = open_source(config, "train")
    assert source.class_names == ("ant", "bee", "cat")
    with pipeline.eval_batches(source, config, batch_size=19) as batches:
        labels = next(batches)["label"]
    expected = {"ant": [1, 0, 0], "bee": [0, 1, 1], "cat": [0, 0, 0]}
    for path, row in zip(source.paths, labels, strict=True):
        assert row.tolist() == expected[path.split("/")[1]]
    changed = rows_of(root, label=label)
    changed[0]["label"] = changed[9]["label"]
    other = open_source(data(write(place, changed), multi_label=True), "train")
    lines = differences(fingerprint(source), other)
    assert lines == ["labels of the image files differ"]


def test_labels_need_not_exist_where_none_are_read(root):
    rows = [{"image": row["image"]} for row in rows_of(root)]
    source = open_source(
        data(write(root / "bare.csv", rows), num_classes=0, split="all"), "all"
    )
    assert len(source) == 23 and "label" not in source[0]


def test_what_is_wrong_is_named(root, tmp_path):
    rows = rows_of(root)
    good = write(root / "good.csv", rows)
    cases = [
        (data(root / "no.csv"), "train", "is neither a table nor"),
        (data(good, image_key="path"), "train", "it has image, label, split"),
        (data(good, label_key="kind"), "train", "no such column.*num_classes=0"),
        (data(good, num_classes=4), "train", "num_classes=3"),
    ]
    with pytest.raises(NoSplit, match="no split 'test'"):
        open_source(data(good), "test")
    for wrong, row in (
        (
            "names the image 'no.png', but the file .* does not",
            {"image": "no.png"},
        ),
        ("has no path in column 'image'", {"image": " "}),
        ("has class 'dog', which the training split", {"label": "dog"}),
        ("has no label in column 'label'", {"label": ""}),
    ):
        name = "".join(filter(str.isalpha, wrong[:12])) + ".csv"
        place = write(root / name, [*rows[:19], rows[19] | row | {"split": "val"}])
        cases.append((data(place), "val", f"{name} row 20 {wrong}"))
    broken = root / "broken.parquet"
    broken.write_bytes(b"PAR1 nothing")
    cases.append((data(broken), "train", "broken.parquet cannot be read"))
    for config, split, message in cases:
        with pytest.raises(UserError, match=message):
            open_source(config, split)


NOTHING = [None, float("nan"), " "]


@pytest.mark.parametrize("nothing", NOTHING, ids=repr)
def test_a_missing_path_label_or_mask_names_its_row(root, tmp_path, nothing):
    kinds = ["json"]
    if nothing != " ":  # A column of Parquet has numbers or texts.
        kinds.append("parquet")
    for kind, column in itertools.product(kinds, ("image", "label", "mask")):
        if kind == "parquet" and nothing is not None and column != "label":
            continue
        number = {"ant": 3.0, "bee": 1.0, "cat": 2.0}.get
        rows = [row | {"mask": row["image"]} for row in rows_of(root, label=number)]
        rows[4][column] = nothing
        place = write(root / f"{column}.{kind}", rows)
        keys = {"mask_key": "mask"} if column == "mask" else {}
        what = "path" if column == "image" else column
        with pytest.raises(UserError, match=f"row 5 has no {what} in .*'{column}'"):
            open_source(data(place, **keys), "train")


@pytest.mark.parametrize("nothing", NOTHING, ids=repr)
def test_missing_items_of_lists_are_refused_and_missing_splits_counted(
    root, caplog, nothing
):
    rows = rows_of(root)
    place = root / f"missing{NOTHING.index(nothing)}.json"
    lists = [row | {"label": [row["label"]]} for row in rows]
    lists[6]["label"].append(nothing)
    for several in (False, True):
        with pytest.raises(UserError, match="row 7 has .* column 'label'.*missing"):
            open_source(data(write(place, lists), multi_label=several), "train")
    for row in rows[:3]:
        row["split"] = nothing
    del rows[3]["split"]
    assert len(open_source(data(write(place, rows)), "train")) == 15
    assert f"{place}: 4 rows are empty in column 'split', such as row 1" in caplog.text
    blank = [row | {"split": nothing} for row in rows]
    assert len(open_source(data(write(place, blank), split="all"), "all")) == 23


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_rows_that_a_quote_swallows_are_refused(root, kind):
    place, between = root / f"quotes.{kind}", "\t" if kind == "tsv" else ","
    rows = rows_of(root)
    lines = [between.join(row.values()) for row in ({k: k for k in rows[0]}, *rows)]

    def opened(*marked):
        changed = dict(marked)
        text = "\n".join(changed.get(i, line) for i, line in enumerate(lines))
        place.write_text(text)
        os.utime(place, (len(text), len(text)))
        return open_source(data(place), "train")

    path = rows[3]["image"]
    start = between.join([path, '"ant', "train"])
    with pytest.raises(UserError, match=rf"quotes.{kind} cannot be read .*quote"):
        opened((4, start))
    with pytest.raises(UserError, match=rf"quotes.{kind} cannot be read .*quote"):
        opened((4, start), (9, start))
    end = between.join([rows[8]["image"], 'ant"', "train"])
    with pytest.raises(UserError, match="row 4 has .* in column 'label'.*quote"):
        opened((4, start), (9, end))
    with pytest.raises(UserError, match="row 4 has more cells than the header"):
        opened((4, between.join([path, "ant", "small", "train"])))
    assert (
        opened((4, between.join([path, '"ant"', "train", ""]))).class_names[0] == "ant"
    )


@pytest.mark.parametrize(
    ("name", "delimiter"), [("t.csv", ";"), ("t.csv", "\t"), ("t.tsv", "\t")]
)
def test_the_delimiter_is_read_from_the_header(root, name, delimiter):
    rows = rows_of(root)
    lines = [delimiter.join(row.values()) for row in ({k: k for k in rows[0]}, *rows)]
    place = root / name
    place.write_text("\n".join(lines), encoding="utf-8-sig")
    source = open_source(data(place), "train")
    assert len(source) == 19 and source.class_names == ("ant", "bee", "cat")


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_classes(root, kind):
    wanted, rows = {}, []
    marks = {"ant": (1.0, 0.0), "bee": (0, 1), "cat": (1, 1)}
    for i, row in enumerate(rows_of(root)):
        ant, bee = marks[row["label"]]
        blank = "" if kind in ("csv", "tsv") else None
        cells = {"ant": ant, "bee": bee, "sex": "m"}
        if row["label"] == "ant":  # What CheXpert has in the place of 0.
            cells["bee"] = (blank, -1.0, 0.0)[i % 3]
        rows.append({"image": row["image"], "split": row["split"]} | cells)
        wanted[row["image"]] = [0] * bool(ant) + [1] * bool(bee)
    place = write(root / f"columns.{kind}", rows)
    keys = {"label_key": "ant,bee", "num_classes": 2}
    source = open_source(data(place, multi_label=True, **keys), "train")
    assert source.class_names == ("ant", "bee")
    for path, labels in zip(source.paths, source.labels_of_paths, strict=True):
        assert labels == wanted[path]
    for key, match in (
        ("ant,bee", "the labels ant, bee: set .*multi_label=True"),
        ("ant,sex", "label_key: 'm' in column 'sex' is not 1, 0, -1"),
        ("ant,dog", "label_key='dog'.* it has image, split, ant"),
    ):
        with pytest.raises(UserError, match=match):
            open_source(data(place, **keys | {"label_key": key}), "train")
    one_hot = [row for row in rows if not (row["ant"] and row["bee"] == 1)]
    source = open_source(data(write(place, one_hot), **keys), "train")
    assert np.bincount(source.labels_of_paths).tolist() == [9, 6]


def test_names_without_folder_and_ending(root, tmp_path):
    rows = [
        {"id": p.stem, "label": "ab"[i % 2]}
        for i, p in enumerate(root.glob("train/ant/*"))
    ]
    place = write(root / "kaggle.csv", rows)
    keys = {"image_key": "id", "num_classes": 2, "split": "all"}
    with pytest.raises(
        UserError, match="does not exist: .*set .*data.image_suffix=.png"
    ):
        open_source(data(place, image_dir="train/ant", **keys), "all")
    keys["image_suffix"] = ".png"
    source = open_source(data(place, image_dir="train/ant", **keys), "all")
    assert len(source) == 9 and source[0]["image"][:4] == b"\x89PNG"
    far = write(tmp_path / "kaggle.csv", rows)
    other = open_source(data(far, image_dir=str(root / "train" / "ant"), **keys), "all")
    assert other.paths == source.paths and fingerprint(other) == fingerprint(source)


def test_paths_written_on_windows(root, tmp_path):
    rows = rows_of(root)
    usual = open_source(
        data(write(tmp_path / "usual.csv", rows), image_dir=str(root)), "train"
    )
    for row in rows:
        row["image"] = row["image"].replace("/", "\\")
    place = write(tmp_path / "windows.csv", rows)
    source = open_source(data(place, image_dir=str(root)), "train")
    assert source.paths == usual.paths and fingerprint(source) == fingerprint(usual)
    # Elsewhere a backslash may be part of a name.
    shutil.copy(root / "train/ant/0.png", tmp_path / "a\\b.png")
    place = write(tmp_path / "name.csv", [{"image": "a\\b.png", "label": "ant"}])
    keys = {"num_classes": 1, "split": "all"}
    assert open_source(data(place, **keys), "all").paths == ["a\\b.png"]


def test_files_listed_again_and_alike_classes_are_told(root, caplog):
    rows = rows_of(root)
    place = write(root / "twice.csv", [*rows, *rows[:3]])
    source = open_source(data(place), "train")
    assert len(source) == len(set(source.paths)) == 19
    assert "twice.csv: 3 rows list a file again; each file counts once" in caplog.text
    alike = [rows[0] | {"label": "Ant"}, *rows[1:]]
    open_source(data(write(root / "case.csv", alike), num_classes=4), "train")
    assert "the classes 'Ant' and 'ant' differ only in case or spaces" in caplog.text
    write(place, [*rows, rows[0] | {"image": f"./{rows[0]['image']}", "label": "cat"}])
    os.utime(place, (1, 1))
    with pytest.raises(
        UserError, match="row 24 gives train/ant/0.png the label 'cat'.*row 1 "
    ):
        open_source(data(place), "train")
    write(place, [*rows, rows[0] | {"split": "val"}])
    os.utime(place, (2, 2))
    for split in ("train", "val"):
        with pytest.raises(
            UserError, match="row 1 lists train/ant/0.png to train on.*row 24"
        ):
            open_source(data(place), split)


def test_damaged_tables_are_one_short_line(root):
    deep = root / "deep.json"
    deep.write_text("[" * 100_000)
    lines = root / "text.jsonl"
    lines.write_text('"abc"\n')
    nul = root / "nul.csv"
    nul.write_bytes(b"image,label\ntrain/a\0.png,ant\n")
    bytes_ = write(root / "b.parquet", [{"image": "a.png", "label": b"\xff" * 5_000}])
    cells = write(root / "cells.parquet", [{"image": b"\xff" * 5_000, "label": "ant"}])
    for place, message in (
        (deep, "deep.json cannot be read"),
        (lines, "text.jsonl cannot be read .*a row is not an object"),
        (
            nul,
            r"nul.csv row 1 names the image 'train/a\\x00.png', but the file .* does not",
        ),
        (cells, "in column 'image', not a path.*data.name='parquet'"),
        (bytes_, "label_key='label': .* is not the name or number of a class"),
    ):
        keys = {"num_classes": 1, "split": "all"}
        with pytest.raises(UserError, match=message) as caught:
            open_source(data(place, **keys), "all")
        assert len(str(caught.value)) < 1_000
        assert len(str(caught.value).splitlines()) == 1
