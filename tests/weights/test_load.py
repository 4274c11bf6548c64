import json
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from helpers import tiny_config
from orbax.checkpoint import v1 as ocp
from trees import (
    SIZE,
    assert_same,
    checkpoint,
    counted_by_kind,
    encoder,
    random_flat,
    save,
)

from vit_jax import (
    convert,
    explore,
    models,
    predict,
    transfer,
    visualize,
    weights,
)
from vit_jax.__main__ import load
from vit_jax.command_line import cli
from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.models import flexivit
from vit_jax.training import config as configuration
from vit_jax.weights import Preprocess, checkpoint_folders, surgery, workdir
from vit_jax.weights.formats import native
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.hub import download
from vit_jax.weights.initial import load_initial

# The package has functions of these names.
evaluate, finetune = map(load, ("evaluate", "finetune"))

STEM = {"stage_depths": (1, 1), "stem_width": 32}


def complete(size=SIZE, **sections):
    raw = {
        "name": "tiny",
        "total_steps": 6,
        "batch_size": 8,
        "data": {"name": "synthetic", "num_classes": 7, "image_size": (12, 12)},
        "model": {"variant": "Ti/4", **size},
        "optim": {"learning_rate": 0.01},
    }
    for name, value in sections.items():
        raw[name] = raw.get(name, {}) | value if isinstance(value, dict) else value
    return configuration.complete(raw)


def build(config):
    return models.create(
        **fields.to_dict(config.model),
        num_classes=config.data.num_classes,
        image_size=config.data.image_size,
        channels=config.data.channels,
    )


def begin(config, **more):
    model = build(config)
    initial = unflatten_dict(random_flat(model, seed=5), sep="/")
    params, others, lines = load_initial(
        config.init,
        config.data,
        model,
        lambda: initial,
        head_bias_init=config.model.head_bias_init,
        task=config.task.name,
        **more,
    )
    assert others == {}  # Classification has nothing beside the network.
    return params, lines


@pytest.fixture
def run(tmp_path):
    """Makes the workdir of a run, by its config; returns it and its parameters."""

    def make(config, step=6):
        raw = random_flat(build(config))
        average = {name: value + 1 for name, value in raw.items()}
        trees = {"params": raw, "average": average}
        ocp.save(
            tmp_path / "run" / "checkpoints" / str(step),
            {name: unflatten_dict(flat, sep="/") for name, flat in trees.items()}
            | {"step": np.array(step, np.int32)},
            custom_metadata={
                "config": fields.to_json(config),
                "class_names": list("abcdefg"),
                "task": {},
                "network": {"path": "params", "options": build(config).options},
            },
        )
        return tmp_path / "run", trees

    return make


def test_images_of_another_size_see_the_same_network_after_loading(tmp_path):
    source, model = encoder(image_size=(12, 12)), encoder(image_size=(20, 8))
    flat = random_flat(source)
    path = save(tmp_path / "a.npz", flat, counted_by_kind)
    loaded = weights.load(path, model)
    expected, _ = surgery.fit(unflatten_dict(flat, sep="/"), model, source)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
    assert loaded.table() == [
        f"google checkpoint of Ti/4: {path}",
        "                                                    checkpoint  model",
        f"{len(flat) - 1} parameters: loaded",
        "position embeddings: resized from (3, 3) to (5, 2)  1x10x12     1x11x12",
    ]


def test_patches_of_another_size_are_loaded_and_told(tmp_path):
    flat = random_flat(encoder("Ti/4", image_size=(12, 12)))
    path = save(tmp_path / "a.npz", flat, counted_by_kind)
    model = encoder("Ti/8", image_size=(16, 40))
    loaded = weights.load(path, model)
    assert [line.split("  ")[0] for line in loaded.table()[3:]] == [
        "position embeddings: resized from (3, 3) to (2, 5)",
        "embedding/kernel: patches resized from 4 to 8 (FlexiViT, bilinear_plain)",
    ]
    np.testing.assert_array_equal(
        loaded.params["embedding"]["kernel"],
        flexivit.resize_patch_kernel(flat["embedding/kernel"], 8),
    )


def test_what_the_same_parameters_compute_otherwise_is_told(tmp_path):
    path = save(tmp_path / "a.npz", random_flat(encoder()))
    model = encoder(activation="gelu", layer_norm_eps=1e-12, posemb_placement="shared")
    rows = weights.load(path, model).rows[1:]
    assert [f"{row.what}: {row.action}" for row in rows] == [
        "differs: posemb_placement stem in the checkpoint, shared in the model",
        "differs: activation gelu_tanh in the checkpoint, gelu in the model",
        "differs: layer_norm_eps 1e-06 in the checkpoint, 1e-12 in the model",
    ]
    resnet = {"num_classes": 3, "stage_depths": (1,), "stem_width": 32}
    path = save(tmp_path / "b.npz", random_flat(models.create("R50x1", **resnet)))
    rows = weights.load(path, models.create("R50x1", zero_pool=True, **resnet)).rows
    assert [row.action for row in rows if row.what == "differs"] == [
        "zero_pool False in the checkpoint, True in the model"
    ]


def test_missing_parameters_come_from_the_initialisation_given(tmp_path):
    path = save(tmp_path / "a.npz", random_flat(encoder(depth=1)))
    model = encoder(depth=1, distillation=True)
    init = unflatten_dict(random_flat(model, seed=5), sep="/")
    loaded = weights.load(path, model, allow_mismatch=["dist"], init=lambda: init)
    for name in ("dist", "head_dist"):
        jax.tree.map(np.testing.assert_array_equal, loaded.params[name], init[name])
    drawn = weights.load(path, model, allow_mismatch=["dist"])
    assert jax.tree.map(np.shape, drawn.params) == jax.tree.map(np.shape, init)


@pytest.mark.parametrize("average", [True, False])
def test_workdir_is_opened_like_any_other_checkpoint(run, average):
    config = complete(data={"mean": (0.4,), "std": (0.2, 0.3, 0.4)})
    folder, trees = run(config)
    found = weights.open_pretrained(folder, use_ema=average)
    assert_same(found.params, trees["average" if average else "params"])
    assert found.format == "workdir"
    assert found.class_names == tuple("abcdefg")
    assert models.create(**found.options).options == build(config).options
    assert found.preprocess == Preprocess(
        (12, 12), (0.4, 0.4, 0.4), (0.2, 0.3, 0.4), squash=True, exif=False
    )
    averaged = "averaged " if average else ""
    assert found.notes == (f"{averaged}parameters of step 6",)


COMMANDS = (predict, evaluate, explore, visualize, convert, transfer)


def parsed(command, folder, flag):
    """Parses a command's flags: a model, one that is tested, and all that it needs."""
    words = [f"--model={folder}", flag]
    words += ["--config=x"] * (command is evaluate)
    words += ["x"] * (command in (predict, finetune))
    words += ["--to=timm"] * (command is convert)
    words += ["--out=x"] * (command in (convert, visualize))
    words += ["--dataset=x"] * (command is transfer)
    return cli.parse(command.parser(), words)


def test_a_step_chooses_a_checkpoint_of_a_run(run, monkeypatch):
    folder, trees = run(complete(), step=3)
    run(complete())
    newest, third = weights.open_pretrained(folder), folder / "checkpoints" / "3"
    assert newest.notes == ("averaged parameters of step 6",)
    for place in (third, f"{third}/", checkpoint_folders.at_step(folder, 3)):
        found = weights.open_pretrained(place)
        assert found.notes == ("averaged parameters of step 3",)
        assert_same(found.params, trees["average"])
    monkeypatch.chdir(folder)
    assert "step 3" in weights.open_pretrained("checkpoints/3").notes[0]
    with pytest.raises(UserError, match="step=4.*there are 3, 6"):
        weights.open_pretrained(folder / "checkpoints" / "4")
    for command in (*COMMANDS, finetune):
        assert parsed(command, folder, "--step=3").model == str(third)
        with pytest.raises(UserError, match="step=4"):
            parsed(command, folder, "--step=4")
    with pytest.raises(UserError, match="step=4.*deit:Ti/16 has no finished"):
        checkpoint_folders.at_step("deit:Ti/16", 4)


def test_what_weights_state_of_their_network_is_not_stated_otherwise(run):
    folder, _ = run(complete())
    opened = weights.open_pretrained(folder, num_heads=3)
    assert models.create(**opened.options).options["num_heads"] == 3
    for stated in ({"num_heads": 4}, {"architecture": "test_vit"}):
        ((name, value),) = stated.items()
        with pytest.raises(UserError, match=f"^{name}={value!r}: .*run"):
            weights.open_pretrained(folder, **stated)
        for command in COMMANDS:
            assert getattr(parsed(command, folder, f"--{name}={value}"), name) == value


CROP = "{} | central_crop".format
BICUBIC = {"interpolation": "bicubic"}


@pytest.mark.parametrize(
    ("ops", "size", "expected"),
    [
        ("resize", (8, 12), {"squash": True}),
        ("resize((8, 12))", (8, 12), {"squash": True}),
        (CROP("resize_small(16)"), (12, 12), {"crop_fraction": 0.75}),
        (CROP("resize_small(16)") + "(8)", (12, 12), None),
        (
            *(CROP("resize_small(16)"), (16, 12)),
            {"crop_fraction": 0.75, "short_side": True},
        ),
        (
            *(CROP("resize((15, 25))"), (12, 20)),
            {"crop_fraction": 0.8, "squash": True},
        ),
        (CROP("resize((16, 20))"), (12, 20), None),
        ("resize((15, 25)) | crop_or_pad(cut=(1, 0))", (12, 20), None),
        ("resize_small(16) | central_crop | pad(20)", (20, 20), None),
        (CROP("resize_small((15, 25))"), (12, 20), {"crop_fraction": 0.8}),
        (CROP("resize_small((16, 20))"), (12, 20), None),
        ("resize(interpolation='bicubic')", (8, 12), {"squash": True} | BICUBIC),
        (
            *(CROP("resize_small(16, interpolation='bicubic')"), (12, 12)),
            {"crop_fraction": 0.75} | BICUBIC,
        ),
        (
            *(CROP("resize_small(16, interpolation='area')"), (12, 12)),
            {"crop_fraction": 0.75, "interpolation": "area"},
        ),
        (
            CROP("resize_small(16)") + "(down=True)",
            *((12, 12), {"crop_fraction": 0.75, "crop_down": True}),
        ),
        ("resize_small(16)", (12, 12), None),
    ],
)
def test_evaluation_of_a_run_becomes_preprocessing(run, ops, size, expected):
    folder, _ = run(complete(data={"eval_transform": ops, "image_size": size}))
    found = weights.open_pretrained(folder)
    if expected is None:
        how = weights.open_pretrained(folder).preprocess.interpolation
        expected = {"transform": ops, "squash": True, "interpolation": how}
    assert found.preprocess == Preprocess(size, exif=False, **expected)


def test_run_starts_from_published_weights_and_tells_what_differs(tmp_path):
    path = save(tmp_path / "a.npz", random_flat(encoder(num_classes=9)))
    config = complete(
        init=str(path),
        data={
            "mean": (0.5, 0.4, 0.5),
            "eval_transform": "resize(interpolation='bicubic')",
        },
        model={"head_bias_init": -3.0},
    )
    params, lines = begin(config)
    np.testing.assert_array_equal(params["head"]["bias"], np.full(7, -3))
    assert lines[0] == f"start: google checkpoint of Ti/4: {path}"
    assert lines[3].split("  ")[0] == "head: replaced by a linear layer of zeros"
    line = config.data.eval_transform
    filters = "'bilinear_plain' in the checkpoint, 'bicubic' in data.eval_transform"
    assert lines[4:] == [
        f"differs: interpolation {filters}={line!r}",
        "differs: mean (0.5, 0.5, 0.5) in the checkpoint, data.mean=(0.5, 0.4, 0.5)",
    ]


def test_run_starts_from_a_workdir_and_says_of_which_step(run):
    config = complete(data={"mean": (0.4,)})
    folder, _ = run(config)
    config = complete(init=str(folder), data={"mean": (0.4, 0.4, 0.4)})
    _, lines = begin(config)
    assert lines[0] == f"start: averaged parameters of step 6 from {folder}"
    assert not any(line.startswith("differs") for line in lines)


def test_start_names_the_key_of_the_config(tmp_path):
    config = complete(init=str(tmp_path / "absent.npz"))
    message = r"config.init: '.*/absent.npz' does not exist .*: give the workdir of a"
    with pytest.raises(UserError, match=message):
        begin(config)


def test_start_names_the_checkpoint_that_does_not_fit(tmp_path):
    path = save(tmp_path / "a.npz", random_flat(encoder("S/6", depth=3)))
    config = complete(init=str(path))
    message = (
        r"config.init='.*/a.npz': the checkpoint does not fit the model: Trans.* is "
        r"left over; .* the checkpoint is a Ti/6 and the model a Ti/4"
    )
    with pytest.raises(UserError, match=message):
        begin(config)


def test_folder_in_a_bucket_is_the_workdir_of_a_run(monkeypatch, tmp_path):
    place = "gs://bucket/runs/x"
    monkeypatch.setattr(download, "download", lambda name: place)
    monkeypatch.setattr(checkpoint_folders, "has_checkpoint", lambda path: False)
    with pytest.raises(UserError, match="runs/x has no finished checkpoint: give the"):
        weights.open_pretrained(place)


def test_allowed_names_reach_the_surgery(tmp_path):
    path = save(tmp_path / "a.npz", random_flat(encoder(pool="gap")))
    config = complete(init=str(path), model={"pool": "map"})
    with pytest.raises(UserError, match="is missing; .*config.init.allow_mismatch"):
        begin(config)
    config = complete(
        init={"checkpoint": str(path), "allow_mismatch": ("^MAPHead_0/",)},
        model={"pool": "map"},
    )
    params, lines = begin(config)
    assert "MAPHead_0" in params
    assert "differs: pool gap in the checkpoint, map in the model" in lines


@pytest.mark.parametrize("stated", ["", "linear"])
def test_positions_are_resized_as_stated_or_as_the_library_of_a_file_does(
    tmp_path, stated
):
    WRITERS["timm"].write(checkpoint(encoder(posemb_resize="bicubic")), tmp_path)
    config = complete(
        init={"checkpoint": str(tmp_path), "posemb_resize": stated},
        data={"image_size": (16, 8)},
    )
    _, lines = begin(config)
    how = "" if stated else ", bicubic"
    assert any(f"resized from (3, 3) to (4, 2){how}  " in line for line in lines)


def test_workdir_of_a_resnet_knows_its_blocks(run):
    config = complete(size={}, model={"variant": "R50x1", **STEM})
    folder, _ = run(config)
    found = models.create(**weights.open_pretrained(folder).options)
    assert found.options == build(config).options
    assert found.options["stage_depths"] == STEM["stage_depths"]
    with pytest.raises(UserError, match="^num_heads=4: .* num_heads=0;"):
        weights.open_pretrained(folder, num_heads=4)


def test_a_workdir_of_before_tasks_is_refused_in_one_line(run, tmp_path):
    folder, _ = run(tiny_config())
    path = folder / "checkpoints" / "6"
    stored = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    stored["custom_metadata"]["config"]["loss"] = {"name": "softmax"}
    del stored["custom_metadata"]["config"]["task"], stored["custom_metadata"]["task"]
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(stored))
    message = "6 was saved by an earlier version of vit_jax, whose checkpoints do not"
    for read in (workdir.load, checkpoint_folders.read_metadata):
        with pytest.raises(UserError, match=message):
            read(folder)


@pytest.mark.parametrize(
    ("names", "columns", "told"),
    [
        ("edcba", [4, 3, 2, 1, 0], "the model's 5 classes, matched by names"),
        ("Bd", [1, 3], "2 of the model's 5 classes, matched by names"),
        ("abcde", [0, 1, 2, 3, 4], ""),
        ("abcdx", [0, 1, 2, 3, 4], "in its order; .* lack 1 of 5: 'x'"),
    ],
)
def test_a_head_that_is_kept_follows_the_names(tmp_path, names, columns, told):
    found = checkpoint(encoder(num_classes=5), class_names=tuple("abcde"))
    native.write(found, tmp_path / "five.safetensors")
    place = {"checkpoint": str(tmp_path / "five.safetensors"), "head": "keep"}
    config = complete(init=place, data={"num_classes": len(names)})
    params, lines = begin(config, class_names=tuple(names))
    for leaf, value in found.params["head"].items():
        np.testing.assert_array_equal(params["head"][leaf], value[..., columns])
    (line,) = [line for line in lines if line.startswith("head kept")] or [""]
    assert bool(re.search(told, line)) if told else not line
