"""Every recipe builds with every argument, and states the paper's numbers."""

import ast
import importlib
import inspect
import itertools
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import RECIPES
from ml_collections import ConfigDict

from configs import bit_hyperrule
from configs.common import parse_arg, quick
from configs.study import optimizer, positions, self_supervision
from vit_jax import models
from vit_jax.config import fields
from vit_jax.config.lengths import RunLength, length_in_steps
from vit_jax.errors import UserError
from vit_jax.training import config, optim
from vit_jax.training.run_report import published_tables

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = pathlib.Path(__file__).parent / "golden" / "paper_tables.json"
PAPER = json.loads(GOLDEN.read_text())
RATES = ("dropout", "drop_path_rate")
MOST = 24  # Combinations up to here are all built; else each value, and about so many.


def spec(stem, **chosen):
    path = str(ROOT / "configs" / f"{stem}.py")
    return ":".join([path, ",".join(f"{k}={v}" for k, v in chosen.items())]).strip(":")


def arguments(stem):
    """Returns the choices of arguments to build, the defaults first."""
    choices = {
        name: default
        if isinstance(default, tuple)
        else (default, not default)
        if isinstance(default, bool)
        else (default,)
        for name, default in importlib.import_module(
            f"configs.{stem}"
        ).ARGUMENTS.items()
    }
    every = [
        dict(zip(choices, values)) for values in itertools.product(*choices.values())
    ]
    if len(every) <= MOST:
        return every
    singles = [{name: value} for name, values in choices.items() for value in values]
    # An odd stride, so that flags, which have two values, take both.
    return [*every[:: len(every) // MOST | 1], *singles]


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_builds_with_every_argument(stem):
    built = set()
    for chosen in arguments(stem):
        c = config.load(spec(stem, **chosen))
        assert fields.differences(c, config.complete(c)) == [], chosen
        assert c.data.name and c.data.train_transform is not None and c.evals, chosen
        assert bool(c.total_steps) != bool(c.epochs), chosen
        # Refuses a size that is no multiple of the patch, and numbers that do not fit.
        model = fields.to_dict(c.model) | {"image_size": c.data.image_size}
        # No shape depends on rates, whose bounds `load` has checked.
        model = {name: value for name, value in model.items() if name not in RATES}
        if repr(model) not in built:
            built.add(repr(model))
            models.create(**model, num_classes=3)
        if chosen.get("quick"):
            assert (c.total_steps, c.data.name, c.init.checkpoint) == (
                3,
                "synthetic",
                "",
            ), chosen


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_defaults_equal_its_first_arguments(stem):
    assert (
        fields.differences(
            config.load(spec(stem)), config.load(spec(stem, **arguments(stem)[0]))
        )
        == []
    )


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_is_short_and_opens_with_command_and_result(stem):
    text = (ROOT / "configs" / f"{stem}.py").read_text()
    doc = importlib.import_module(f"configs.{stem}").__doc__
    assert text.count("\n") <= 130
    assert f"configs/{stem}.py" in doc
    for word in ("Run:", "Result:"):
        assert f"\n{word}" in doc


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_shows_what_a_reader_looks_for_and_imports_little(stem):
    text = (ROOT / "configs" / f"{stem}.py").read_text()
    imports = re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE)
    assert imports[:2] == ["ml_collections", "configs.common"]
    # The paper's tables of data sets, which the sweeps read too.
    assert {*imports[2:]} <= {"vit_jax.data.sources", "vit_jax.tools.sweeps"}
    for shown in (
        "c.batch_size = ",
        "c.mesh = ",
        "c.model = ",
        "image_size=",
        "schedule=",
    ):
        assert shown in text, shown
    assert not re.search(r"^ +c\.\w+, c\.", text, re.MULTILINE)  # One key a line.


def test_studies_and_evaluations_import_recipes_alone():
    for path in (ROOT / "configs").glob("*/*.py"):
        imports = set(
            re.findall(r"^(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
        )
        known = {"ml_collections", "configs", "configs.common", "os", "types"}
        known |= {"configs.study", "configs.eval.common", "vit_jax.errors"}
        assert imports <= known, path


def test_quick_is_short():
    lines, _ = inspect.getsourcelines(quick)
    (function,) = ast.parse("".join(lines)).body
    assert function.end_lineno - function.body[0].end_lineno <= 25


def test_studies_state_the_published_numbers():
    tables = published_tables()
    table8 = tables["table8"]
    found = {"none": table8["none"][0], "relative": table8["rel"][0]}
    for kind in ("1d", "2d"):
        names = [f"{kind}-{place}" for place in positions.PLACES]
        found |= dict(zip(names, table8[kind], strict=True))
    assert positions.PUBLISHED == found
    average = [number / 100 for number in tables["table7"]["Average"]]
    assert list(optimizer.PUBLISHED.values()) == average
    rows = {data: tables["table5"][data] for data in ("ImageNet", "JFT-300M")}
    b16 = {data: row["ImageNet"][0] for data, row in rows.items()}
    numbers = b16["ImageNet"], tables["mpp"]["B16_ImageNet"], b16["JFT-300M"]
    percent = [100 * number for number in self_supervision.PUBLISHED.values()]
    assert percent == pytest.approx(list(numbers))


@pytest.mark.skipif(
    not (ROOT.parent / "shared/paper/tables.json").exists(),
    reason="only where the transcription of all tables lies beside the checkout",
)
def test_golden_tables_equal_the_transcription():
    tables = json.loads((ROOT.parent / "shared/paper/tables.json").read_text())
    assert {key: tables[key] for key in PAPER} == PAPER


def table3(model, data):
    """Returns epochs, rate, decay, weight decay and dropout of a row of table 3."""
    rows = [row for row in PAPER["table3"]["rows"] if row[:2] == [model, data]]
    assert len(rows) == 1
    return tuple(rows[0][2:])


def of_table3(c, epochs=None):
    """Returns the same of a config; `epochs` replaces a number such as "30/90"."""
    assert (c.batch_size, c.optim.name, c.optim.warmup_steps) == (4096, "adam", 10_000)
    assert (c.optim.b1, c.optim.b2) == (0.9, 0.999)
    assert c.data.image_size == (224, 224)
    # ResNets have neither a representation layer nor dropout.
    assert getattr(c.model, "representation_layer", True)
    dropout, decay = getattr(c.model, "dropout", 0), c.optim.weight_decay
    return (
        epochs or c.epochs,
        c.optim.learning_rate,
        c.optim.schedule.name,
        decay,
        dropout,
    )


@pytest.mark.parametrize("size", ["16", "32"])
def test_b_on_imagenet21k_is_the_row_of_table_3(size):
    c = config.load(spec("b16_i21k", model=f"B/{size}"))
    assert of_table3(c) == table3("ViT-B/{16,32}", "I21k")
    assert (c.model.variant, c.optim.grad_clip_norm) == (f"B/{size}", 0.0)


@pytest.mark.parametrize("variant", ["L/16", "L/32", "H/14"])
def test_l_and_h_on_imagenet21k_are_the_row_of_table_3(variant):
    found = [
        config.load(spec("b16_i21k", model=variant, epochs=epochs))
        for epochs in (30, 90)
    ]
    epochs = {c.epochs: c for c in found}
    assert sorted(epochs) == [30, 90]
    for c in epochs.values():
        assert of_table3(c, epochs="30/90") == table3("ViT-L/{16,32}", "I21k")
        assert (c.model.variant, c.optim.grad_clip_norm) == (variant, 0.0)


@pytest.mark.parametrize("variant", ["B/16", "B/32", "L/16", "L/32", "H/14"])
def test_imagenet_recipes_are_the_row_of_table_3(variant):
    c = config.load(spec("b16_i1k", model=variant))
    assert of_table3(c) == table3("ViT-*", "ImageNet")
    assert (c.model.variant, c.optim.grad_clip_norm) == (variant, 1.0)
    assert c.num_steps(c.data.num_examples) == round(300 * 1_281_167 / 4096)


@pytest.mark.parametrize(
    ("model", "row", "epochs"),
    [
        ("B/16", "ViT-B/{16,32}", 7),
        ("B/32", "ViT-B/{16,32}", 7),
        ("L/32", "ViT-L/32", 7),
        ("L/16", "ViT-L/16", 7),
        ("L/16-14ep", "ViT-L/16", 14),
        ("H/14", "ViT-H/14", 14),
        ("R50x1", "R50x{1,2}", 7),
        ("R50x2", "R50x{1,2}", 7),
        ("R101x1", "R101x1", 7),
        ("R152x1", "R152x{1,2}", 7),
        ("R152x2", "R152x{1,2}", 7),
        ("R50+B/16", "R50+ViT-B/{16,32}", 7),
        ("R50+B/32", "R50+ViT-B/{16,32}", 7),
        ("R50+L/32", "R50+ViT-L/32", 7),
        ("R50+L/16", "R50+ViT-L/16", 7),
        ("R50+L/16-14ep", "R50+ViT-L/16", 14),
    ],
)
def test_jft_recipes_are_the_rows_of_table_3(model, row, epochs):
    c = config.load(spec("jft", model=model))
    printed = table3(row, "JFT")
    assert str(epochs) in str(printed[0]).split("/")
    assert c.epochs == epochs
    assert of_table3(c, epochs=printed[0]) == printed
    assert c.model.variant == model.removesuffix("-14ep")


def test_imagenet21k_ends_and_starts_as_its_authors_add():
    added = PAPER["author_additions"]["I21k pretraining"]
    c = config.load(spec("b16_i21k"))
    assert c.optim.schedule.end_learning_rate == added["linear decay end value"]
    assert c.model.head_bias_init == added["head bias init"]


@pytest.mark.parametrize("variant", ["B/16", "B/32", "L/16", "L/32", "H/14"])
@pytest.mark.parametrize("data", ["i21k", "i1k"])
def test_docstring_states_the_upstream_precision(variant, data):
    key = {"i21k": "I21k", "i1k": "ImageNet scratch 300 epochs, 224 px"}[data]
    doc = importlib.import_module(f"configs.b16_{data}").__doc__
    precision = PAPER["upstream_val_prec1"][key].get(variant)
    stated = rf"{precision:.2f} (% for )?{variant}" if precision else "none for H/14"
    assert re.search(stated, " ".join(doc.split()))


def test_transfer_is_a_row_of_table_4():
    """All rows are in tests/tools/sweeps/test_recipes.py."""
    steps, rates = PAPER["table4"]["CIFAR100"]
    for rate in (0.0, *rates):
        c = config.load(spec("transfer", model="B/16", dataset="cifar100", rate=rate))
        assert (c.total_steps, c.batch_size) == (steps, 512)
        assert c.optim.learning_rate == (rate or rates[2])
        optimizer = (c.optim.name, c.optim.momentum, c.optim.schedule.name)
        assert optimizer == ("sgd", 0.9, "cosine")
        assert (c.optim.weight_decay, c.optim.grad_clip_norm) == (0.0, 1.0)
        assert (c.data.image_size, c.ema.decay) == ((384, 384), 0.0)
        assert (c.data.num_classes, c.data.split) == (100, "train")
        assert fields.to_dict(c)["evals"] == {"test": "test"}
    dev = config.load(spec("transfer", dataset="cifar100", dev=True))
    assert dev.data.split == "train[:98%]"
    assert fields.to_dict(dev)["evals"] == {"dev": "train[98%:]"}


@pytest.mark.parametrize(
    ("model", "dataset", "resolution", "size", "average"),
    [
        ("L/16", "imagenet2012", 512, 512, 0.9999),
        ("H/14", "imagenet2012", 0, 518, 0.9999),
        ("H/14", "cifar10", 0, 518, 0.0),
        ("L/16", "imagenet2012", 0, 384, 0.0),
    ],
)
def test_transfer_of_table_2_is_larger_and_averaged(
    model, dataset, resolution, size, average
):
    chosen = {"model": model, "dataset": dataset, "resolution": resolution}
    c = config.load(spec("transfer", **chosen))
    assert c.data.image_size == (size, size)
    assert c.ema.decay == average


def test_arguments_take_their_defaults():
    known = {"model": ("B/16", "L/16"), "epochs": (90, 30), "rate": 0.1, "quick": False}
    for arg in (None, ""):
        assert vars(parse_arg(arg, **known)) == {
            "model": "B/16",
            "epochs": 90,
            "rate": 0.1,
            "quick": False,
        }


def test_commas_within_brackets_belong_to_a_value():
    text = "train=even_splits(train, 3)[0],size=9,test=even_splits(a+b,2)[1],"
    assert vars(parse_arg(text, train="", test="", size=7)) == {
        "train": "even_splits(train, 3)[0]",
        "test": "even_splits(a+b,2)[1]",
        "size": 9,
    }


def test_arguments_are_read_with_their_types():
    known = {
        "model": ("B/16", "L/16"),
        "epochs": (90, 30),
        "rate": 0.1,
        "size": 7,
        "name": "a",
        "on": True,
    }
    arg = parse_arg("model=L/16,epochs=30,rate=1e-3,size=9,name=b,on=False", **known)
    assert vars(arg) == {
        "model": "L/16",
        "epochs": 30,
        "rate": 1e-3,
        "size": 9,
        "name": "b",
        "on": False,
    }


@pytest.mark.parametrize(
    ("text", "value"), [("quick", True), ("quick=true", True), ("quick=False", False)]
)
def test_flag_is_its_bare_name_or_has_a_value(text, value):
    assert parse_arg(text, quick=False).quick is value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle=B/16", "'modle' is unknown; it takes model, size, quick"),
        ("fast", "'fast' is unknown; it takes model, size, quick"),
        ("model=X/16", "model='X/16' is not one of B/16, L/16"),
        ("model", "model='' is not one of B/16, L/16"),
        ("quick=maybe", "quick='maybe' is not one of False, True"),
        ("size=big", "size='big' is not of type int"),
    ],
)
def test_wrong_argument_is_named_with_the_known_ones(text, message):
    with pytest.raises(UserError, match=message):
        parse_arg(text, model=("B/16", "L/16"), size=7, quick=False)


def test_recipe_without_arguments_takes_none():
    with pytest.raises(UserError, match="'quick' is unknown; it takes none"):
        parse_arg("quick")


@pytest.mark.parametrize(
    ("given", "warmup"),
    [
        ({}, 0),
        ({"warmup_steps": 10_000}, 1),
        ({"warmup_epochs": 5.0}, 1),
        ({"warmup_fraction": 0.1}, 1),
    ],
)
def test_quick_shortens_any_warmup(given, warmup):
    c = fields.to_dict(config.load(spec("b16_i1k")))
    c["optim"] |= {"warmup_steps": 0, **given}
    done = config.complete(quick(ConfigDict(fields.to_dict(config.complete(c)))))
    assert (
        length_in_steps(done.optim, "warmup", RunLength(done.total_steps, 2.5))
        == warmup
    )


@pytest.mark.parametrize("dataset", bit_hyperrule.DATASETS)
def test_bit_hyperrule_is_the_protocol(dataset):
    """../shared/paper/protocols.md, "BiT hyper-rule"."""
    c = config.load(spec("bit_hyperrule", dataset=dataset))
    large = dataset == "imagenet2012"
    if dataset.startswith("oxford"):
        stairs = (100, 200, 300, 400, 500)
    else:
        stairs = (500, *((6, 12, 18, 20) if large else (3, 6, 9, 10)))
        stairs = (500, *(1000 * n for n in stairs[1:]))
    assert (c.optim.warmup_steps, *c.optim.schedule.boundaries, c.total_steps) == stairs
    assert (c.optim.learning_rate, c.optim.schedule.decay_rate, c.batch_size) == (
        0.003,
        0.1,
        512,
    )
    resized, size = (160, 128) if dataset.startswith("cifar") else (512, 480)
    assert c.data.image_size == (size, size)
    assert c.data.train_transform.startswith(f"resize({resized}) | random_crop | flip")
    assert ("mixup(0.1)" in c.data.train_transform) == (
        not dataset.startswith("oxford")
    )


@pytest.mark.parametrize("variant", ["B/16", "L/16", "H/14"])
def test_mae_is_the_protocol(variant):
    """Tables 8 to 10 of arXiv:2111.06377, and facebookresearch/mae where it differs."""
    c = config.load(spec("mae", model=variant))
    assert (c.epochs, c.batch_size, c.optim.warmup_epochs) == (1600, 4096, 40)
    assert c.optim.peak_learning_rate(c.batch_size) == pytest.approx(2.4e-3)
    assert (c.optim.b1, c.optim.b2, c.optim.weight_decay) == (0.9, 0.95, 0.05)
    assert (c.task.mask_ratio, c.task.normalize_targets) == (0.75, True)
    sizes = c.task.decoder_width, c.task.decoder_depth, c.task.decoder_num_heads
    assert sizes == (512, 8, 16)
    assert (c.data.num_classes, c.model.posemb) == (0, "sincos2d_mae")

    c = config.load(spec("mae", model=variant, stage="finetune"))
    small = variant == "B/16"
    found = c.epochs, c.batch_size, c.optim.warmup_epochs, c.optim.weight_decay
    assert found == (100 if small else 50, 1024, 5, 0.05)
    assert c.optim.base_learning_rate == (5e-4 if small else 1e-3)
    assert c.optim.layer_decay == (0.65 if small else 0.75)
    rates = {"B/16": 0.1, "L/16": 0.2, "H/14": 0.3}
    assert c.model.drop_path_rate == rates[variant]
    assert (c.task.label_smoothing, c.optim.schedule.end_learning_rate) == (0.1, 1e-6)

    c = config.load(spec("mae", model=variant, stage="linear"))
    assert (c.task.name, c.optim.name, c.optim.momentum) == (
        "linear_probe",
        "lars",
        0.9,
    )
    assert c.optim.peak_learning_rate(c.batch_size) == pytest.approx(6.4)
    found = c.epochs, c.batch_size, c.optim.warmup_epochs, c.optim.weight_decay
    assert found == (90, 16_384, 10, 0.0)


def test_simmim_is_the_protocol():
    """Appendix A of arXiv:2111.09886, and the configs of microsoft/SimMIM."""
    c = config.load(spec("simmim"))
    found = c.epochs, c.batch_size, c.optim.warmup_epochs, c.optim.weight_decay
    assert found == (800, 2048, 10, 0.05)
    assert c.optim.peak_learning_rate(512) == pytest.approx(1e-4)
    run = RunLength(c.num_steps(c.data.num_examples), c.data.num_examples / 2048)
    rate = optim.learning_rate(c.optim, 1.0, run)
    for epoch, expected in ((10, 1.0), (699, 1.0), (701, 0.1), (799, 0.1)):
        found = float(rate(round(epoch * run.steps_per_epoch)))
        assert found == pytest.approx(expected)
    assert (c.task.mask_ratio, c.task.mask_unit) == (0.6, 32)
    short = config.load(spec("simmim", epochs=100))
    assert short.optim.peak_learning_rate(512) == pytest.approx(2e-4)
    c = config.load(spec("simmim", stage="finetune"))
    found = c.epochs, c.optim.warmup_epochs, c.optim.layer_decay
    assert found == (100, 20, 0.65)
    assert c.optim.peak_learning_rate(512) == pytest.approx(1.25e-3)
    assert c.model.drop_path_rate == 0.1


def test_masked_patch_is_appendix_b():
    """Section B.1.2 of arXiv:2010.11929."""
    c = config.load(spec("masked_patch"))
    assert (c.model.variant, c.total_steps, c.batch_size) == ("B/16", 1_000_000, 4096)
    assert (c.optim.name, c.optim.learning_rate, c.optim.warmup_steps) == (
        "adam",
        2e-4,
        10_000,
    )
    assert c.optim.schedule.name == "cosine"
    shares = c.task.mask_ratio, c.task.mask_share, c.task.swap_share
    assert shares == (0.5, 0.8, 0.1)


@pytest.mark.parametrize("stem", ["mae", "simmim", "masked_patch"])
def test_weight_decay_of_what_is_learnt_without_labels_matches_parameters(stem):
    c = config.load(spec(stem, quick=True))
    task = c.task.build(c.build_model(), c.data, RunLength(3, 1.0))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    mask = optim.match(params, c.optim.weight_decay_mask, "optim.weight_decay_mask")
    decayed = {path for path, yes in flatten_dict(mask, sep="/").items() if np.any(yes)}
    assert "network/embedding/kernel" in decayed
    assert not any(path.endswith(("bias", "scale")) for path in decayed)
    tokens = {"mae": {"network/cls", "decoder/mask_token"}, "simmim": {"mask_token"}}
    also = {path for path in decayed if not path.endswith("/kernel")}
    assert also == tokens.get(stem, set())


def test_what_simmim_trains_is_what_its_fine_tuning_reads():
    one, other = (
        config.load(spec("simmim", stage=s)) for s in ("pretrain", "finetune")
    )
    for name in ("variant", "pool", "class_token", "fc_norm", "posemb", "activation"):
        assert getattr(one.model, name) == getattr(other.model, name)


@pytest.mark.parametrize("version", ["", "V2-"])
def test_swin_is_the_protocol(version):
    """Appendix A of arXiv:2103.14030, and the configs of microsoft/Swin-Transformer."""
    c = config.load(spec("swin", model=f"{version}B"))
    found = c.epochs, c.batch_size, c.optim.warmup_epochs, c.optim.weight_decay
    assert found == (300, 1024, 20, 0.05)
    assert c.optim.peak_learning_rate(1024) == pytest.approx(1e-3)
    assert c.optim.schedule.end_learning_rate == pytest.approx(1e-5)
    assert (c.model.drop_path_rate, c.optim.grad_clip_norm) == (0.5, 5.0)
    wide = config.load(spec("swin", model=f"{version}B", data="imagenet21k"))
    assert (wide.epochs, wide.batch_size, wide.optim.warmup_epochs) == (90, 4096, 5)
    assert wide.optim.peak_learning_rate(512) == pytest.approx(1.25e-4)
    assert (wide.model.drop_path_rate, wide.optim.grad_clip_norm) == (0.2, 5.0)
    tuned = config.load(spec("swin", model=f"{version}B", stage="finetune"))
    assert tuned.optim.peak_learning_rate(512) == pytest.approx(2e-5)
    assert (tuned.epochs, tuned.optim.weight_decay) == (30, 1e-8)
    quick = config.load(spec("swin", model=f"{version}T", quick=True))
    params = jax.eval_shape(quick.build_model().init, jax.random.key(0))
    mask = optim.match(params, quick.optim.weight_decay_mask, "optim.weight_decay_mask")
    decayed = {path for path, yes in flatten_dict(mask, sep="/").items() if yes}
    assert {path.split("/")[-2] for path in decayed} == {
        *("embedding", "qkv", "proj", "Dense_0", "Dense_1", "merge", "head")
    }
    assert all(path.endswith("/kernel") for path in decayed)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_simmim_of_swin_is_the_protocol(stage):
    c = config.load(spec("simmim", model="Swin-B", stage=stage))
    assert (c.model.window_size, c.data.image_size) == (6, (192, 192))
    if stage == "pretrain":
        assert c.optim.peak_learning_rate(512) == pytest.approx(1e-4)
        assert c.build_model().encoder_stride == c.task.mask_unit == 32
    else:
        found = c.epochs, c.optim.warmup_epochs, c.model.drop_path_rate
        assert found == (100, 20, 0.1)
        assert c.optim.peak_learning_rate(512) == pytest.approx(1.25e-3)
        assert c.optim.layer_decay == 0.8


def test_deit_is_the_protocol():
    """Table 9 of arXiv:2012.12877, and facebookresearch/deit."""
    c = config.load(spec("deit", model="S/16"))
    found = c.epochs, c.batch_size, c.optim.warmup_epochs, c.optim.weight_decay
    assert found == (300, 1024, 5, 0.05)
    assert c.optim.peak_learning_rate(512) == pytest.approx(5e-4)
    assert c.optim.schedule.end_learning_rate == pytest.approx(1e-5)
    assert (c.data.repeats, c.model.drop_path_rate, c.ema.decay) == (3, 0.1, 0.99996)
    distilled = config.load(spec("deit", model="S/16", distilled=True))
    assert (distilled.task.kind, distilled.task.alpha) == ("hard", 0.5)
    assert distilled.build_model().prefix_tokens == (
        "class token",
        "distillation token",
    )
    tuned = config.load(spec("deit", model="S/16", stage="finetune"))
    assert tuned.optim.peak_learning_rate(512) == pytest.approx(5e-6)
    found = tuned.epochs, tuned.optim.weight_decay, tuned.data.image_size
    assert found == (30, 1e-8, (384, 384))


def test_deit3_is_the_protocol():
    """README_revenge.md of facebookresearch/deit."""
    c = config.load(spec("deit3", model="L/16"))
    found = c.epochs, c.batch_size, c.optim.name, c.optim.learning_rate
    assert found == (800, 2048, "lamb", 3e-3)
    assert (c.task.loss, c.data.image_size, c.data.repeats) == (
        "sigmoid",
        (192, 192),
        3,
    )
    found = c.model.drop_path_rate, c.model.drop_path_schedule, c.model.layer_scale_init
    assert found == (0.45, "constant", 1e-4)
    assert config.load(spec("deit3", model="S/16")).optim.learning_rate == 4e-3
    tuned = config.load(spec("deit3", model="L/16", stage="finetune"))
    found = tuned.epochs, tuned.optim.learning_rate, tuned.optim.weight_decay
    assert found == (20, 1e-5, 0.1)
    assert tuned.data.image_size == (224, 224)
