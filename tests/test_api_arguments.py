"""Wrong arguments of every function of `vit_jax`: one line that names thing and value."""

import dataclasses
import functools
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from helpers import write_weights
from PIL import Image

import vit_jax
from vit_jax.api import images
from vit_jax.config import arguments, fields
from vit_jax.data.preprocess import Preprocess

RECIPE = "configs/digits.py"
GOOD = np.zeros((6, 8, 8), np.uint8), np.arange(6) % 2
NAN = np.full((32, 32), np.nan, np.float32)
PICTURE = np.zeros((32, 32, 3), np.uint8)


@pytest.fixture(autouse=True)
def without_type_checker():
    """Wrong arguments arrive as with users, who have no type checker of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of a small network of three classes."""
    path = tmp_path_factory.mktemp("arguments") / "weights.safetensors"
    size = (32, 32)
    how = Preprocess(image_size=size)
    write_weights(path, "abc", how, variant="Ti/8", num_classes=3, image_size=size)
    return str(path)


@pytest.fixture(scope="module")
def model(weights):
    return vit_jax.load_model(weights, tell=lambda line: None)


def train(**more):
    return vit_jax.train(RECIPE, "unused", **{"data": GOOD, "epochs": 1, **more})


def evaluate(w, **more):
    return vit_jax.evaluate(w, **{"data": GOOD, "tell": str, **more})


def b16(*args, **more):
    return vit_jax.create_model("B/16", *args, **more)


def tune(data=GOOD, workdir="w", **more):
    return vit_jax.finetune(data, workdir, **more)


def adapt(photos="configs", workdir="w", **more):
    return vit_jax.pretrain(photos, workdir, **more)


def function():
    """Stands for what is no instance of what an argument takes."""


def load(w, **more):
    return vit_jax.load_model(w, **more)


def flax_of(w, **more):
    return vit_jax.load_flax(w, tell=str, **more)


def new_flax(**more):
    return vit_jax.create_flax("Ti/8", **{"image_size": 16, "depth": 1, **more})


def nnx_of(w, **more):
    return vit_jax.load_nnx(w, tell=str, **more)


def images_of(w, **more):
    return vit_jax.load_preprocess(w, tell=str, **more)


def predict(m, **more):
    return m.predict(PICTURE, **more)


# Values of one argument: the message names it as "argument=value".
VALUES = [
    ("list_models", vit_jax.list_models, "pattern", (3, None)),
    ("list_models", vit_jax.list_models, "pretrained", ("deit",)),
    ("create_model", b16, "width", (-3, "wide")),
    ("create_model", b16, "depth", (2.5,)),
    ("create_model", b16, "dropout", (np.nan, 1.5)),
    ("create_model", b16, "drop_path_rate", (-1,)),
    ("create_model", b16, "pool", ("mean",)),
    ("create_model", b16, "dtype", ("int8", 16)),
    ("create_model", b16, "num_classes", (-1, 1.5, True)),
    ("create_model", b16, "image_size", ("224", 2.5, None, 10**6)),
    ("create_model", b16, "channels", (0, -1, 2.5, "3")),
    ("load_model", load, "num_classes", (-1, "ten")),
    ("load_model", load, "class_names", (3,)),
    ("load_model", load, "use_ema", (3,)),
    ("load_model", load, "step", (3, -1, "last")),
    ("load_model", load, "num_heads", (-2, 5)),
    ("load_model", load, "tokenizer", (3,)),
    ("load_model", load, "architecture", (3, "vit")),
    ("load_model", load, "tell", (3,)),
    ("load_model", load, "crop_fraction", (np.nan,)),
    ("load_model", load, "interpolation", ("fast",)),
    ("load_model", load, "squash", ("yes",)),
    ("load_model", load, "dtype", ("int8", 16)),
    ("load_model", load, "drop_path_rate", (-1, "much")),
    ("load_model", load, "depth", (3,)),
    ("load_model", load, "variant", ("B/16",)),
    ("load_model", load, "image_size", (10**6,)),
    ("load_model", load, "max_tokens", (-3, 2.5, 10**9)),
    ("load_model", load, "patch", (-1,)),
    ("load_model", load, "max_megapixels", (0, -1)),
    ("load_model", load, "pixels", ("uint4",)),
    ("load_model", load, "bands", ((-1,),)),
    ("load_model", load, "fill", ((256,),)),
    ("load_model", load, "mesh", (3,)),
    ("load_flax", flax_of, "num_classes", (-1, "ten")),
    ("load_flax", flax_of, "step", (3,)),
    ("load_flax", flax_of, "use_ema", (3,)),
    ("load_flax", flax_of, "dtype", ("int8",)),
    ("load_flax", flax_of, "depth", (3,)),
    ("load_flax", flax_of, "shardings", (3,)),
    ("load_nnx", nnx_of, "num_classes", ("ten",)),
    ("load_nnx", nnx_of, "rngs", (3,)),
    ("create_flax", vit_jax.create_flax, "variant", (3,)),
    ("create_flax", new_flax, "channels", (0, "3")),
    ("create_flax", new_flax, "dtype", ("int8",)),
    ("create_flax", new_flax, "key", (3,)),
    ("create_flax", new_flax, "shardings", (3,)),
    ("load_preprocess", images_of, "std", ((0.0,),)),
    ("load_preprocess", images_of, "crop_fraction", (np.nan,)),
    ("load_preprocess", images_of, "dtype", ("bfloat16",)),
    ("predict", predict, "topk", (-1, 0, 2.0)),
    ("predict", predict, "threshold", (-0.1, 2, np.nan, "half")),
    ("train", train, "class_names", (3,)),
    ("train", train, "callbacks", (3,)),
    ("train", train, "epochs", (-1, "two")),
    ("train", train, "batch_size", (0,)),
    ("finetune", tune, "workdir", (3,)),
    ("finetune", tune, "model", (3,)),
    ("finetune", tune, "minutes", (-1, np.nan, "5")),
    ("finetune", tune, "folds", (1, -2)),
    ("finetune", tune, "masks", (5, "masks")),
    ("finetune", tune, "tell", (3,)),
    ("pretrain", adapt, "workdir", (3,)),
    ("pretrain", adapt, "model", (3,)),
    ("pretrain", adapt, "minutes", (-1, np.nan, "5")),
    ("pretrain", adapt, "lora", (-2, 1.5)),
    ("pretrain", adapt, "method", (3, "simclr")),
    ("pretrain", adapt, "labels", (3,)),
    ("pretrain", adapt, "teacher", (3,)),
    ("evaluate", evaluate, "step", (3,)),
    ("evaluate", evaluate, "use_ema", ("no",)),
    ("evaluate", evaluate, "class_names", (3,)),
    ("evaluate", evaluate, "tell", (3,)),
    ("evaluate", evaluate, "batch_size", (0,)),
]
CALLS = {
    "list_models": [
        (lambda: vit_jax.list_models("a", "b"), "list_models: too many"),
        (lambda: vit_jax.list_models(patern="a"), "list_models: .*'patern'"),
    ],
    "create_model": [
        (lambda: vit_jax.create_model(), "create_model: .*'variant'"),
        (lambda: vit_jax.create_model(16), "variant=16"),
        (lambda: vit_jax.create_model("Ti/7x", width=3), "Ti/7x"),
        (lambda: vit_jax.create_model("vit_base_patch16_224"), "a timm name: load_"),
        (lambda: b16(image_size=0), r"image_size=\(0, 0\)"),
        (lambda: b16(image_size=-16), "image_size=.*-16"),
        (lambda: b16(image_size=(16, 2.5)), "image_size.*2.5"),
        (lambda: b16(image_size=(1, 2, 3)), "neither a side"),
        (lambda: b16(img_size=3), "is called image_size here"),
        (lambda: b16(heads=3), r"key model.heads; the .* model\.num_heads"),
    ],
    "load_model": [
        (lambda w: vit_jax.load_model(None), "source=None"),
        (lambda w: vit_jax.load_model(3), "source=3"),
        (lambda w: vit_jax.load_model(""), "''"),
        (lambda w: vit_jax.load_model("nowhere"), "nowhere"),
        (lambda w: vit_jax.load_model(w, crop=1), "crop=1: not one of .*crop_f"),
        (lambda w: vit_jax.load_model(w, heads=1), "heads=1: .*Ti/8: .*dtype"),
        (
            lambda w: vit_jax.load_model(w, drop_path=0.1),
            "is called drop_path_rate here",
        ),
        (lambda w: vit_jax.load_model("google/vit-base-patch16-224"), "hf://google/"),
        (lambda w: vit_jax.load_model(w, image_size=0), "image_size"),
        (lambda w: vit_jax.load_model(w, image_size="32"), "image_size.*='32'"),
        (lambda w: vit_jax.load_model(w, class_names=[1, 2]), r"class_names\[0\]=1"),
        (lambda w: vit_jax.load_model(w, class_names=["a"]), "1 class names"),
        (lambda w: vit_jax.load_model(w, mean="0.5"), r"mean\[0\]='0.5'"),
        (lambda w: vit_jax.load_model(w, std=(0.0,)), "std="),
        (lambda w: vit_jax.load_model(w, std=(np.nan,)), "std="),
        (lambda w: vit_jax.load_model(w, crop_fraction=2), "crop_fraction=2"),
        (lambda w: vit_jax.load_model(w, mean=(0.1, 0.2)), "mean=.*set mean to 1 or 3"),
    ],
    "load_flax": [
        (lambda: vit_jax.load_flax(), "load_flax: .*'source'"),
        (lambda w: flax_of(w, depht=3), "depht=3: .*Ti/8: .*depth.*width"),
        (lambda w: flax_of(w, crop_fraction=0.5), "crop_fraction=0.5: .*Ti/8"),
        (lambda w: flax_of(w, num_labels=3), "num_labels=3: .*num_classes"),
        (lambda w: flax_of(w, shardings={"cls": 3}), "shardings lacks .*/bias"),
        (lambda w: flax_of(w, shardings=jax.make_mesh((2,), ("x",))), "'data'"),
    ],
    "load_nnx": [
        (lambda: vit_jax.load_nnx(), "load_nnx: .*'source'"),
        (lambda w: nnx_of(w, depht=3), "depht=3: .*Ti/8: .*depth.*width"),
    ],
    "create_flax": [(lambda: new_flax(depht=3), "model.depht")],
    "load_preprocess": [
        (lambda w: images_of(w)(3), "images=3"),
        (lambda w: images_of(w)(NAN), "image of float32"),
        (lambda w: images_of(w, img_size=3), "is called image_size here"),
    ],
    "predict": [
        (lambda m: m.predict(), "predict: .*'images'"),
        (lambda m: m.predict(PICTURE, top_k=2), "predict: .*'top_k'"),
        (lambda m: m.predict(np.zeros((0, 0), np.uint8)), r"image of uint8 \(0, 0"),
        (lambda m: m.predict(np.zeros((0, 32, 32, 3), np.uint8)), "images"),
        (lambda m: m.predict(np.array([])), "image of float64"),
        (lambda m: m.predict(np.zeros((32, 32, 3))), "image of float64"),
        (lambda m: m.predict(NAN), "image of float32"),
        (lambda m: m.predict(Image.fromarray(NAN)), "mode F .* nan"),
        (lambda m: m.predict([PICTURE, 3]), "images="),
        (lambda m: m.predict(None), "images=None"),
        (lambda m: m.predict(3), "images=3"),
        (lambda m: m.predict({"a": PICTURE}), "images="),
        (lambda m: m.predict([]), r"images=\[\]"),
        (lambda m: m.predict(b""), "empty"),
        (lambda m: m.predict(b"noise"), "the image .*: give another image"),
        (lambda m: m.predict("nowhere.png"), "nowhere.png"),
        (lambda m: m.predict("tests/golden/mae_hf"), "no image in tests/golden"),
        (lambda m: m.features(PICTURE, tokens=True), "tokens=True"),
        (lambda m: m.features(PICTURE, tokens="some"), "tokens='some'"),
        (lambda m: m.features(PICTURE, layers=3), "layers=3"),
        (lambda m: m.features(PICTURE, layers=()), "layers is empty"),
        (lambda m: m.features(PICTURE, layers=(0, 99)), "layers=99"),
        (lambda m: m.features(PICTURE, layers=(0, -1)), r"layers=\(0, -1\).*keep one"),
        (lambda m: m.features(PICTURE, layers=(0,), norm=1), "norm=1"),
        (lambda m: m.features(None), "images=None"),
        (lambda m: m.attention(3.5), "images=3.5"),
        (lambda m: m.preprocess(None), "images=None"),
        (lambda m: m(None), "images=None"),
        (lambda m: m.zero_shot(PICTURE, 3), "texts=3"),
        (lambda m: m.zero_shot(PICTURE, [3]), r"texts\[0\]=3"),
        (lambda m: m.zero_shot(PICTURE, ["a"], prompts=3), "prompts=3"),
        (lambda m: m.zero_shot(PICTURE, ["a"], topk=0), "topk=0"),
        (lambda m: m.similarity(PICTURE, None), "texts=None"),
        (lambda m: m.similarity(PICTURE, ["a"]), "text tower"),
    ],
    "train": [
        (lambda: vit_jax.train(), "train: .*'config'"),
        (lambda: vit_jax.train(None), "config=None"),
        (lambda: vit_jax.train(3, "w"), "config=3"),
        (lambda: vit_jax.train("nowhere.py", "w"), "nowhere.py"),
        (lambda: vit_jax.train(RECIPE, 3), "workdir=3"),
        (lambda: train(data=3), "data train=int 3"),
        (lambda: train(data=GOOD[0]), "data train=ndarray"),
        (lambda: train(data=(*GOOD, 3)), "data train=tuple"),
        (lambda: train(data={}), "no 'train' among nothing"),
        (lambda: train(data={"train": 3}), "data train=int 3"),
        (lambda: train(data={"train": GOOD, "val": None}), "data val=NoneType None"),
        (lambda: train(data={"train": GOOD, "val": (GOOD[0], GOOD[1] + 7)}), "label 8"),
        (lambda: train(data=(GOOD[0], GOOD[1][:5])), "6 images, but 5 labels"),
        (lambda: train(data=(GOOD[0], GOOD[1] * 0.5)), "labels=float64"),
        (lambda: train(data=(GOOD[0], GOOD[1] - 1)), "label -1"),
        (lambda: train(data=(GOOD[0], list("ababab"))), "labels=<U1"),
        (lambda: train(data=(GOOD[0], None)), "labels=object"),
        (lambda: train(data=(None, GOOD[1])), "images=object"),
        (lambda: train(data=(GOOD[0][:, 0, 0], GOOD[1])), "images=uint8"),
        (lambda: train(data=(GOOD[0] + 0.5, GOOD[1])), "images=float64"),
        (lambda: train(data=([[1, 2], [3]], [0, 1])), r"images=\[\[1, 2\], \[3\]\]"),
        (lambda: train(class_names=["a"]), "label 1"),
        (lambda: train(callbacks=function), "callbacks=.*function"),
        (lambda: train(callbacks=[function]), r"callbacks\[0\]=.*function"),
        (lambda: train(callbacks=[vit_jax.Callback]), r"callbacks\[0\]=.*Callback"),
        (lambda: train(lr=0.1), "optim.learning_rate"),
    ],
    "finetune": [
        (lambda: vit_jax.finetune(), "finetune: .*'photos'"),
        (lambda: vit_jax.finetune(None), "photos=None"),
        (lambda: tune(3), "photos=3"),
        (lambda: tune(GOOD[0]), "photos=.*ndarray"),
        (lambda: tune((GOOD[0], GOOD[1][:3])), "but 3 labels"),
        (lambda: tune({"val": GOOD}), "no 'train' among val"),
        (lambda: tune("nowhere/at/all"), "nowhere/at/all"),
        (lambda: tune(callbacks=function), "callbacks="),
        (lambda: tune(init="x"), "init"),
    ],
    "evaluate": [
        (lambda w: vit_jax.evaluate(), "evaluate: .*'source'"),
        (lambda w: vit_jax.evaluate(None), "source=None"),
        (lambda w: vit_jax.evaluate(w), "config=None"),
        (lambda w: vit_jax.evaluate(w, 3), "config=3"),
        (lambda w: evaluate(w, data=3), "data test=int 3"),
        (lambda w: evaluate(w, data=GOOD[0]), "data test=ndarray"),
        (lambda w: evaluate(w, data={"a": (GOOD[0], GOOD[1][:2])}), "but 2 labels"),
        (lambda w: evaluate(w, data=(GOOD[0], GOOD[1] + 5)), "label 6"),
    ],
    "pretrain": [
        (lambda: vit_jax.pretrain(), "pretrain: .*'photos'"),
        (lambda: vit_jax.pretrain(None), "photos=None"),
        (lambda: vit_jax.pretrain([]), r"photos=\[\]"),
    ],
    "train_setup": [
        (lambda: vit_jax.train_setup(RECIPE), "train_setup: .*'num_examples'"),
        (lambda: vit_jax.train_setup(RECIPE, 0), "num_examples=0"),
        (lambda: vit_jax.train_setup(RECIPE, -5), "num_examples=-5"),
        (lambda: vit_jax.train_setup(RECIPE, 2.5), "num_examples=2.5"),
        (lambda: vit_jax.train_setup(RECIPE, num_examples="many"), "examples='many'"),
        (lambda: vit_jax.train_setup(None, 10), "config=None"),
        (lambda: vit_jax.train_setup({"seed": -1, "batch_size": 8}, 10), "seed=-1"),
    ],
}
for name, call, argument, values in VALUES:
    for value in values:
        message = re.escape(f"{argument}={value!r}")
        CALLS[name].append((functools.partial(call, **{argument: value}), message))


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [(name, *case) for name, cases in CALLS.items() for case in cases],
)
def test_a_wrong_argument_is_one_line_at_once(
    name, call, message, request, tmp_path, monkeypatch
):
    code = getattr(call, "func", call).__code__
    first = code.co_varnames[0] if code.co_argcount else ""
    fixture = {"w": "weights", "m": "model"}.get(first)
    given = [request.getfixturevalue(fixture)] if fixture else []
    for folder in ("configs", "tests"):
        (tmp_path / folder).symlink_to(request.config.rootpath / folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vit_jax.UserError, match=message) as raised:
        call(*given)
    assert "\n" not in str(raised.value)
    assert "--" not in str(raised.value)  # Flags are of commands.
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"configs", "tests", "w"}  # Nothing is trained.


def test_images_are_arrays_of_other_libraries_and_views_of_bytes_too(model):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    content, expected = stream.getvalue(), model(pixels)
    for one in (jnp.asarray(pixels), memoryview(pixels), bytearray(content)):
        np.testing.assert_array_equal(model(one), expected)
    several = [jnp.asarray(pixels), memoryview(content)]
    assert len(model.predict(several)) == len(model.predict(jnp.stack([pixels] * 2)))
    with pytest.raises(vit_jax.UserError, match="image of float32"):
        model(jnp.zeros((32, 32, 3)))


def test_bands_may_stand_first_where_grey_images_are_no_input():
    bands = np.zeros((13, 16, 18), np.uint8)
    how = Preprocess((16, 18))
    assert images.is_single(bands, 13) and not images.is_single(bands, 3)
    assert images.prepare(bands, how, 13).shape == (16, 18, 13)


def test_every_function_is_in_the_table():
    functions = {*vit_jax.__all__} - {"Callback", "PretrainedModel", "UserError"}
    assert functions <= CALLS.keys()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("std=0 is not above 0: set --std", "std=0 is not above 0: set std"),
        ("it has averages; --no_ema reads", "it has averages; use_ema=False reads"),
        ("state --resolution=PIXELS, or", "state image_size=PIXELS, or"),
        ("set --config.data.num_classes=5", "set data.num_classes=5"),
        ("a: run python -m vit_jax.x --y=z", "a: run python -m vit_jax.x --y=z"),
    ],
)
def test_messages_name_arguments_in_place_of_flags(line, expected):
    told = []

    @arguments.checked(Empty)
    def call(*, tell=print):
        tell(line)
        raise vit_jax.UserError(line)

    with pytest.raises(vit_jax.UserError, match=f"^{re.escape(expected)}$"):
        call(tell=told.append)
    assert told == [expected]


@dataclasses.dataclass(frozen=True)
class Empty:
    """No arguments."""


def test_arguments_are_converted_as_keys_are():
    about = fields.Key(help="")
    take = lambda value, default: arguments.take("x", about, value, default)
    assert take(np.int64(3), 0) == 3 and type(take(np.int64(3), 0)) is int
    assert take(2, 0.5) == 2.0
    assert take(np.array(["a", "b"]), ()) == take(iter(["a", "b"]), ()) == ("a", "b")
    assert take(pathlib_path := pathlib.Path("a"), "") == str(pathlib_path)
