"""Every recipe builds with every argument, and states the paper's numbers."""

import ast
import contextlib
import importlib
import inspect
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import RECIPES
from ml_collections import ConfigDict

from configs import bit_hyperrule
from configs.common import FOLDER, parse_arg, quick
from configs.study import optimizer, positions, self_supervision
from vit_jax import models
from vit_jax.config import fields, loading
from vit_jax.config.lengths import RunLength, length_in_steps
from vit_jax.data.transforms import host, parse
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
    choices = {}
    for name, default in importlib.import_module(f"configs.{stem}").ARGUMENTS.items():
        values = (default, not default) if isinstance(default, bool) else (default,)
        choices[name] = default if isinstance(default, tuple) else values
    products = itertools.product(*choices.values())
    every = [dict(zip(choices, values)) for values in products]
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
        assert c.data.name and c.data.train_transform is not None, chosen
        # Without labels, DINO has nothing to evaluate.
        assert c.evals or chosen.get("data") == "FOLDER", chosen
        assert bool(c.total_steps) != bool(c.epochs), chosen
        # Refuses a size that is no multiple of the patch, and numbers that do not fit.
        model = fields.to_dict(c.model) | {"image_size": c.data.image_size}
        # No shape depends on rates, whose bounds `load` has checked.
        model = {name: value for name, value in model.items() if name not in RATES}
        if repr(model) not in built:
            built.add(repr(model))
            models.create(**model, num_classes=3)
        if chosen.get("quick"):
            found = c.total_steps, c.data.name, c.init.checkpoint
            assert found == (3, "synthetic", ""), chosen
            whole = config.load(spec(stem, **chosen | {"quick": False}))
            assert c.init.allow_mismatch == whole.init.allow_mismatch, chosen


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_shows_what_a_reader_looks_for_and_imports_little(stem):
    plain, first = (
        config.load(spec(stem)),
        config.load(spec(stem, **arguments(stem)[0])),
    )
    assert fields.differences(plain, first) == []
    text = (ROOT / "configs" / f"{stem}.py").read_text()
    assert text.count("\n") <= 130
    doc = importlib.import_module(f"configs.{stem}").__doc__
    assert all(shown in doc for shown in (f"configs/{stem}.py", "\nRun:", "\nResult:"))
    imports = re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE)
    assert imports[:2] == ["ml_collections", "configs.common"]
    # The paper's tables of data sets, which the sweeps read too.
    assert {*imports[2:]} <= {"vit_jax.data.sources", "vit_jax.tools.sweeps"}
    wanted = "c.batch_size = ", "c.mesh = ", "c.model = ", "image_size=", "schedule="
    assert all(shown in text for shown in wanted)
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
    dropout, optim = getattr(c.model, "dropout", 0), c.optim
    rate, schedule = optim.learning_rate, optim.schedule.name
    return epochs or c.epochs, rate, schedule, optim.weight_decay, dropout


TABLE_3 = [  # Recipe, arguments, row of the table, its data, the row's epochs.
    *(
        ("b16_i21k", {"model": f"B/{size}"}, "ViT-B/{16,32}", "I21k", 90)
        for size in (16, 32)
    ),
    *(
        ("b16_i21k", {"model": name, "epochs": n}, "ViT-L/{16,32}", "I21k", "30/90")
        for name in ("L/16", "L/32", "H/14")
        for n in (30, 90)
    ),
    *(
        ("b16_i1k", {"model": name}, "ViT-*", "ImageNet", 300)
        for name in ("B/16", "B/32", "L/16", "L/32", "H/14")
    ),
    *(
        ("jft", {"model": name, "epochs": n}, row, "JFT", None)
        for name, row, n in (
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
        )
    ),
]


@pytest.mark.parametrize(("stem", "chosen", "row", "data", "epochs"), TABLE_3)
def test_pretraining_is_the_row_of_table_3(stem, chosen, row, data, epochs):
    given = {k: v for k, v in chosen.items() if stem != "jft" or k == "model"}
    c, printed = config.load(spec(stem, **given)), table3(row, data)
    assert str(c.epochs).removesuffix(".0") in str(printed[0]).split("/")
    assert c.epochs == chosen.get("epochs", epochs)
    assert of_table3(c, epochs=epochs or printed[0]) == printed
    assert c.model.variant == chosen["model"].removesuffix("-14ep")
    if stem != "jft":
        assert c.optim.grad_clip_norm == (1.0 if stem == "b16_i1k" else 0.0)
    if stem == "b16_i1k":
        assert c.num_steps(c.data.num_examples) == round(300 * 1_281_167 / 4096)


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
        found = c.optim.name, c.optim.momentum, c.optim.schedule.name
        assert found == ("sgd", 0.9, "cosine")
        assert (c.optim.weight_decay, c.optim.grad_clip_norm) == (0.0, 1.0)
        assert (c.data.image_size, c.ema.decay) == ((384, 384), 0.0)
        assert (c.data.num_classes, c.data.split) == (100, "train")
        assert fields.to_dict(c)["evals"] == {"test": "test"}
        assert (c.optim.warmup_steps, c.optim.mu_dtype) == (0, "float32")
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


@pytest.mark.parametrize(
    ("dataset", "warmup"),
    [("imagenet2012", 500), ("cifar10", 500), ("oxford_iiit_pet", 100)],
)
def test_transfer_as_the_authors_code_has_its_crop_warmup_and_momentum(dataset, warmup):
    """google-research/vision_transformer; Pets and Flowers: big_vision's transfer.py."""
    paper, c = (
        config.load(spec("transfer", dataset=dataset, protocol=name))
        for name in ("paper", "code")
    )
    assert c.data.train_transform == "inception_crop | flip"
    found = (c.optim.warmup_steps, c.optim.mu_dtype, c.total_steps)
    assert found == (warmup, "bfloat16", paper.total_steps)
    keys = {line.split(":")[0] for line in fields.differences(paper, c)}
    assert keys == {"data.train_transform", "optim.warmup_steps", "optim.mu_dtype"}


KNOWN = {"model": ("B/16", "L/16"), "epochs": (90, 30), "rate": 0.1, "size": 7}
KNOWN |= {"name": "a", "data": ("imagenet", FOLDER), "quick": False}
DEFAULTS = {"model": "B/16", "epochs": 90, "rate": 0.1, "size": 7, "name": "a"}
DEFAULTS |= {"data": "imagenet", "quick": False}


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (None, {}),
        ("", {}),
        (
            "model=L/16,epochs=30,rate=1e-3",
            {"model": "L/16", "epochs": 30, "rate": 1e-3},
        ),
        (
            "size=9,name=even_splits(a, 3)[0],",
            {"size": 9, "name": "even_splits(a, 3)[0]"},
        ),
        (
            "name=even_splits(a+b,2)[1],size=9",
            {"size": 9, "name": "even_splits(a+b,2)[1]"},
        ),
        ("quick", {"quick": True}),
        ("quick=true", {"quick": True}),
        ("quick=False", {}),
    ],
)
def test_arguments_are_read_with_their_types_and_defaults(text, given):
    found = vars(parse_arg(text, **KNOWN))
    assert found == DEFAULTS | given
    assert {k: type(v) for k, v in found.items()} == {
        k: type(v) for k, v in DEFAULTS.items()
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle=B/16", "'modle' is unknown; it takes model, epochs, rate, size, name"),
        ("fast", "'fast' is unknown; it takes model, epochs"),
        ("model=X/16", "model='X/16' is not one of B/16, L/16"),
        ("model", "model='' is not one of B/16, L/16"),
        ("quick=maybe", "quick='maybe' is not one of False, True"),
        ("size=big", "size='big' is not of type int"),
        (
            "data=big",
            r"data='big' is not one of imagenet, FOLDER \(a folder that exists",
        ),
    ],
)
def test_wrong_argument_is_named_with_the_known_ones(text, message):
    with pytest.raises(UserError, match=message):
        parse_arg(text, **KNOWN)
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
    run = RunLength(done.total_steps, 2.5)
    assert length_in_steps(done.optim, "warmup", run) == warmup


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
    warmup, *drops, end = stairs
    assert (c.optim.warmup_steps, c.total_steps) == (warmup, end)
    # As `get_lr` of google-research/big_transfer: a drop is after its step.
    rate = optim.learning_rate(c.optim, 0.003, RunLength(end, 1.0))
    for step in (0, warmup - 1, *(n + i for n in drops for i in range(-1, 3)), end - 1):
        tenths = sum(drop < step for drop in drops)
        expected = 0.003 * min(step / warmup, 1) / 10**tenths
        assert float(rate(step)) == pytest.approx(expected), step
    found = c.optim.learning_rate, c.optim.schedule.decay_rate, c.batch_size
    assert found == (0.003, 0.1, 512)
    resized, size = (160, 128) if dataset.startswith("cifar") else (512, 480)
    assert c.data.image_size == (size, size)
    line = f"resize({resized}, interpolation='bilinear_plain') | random_crop | flip"
    assert c.data.train_transform.startswith(line)
    mixed = "mixup(0.1)" in c.data.train_transform
    assert mixed != dataset.startswith("oxford")


# Recipes and their arguments, and below them keys; `peak` is the rate for so many images.
PROTOCOLS = """
# Tables 8 to 10 of arXiv:2111.06377, and facebookresearch/mae where it differs.
mae:model=B/16 mae:model=L/16 mae:model=H/14
    epochs=1600 batch_size=4096 optim.warmup_epochs=40 peak4096=2.4e-3
    optim.b1=0.9 optim.b2=0.95 optim.weight_decay=0.05
    task.mask_ratio=0.75 task.normalize_targets=True task.decoder_width=512
    model.init=mae
    task.decoder_depth=8 task.decoder_num_heads=16
    data.num_classes=0 model.posemb=sincos2d_mae
mae:model=B/16,stage=finetune mae:model=L/16,stage=finetune mae:model=H/14,stage=finetune
    batch_size=1024 optim.warmup_epochs=5 optim.weight_decay=0.05
    task.label_smoothing=0.1 optim.schedule.end_learning_rate=1e-6 model.init=mae
mae:model=B/16,stage=finetune
    epochs=100 optim.base_learning_rate=5e-4 optim.layer_decay=0.65
mae:model=L/16,stage=finetune mae:model=H/14,stage=finetune
    epochs=50 optim.base_learning_rate=1e-3 optim.layer_decay=0.75
mae:model=B/16,stage=finetune
    model.drop_path_rate=0.1
mae:model=L/16,stage=finetune
    model.drop_path_rate=0.2
mae:model=H/14,stage=finetune
    model.drop_path_rate=0.3
mae:model=B/16,stage=linear mae:model=L/16,stage=linear mae:model=H/14,stage=linear
    task.name=linear_probe optim.name=lars optim.momentum=0.9 peak16384=6.4
    epochs=90 batch_size=16384 optim.warmup_epochs=10 optim.weight_decay=0.0
# Appendix A of arXiv:2111.09886, and the configs of microsoft/SimMIM.
simmim
    epochs=800 batch_size=2048 optim.warmup_epochs=10 optim.weight_decay=0.05
    peak512=1e-4 task.mask_ratio=0.6 task.mask_unit=32
    optim.warmup_learning_rate=2e-6 model.init=simmim
simmim:epochs=100
    peak512=2e-4 optim.warmup_learning_rate=4e-6
    optim.schedule.includes_warmup=True optim.schedule.end_learning_rate=4e-5
simmim:stage=finetune
    epochs=100 optim.warmup_epochs=20 optim.layer_decay=0.65 peak512=1.25e-3
    model.drop_path_rate=0.1 optim.warmup_learning_rate=1e-6
    optim.schedule.includes_warmup=True
simmim:model=Swin-B
    model.window_size=6 data.image_size=(192,192) peak512=1e-4 task.mask_unit=32
    model.init=timm
simmim:model=Swin-B,stage=finetune
    model.window_size=7 data.image_size=(224,224) epochs=100 peak512=1.25e-3
    optim.warmup_epochs=20 model.drop_path_rate=0.1 optim.layer_decay=0.8
    optim.weight_decay=0.05 optim.schedule.end_learning_rate=1e-6
simmim:model=Swin-L
    model.window_size=12 data.image_size=(192,192)
simmim:model=Swin-L,stage=finetune
    model.window_size=14 data.image_size=(224,224)
# Section B.1.2 of arXiv:2010.11929.
masked_patch
    model.variant=B/16 total_steps=1000000 batch_size=4096 optim.name=adam
    optim.learning_rate=2e-4 optim.warmup_steps=10000 optim.schedule.name=cosine
    task.mask_ratio=0.5 task.mask_share=0.8 task.swap_share=0.1
# Appendix A of arXiv:2103.14030, and the configs of microsoft/Swin-Transformer.
swin:model=B swin:model=V2-B
    optim.warmup_learning_rate=1e-6 optim.schedule.includes_warmup=False
    epochs=300 batch_size=1024 optim.warmup_epochs=20 peak1024=1e-3
    optim.weight_decay=0.05 optim.schedule.end_learning_rate=1e-5
    model.drop_path_rate=0.5 optim.grad_clip_norm=5.0 model.init=timm
swin:model=B,data=imagenet21k swin:model=V2-B,data=imagenet21k
    epochs=90 batch_size=4096 optim.warmup_epochs=5 peak512=1.25e-4
    model.drop_path_rate=0.2 optim.grad_clip_norm=5.0
swin:model=B,stage=finetune swin:model=V2-B,stage=finetune
    peak512=2e-5 epochs=30 optim.weight_decay=1e-8 model.drop_path_rate=0.2
    optim.warmup_learning_rate=4e-8 model.init=google
swin:model=V2-B,data=imagenet21k
    data.image_size=(192,192) model.window_size=12 optim.weight_decay=0.1
    optim.warmup_learning_rate=1e-6
swin:model=V2-B,stage=finetune
    data.image_size=(256,256) model.window_size=16
    model.pretrained_window_sizes=(12,12,12,6)
# README and main_dino.py of facebookresearch/dino.
dino
    batch_size=1024 peak256=5e-4 optim.warmup_epochs=10 optim.weight_decay_end=0.4
    task.teacher_temperature=0.04 task.free_gain=False task.teacher_momentum=0.996
    model.init=timm
dino:epochs=300
    task.teacher_temperature_start=0.04 task.teacher_temperature=0.07
    task.teacher_temperature_epochs=30 task.free_gain=True
    optim.freeze=("head/(last_layer|gain)$",)
dino:model=B/16,epochs=300
    task.teacher_temperature=0.07 task.free_gain=False
# vitl16_short.yaml, vitl14.yaml and vitg14.yaml of facebookresearch/dinov2.
dinov2:model=L/16
    total_steps=125000 batch_size=2048 peak2048=5.65685e-3 optim.layer_decay=0.9
    optim.weight_decay_end=0.4 task.num_outputs=65536 task.separate_heads=False
    task.centering=center task.koleo_group=64 task.teacher_momentum=0.992
    model.init=dinov2
dinov2:model=L/14,length=long dinov2:model=g/14,length=long
    total_steps=625000 batch_size=3072 peak3072=3.4641e-4 task.num_outputs=131072
    task.centering=sinkhorn task.teacher_momentum=0.994 optim.weight_decay_end=0.2
dinov2:model=L/14,length=long
    task.koleo_group=32
dinov2:model=g/14,length=long
    task.koleo_group=12
# Configs of facebookresearch/dinov3.
dinov3:model=L/16,schedule=constant dinov3:model=L/16,stage=high_resolution
    optim.warmup_ends_at_peak=False
dinov3:model=L/16
    total_steps=125000 batch_size=2048 task.koleo_group=64 task.start_from_teacher=False
    model.init=timm
dinov3:model=L/16,stage=high_resolution
    task.start_from_teacher=True task.gram_weight=1.5
# Table 9 of arXiv:2012.12877, and facebookresearch/deit.
deit:model=S/16
    epochs=300 batch_size=1024 optim.warmup_epochs=5 optim.weight_decay=0.05
    peak512=5e-4 optim.schedule.end_learning_rate=1e-5 data.repeats=3
    model.drop_path_rate=0.1 ema.decay=0.99996 optim.schedule_by_epochs=True
    optim.warmup_learning_rate=1e-6 optim.schedule.includes_warmup=True model.init=timm
deit:model=S/16,distilled=True
    task.kind=hard task.alpha=0.5
deit:model=S/16,stage=finetune
    peak512=5e-6 epochs=30 optim.weight_decay=1e-8 data.image_size=(384,384)
    optim.schedule.name=constant model.drop_path_rate=0.0
    optim.schedule_by_epochs=True optim.warmup_learning_rate=1e-6 init.head=keep
# README_revenge.md of facebookresearch/deit.
deit3:model=L/16
    epochs=800 batch_size=2048 optim.name=lamb optim.learning_rate=3e-3
    task.loss=sigmoid task.target_threshold=0.0 data.repeats=3
    data.image_size=(192,192) model.posemb_resize=bicubic_plain
    model.drop_path_rate=0.45 model.drop_path_schedule=constant
    model.layer_scale_init=1e-4 optim.schedule_by_epochs=True
    optim.warmup_learning_rate=1e-6 optim.schedule.includes_warmup=True model.init=timm
deit3:model=S/16
    optim.learning_rate=4e-3
deit3:model=H/14,stage=finetune
    model.drop_path_rate=0.55
deit3:model=L/16,stage=finetune
    epochs=20 optim.learning_rate=1e-5 optim.weight_decay=0.1 data.repeats=1
    optim.schedule.end_learning_rate=1e-5
    data.image_size=(224,224) optim.schedule_by_epochs=True optim.eps=1e-8
    init.head=keep
# README, models_vit5.py and main.py of wangf3014/ViT-5 (arXiv:2602.08071).
vit5:model=S/16
    epochs=800 batch_size=2048 optim.name=lamb optim.learning_rate=4e-3
    task.loss=sigmoid task.target_threshold=0.0 data.repeats=3
    data.image_size=(224,224) model.posemb_resize=bicubic_plain
    model.drop_path_rate=0.05 model.drop_path_schedule=constant
    model.layer_scale_init=1e-4 model.rms_norm=True model.qk_norm=True
    model.num_register_tokens=4 model.rope=axial model.rope_temperature=10000.0
    optim.schedule.end_learning_rate=1e-5 ema.decay=0.99996
    optim.schedule_by_epochs=True optim.warmup_learning_rate=1e-6
    optim.schedule.includes_warmup=True model.init=timm
vit5:model=B/16
    optim.learning_rate=3e-3 data.image_size=(192,192) model.drop_path_rate=0.2
vit5:model=L/16
    epochs=400 optim.learning_rate=3e-3 model.drop_path_rate=0.35
vit5:model=L/16,stage=finetune
    epochs=20 batch_size=512 optim.learning_rate=1e-5 optim.weight_decay=0.1
    data.image_size=(224,224) model.drop_path_rate=0.5 task.label_smoothing=0.1
    optim.schedule_by_epochs=True optim.eps=1e-8 init.head=keep
"""


def protocols():
    """Yields a recipe and its keys for each recipe of `PROTOCOLS`."""
    text = re.sub(r"^#.*\n", "", PROTOCOLS, flags=re.MULTILINE)
    for recipes, keys in re.findall(r"^(\S.*)\n((?: .*\n)+)", text, re.MULTILINE):
        yield from ((recipe, keys.split()) for recipe in recipes.split())


@pytest.mark.parametrize(("recipe", "keys"), list(protocols()))
def test_a_recipe_is_its_protocol(recipe, keys):
    stem, _, arguments = recipe.partition(":")
    c = config.load(f"{ROOT}/configs/{stem}.py:{arguments}".rstrip(":"))
    flat = fields.flatten(c)
    for key, _, text in (word.partition("=") for word in keys):
        wanted, found = loading.parse_override(text), flat.get(key)
        if key.startswith("peak"):
            found = c.optim.peak_learning_rate(int(key.removeprefix("peak")))
        number = isinstance(wanted, float)
        assert found == (pytest.approx(wanted) if number else wanted), key


def test_simmim_and_the_probe_of_mae_have_crops_of_their_own():
    found = config.load(spec("simmim")).data.train_transform
    crop = "random_resized_crop(area=(0.67, 1.0), interpolation='bilinear')"
    assert found == f"{crop} | flip"
    found = config.load(spec("mae", stage="linear")).data.train_transform
    crop = "clipped_crop(area=(0.08, 1.0), interpolation='bicubic')"
    assert found == f"{crop} | flip"


# big_vision's `resize_small` takes the average of an area; a resize to a size is
# bilinear without antialias there and in the code of ViT, BiT and VTAB.
AREA = "resize_small(256, interpolation='area') | central_crop(down=True)"
PLAIN = "resize(interpolation='bilinear_plain')"
GOOGLE = {
    stem: AREA
    for stem in ("b16_i1k", "b16_i21k", "gsam", "jft", "masked_patch", "mixer")
}
GOOGLE |= {
    stem: PLAIN for stem in ("transfer", "vtab", "bit_hyperrule", "siglip_lit_coco")
}


@pytest.mark.parametrize("stem", GOOGLE)
def test_recipes_of_google_evaluate_with_the_filter_of_their_code(stem):
    data = config.load(spec(stem)).data
    assert data.eval_transform == GOOGLE[stem]
    trained = parse.parse_train(data.train_transform, data.image_size).host
    filters = {op.interpolation for op in trained if isinstance(op, host.Resize)}
    assert filters <= {"bilinear_plain"}


@pytest.mark.parametrize("stem", ["dinov2", "dinov3"])
def test_crops_are_blurred_as_dinov2_does(stem):
    # RandomApply gets one minus the probability, so the first large crop has none.
    task = config.load(spec(stem)).task
    first, second = task.large_transforms
    assert "blur" not in first
    assert "gaussian_blur(0.9) | solarize(0.2)" in second
    assert "gaussian_blur(0.5)" in task.small_transform


@pytest.mark.slow
def test_warmups_of_dinov3_end_as_in_its_files():
    """`CosineScheduler`, and of the files with `schedules` `linear_warmup_cosine_decay`."""
    for schedule in ("cosine", "constant"):
        c = config.load(spec("dinov3", model="S/16", schedule=schedule))
        run = RunLength(c.total_steps, 1.0)
        rates = np.linspace(0, 4e-3, 12_500, endpoint=schedule == "cosine")
        rate = optim.learning_rate(c.optim, 4e-3, run)
        for step in (1, 6_000, 12_499):
            assert float(rate(step)) == pytest.approx(rates[step], abs=2e-9)
    heats = np.linspace(0.04, 0.07, 12_500, endpoint=False)
    heat = c.task.build(c.build_model(), c.data, run).teacher_temperature
    assert float(heat(12_499)) == pytest.approx(heats[12_499], rel=2e-7)


def test_networks_of_recipes_are_what_their_protocols_need():
    c = config.load(spec("simmim"))
    run = RunLength(c.num_steps(c.data.num_examples), c.data.num_examples / 2048)
    rate = optim.learning_rate(c.optim, 1.0, run)
    for epoch, expected in ((10, 1.0), (699, 1.0), (701, 0.1), (799, 0.1)):
        found = float(rate(round(epoch * run.steps_per_epoch)))
        assert found == pytest.approx(expected)
    # What is trained is what fine-tuning reads.
    other = config.load(spec("simmim", stage="finetune"))
    for name in ("variant", "pool", "class_token", "posemb", "activation"):
        assert getattr(c.model, name) == getattr(other.model, name)
    # Swin V2's coordinates stay those of the windows that it learnt with.
    wide = config.load(spec("swin", model="V2-B", data="imagenet21k"))
    wide, tuned = wide.model, config.load(spec("swin", model="V2-B", stage="finetune"))
    windows = tuple(min(wide.window_size, 48 >> stage) for stage in range(4))
    assert tuned.model.pretrained_window_sizes == windows
    swin = config.load(spec("simmim", model="Swin-B")).build_model()
    assert swin.config.encoder_stride == 32
    distilled = config.load(spec("deit", model="S/16", distilled=True)).build_model()
    assert distilled.config.prefix_tokens == ("class token", "distillation token")


def decayed(c, params):
    """Returns the paths of the parameters that weight decay touches."""
    mask = optim.match(params, c.optim.weight_decay_mask, "optim.weight_decay_mask")
    return {path for path, yes in flatten_dict(mask, sep="/").items() if np.any(yes)}


@pytest.mark.parametrize(
    ("recipe", "images"),
    [
        ("deit:model=B/16", 64),
        ("deit:model=S/16", 256),
        ("deit:stage=finetune", 32),
        ("deit3:model=B/16", 256),
        ("deit3:model=L/16", 64),
        ("deit3:model=H/14,stage=finetune", 32),
        ("vit5", 256),
        ("vit5:stage=finetune", 64),
        ("swin:model=S", 128),
        ("swin:model=B", 64),
        ("mae:stage=finetune", 32),
        ("simmim:stage=finetune", 128),
    ],
)
def test_mixup_is_drawn_for_as_many_images_as_the_authors_have_on_a_gpu(recipe, images):
    stem, _, arg = recipe.partition(":")
    config = importlib.import_module(f"configs.{stem}").get_config(arg)
    line = f"mixup_or_cutmix(0.8, 1.0, group={images})"
    assert config.data.train_transform.endswith(line)


@pytest.mark.parametrize("batch_size", [2_048, 10_000])
def test_the_rate_of_simmim_falls_after_700_epochs_of_any_batch(batch_size):
    c = config.load(spec("simmim"))
    each = c.data.num_examples / batch_size
    run = RunLength(round(c.epochs * each), each)
    rate = optim.learning_rate(c.optim, 1.0, run)
    before, after = (float(rate(round(n * each))) for n in (699, 701))
    assert (before, after) == (1, pytest.approx(0.1))


@pytest.mark.parametrize("stem", ["mae", "simmim", "masked_patch"])
def test_weight_decay_of_what_is_learnt_without_labels_matches_parameters(stem):
    c = config.load(spec(stem, quick=True))
    task = c.task.build(c.build_model(), c.data, RunLength(3, 1.0))
    found = decayed(c, jax.eval_shape(task.init, jax.random.key(0))[0])
    assert "network/embedding/kernel" in found
    assert not any(path.endswith(("bias", "scale")) for path in found)
    tokens = {"mae": {"network/cls", "decoder/mask_token"}, "simmim": {"mask_token"}}
    also = {path for path in found if not path.endswith("/kernel")}
    assert also == tokens.get(stem, set())


def test_weight_decay_of_simmim_with_swin_misses_its_exceptions():
    """`get_pretrain_param_groups` asks for "encoder.relative_position_bias_table"."""
    c = config.load(spec("simmim", model="Swin-B", quick=True))
    task = c.task.build(c.build_model(), c.data, RunLength(3, 1.0))
    params = jax.eval_shape(task.init, jax.random.key(0))[0]
    kept = flatten_dict(params, sep="/").keys() - decayed(c, params)
    assert {"decoder/kernel", "network/stage_1/block_0/attn/bias_table"} <= decayed(
        c, params
    )
    assert {path.split("/")[-1] for path in kept} == {"bias", "scale", "mask_token"}


def test_weight_decay_of_clip_is_of_all_but_gains_biases_and_vectors():
    """`exclude` of OpenCLIP: fewer than two axes there, or a norm, bias or logit scale."""
    c = config.load(spec("clip", quick=True))
    task = c.task.build(c.build_model(), c.data, RunLength(3, 1.0))
    params = jax.eval_shape(task.init, jax.random.key(0))[0]
    found = {path for path in decayed(c, params) if not path.endswith("/kernel")}
    positions = "network/Transformer/posembed_input/pos_embedding"
    assert found == {"text/embedding", "text/pos_embedding", positions}
    kept = flatten_dict(params, sep="/").keys() - decayed(c, params)
    last = {path.split("/")[-1] for path in kept}
    assert last == {"bias", "scale", "cls", "logit_scale"}


@pytest.mark.parametrize("stem", ["deit3", "vit5"])
def test_steps_of_lamb_on_a_sum_over_classes_are_those_on_their_mean(stem):
    c = config.load(spec(stem))
    assert c.task.loss == "sigmoid"  # A sum; the mean has gradients of this size:
    mean = np.array([1e-9, 1e-8, 1e-6])
    tx = optax.chain(*c.optim.moments())
    summed = {"bias": jnp.asarray(mean * c.data.num_classes)}
    steps, _ = tx.update(summed, tx.init(summed))
    np.testing.assert_allclose(steps["bias"], mean / (mean + 1e-8), rtol=1e-4)
    # FusedLAMB of Apex clips at max_grad_norm=1.0.
    assert c.optim.grad_clip_norm == 1.0 * c.data.num_classes
    assert not config.load(spec(stem, stage="finetune")).optim.grad_clip_norm


@pytest.mark.parametrize("version", ["", "V2-"])
def test_weight_decay_of_swin_is_of_kernels(version):
    c = config.load(spec("swin", model=f"{version}T", quick=True))
    found = decayed(c, jax.eval_shape(c.build_model().init, jax.random.key(0)))
    layers = {"embedding", "qkv", "proj", "Dense_0", "Dense_1", "merge", "head"}
    assert {path.split("/")[-2] for path in found} == layers
    assert all(path.endswith("/kernel") for path in found)


def _arguments_to_try(file):
    """Yields texts of arguments, so that every value is in one; texts have another too."""
    for name, default in {"": False, **getattr(file, "ARGUMENTS", {})}.items():
        values = default if isinstance(default, tuple) else (default,)
        if isinstance(default, bool):
            values = (default, not default)
        if default == "":
            values = ("", "other")
        yield from (f"{name}={value}" if name else "" for value in values)


def _keys_set(path):
    """Returns the dotted keys that a recipe, an evaluation or a study sets."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    file, keys = importlib.import_module(name), set()
    for text in _arguments_to_try(file):
        # Some values need one of another argument.
        with contextlib.suppress(UserError):
            raw = file.get_config(text).to_dict()
            loading.override(config.TrainConfig, raw, {})  # Its sections become dicts.
            keys |= fields.flatten(raw).keys()
    tuned = file.get_study().get("tune", {}) if hasattr(file, "get_study") else {}
    keys |= {key for stage in tuned.values() for key in stage}
    return {re.sub(r"^evals\.\w+\.", "evals.NAME.", key) for key in keys}


def test_every_key_is_set_by_a_recipe_or_says_what_it_is_for():
    paths = [p for p in (ROOT / "configs").rglob("[!_]*.py") if p.stem != "common"]
    keys = set().union(*map(_keys_set, paths))
    cls = config.TrainConfig
    silent = {
        f"{where}.{name}".strip(".")
        for where, _, section in [("", "", cls), *fields.sections(cls)]
        # Keys of optax's functions are their arguments.
        if not hasattr(section, "function")
        for name, about in fields.fields(section).items()
        if not isinstance(about, fields.Section) and not about.reason
    }
    assert not silent - keys
