"""Wrong arguments of every function of `vit_jax`: one line that names thing and value."""

import pathlib

import jaxtyping
import numpy as np
import pytest
from helpers import write_weights
from PIL import Image

import vit_jax
from vit_jax.config import arguments, fields
from vit_jax.weights.pretrained import Preprocess

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


def evaluate(weights, **more):
    return vit_jax.evaluate(weights, **{"data": GOOD, "tell": str, **more})


def function():
    """Stands for what is no instance of what an argument takes."""


CALLS = {
    "list_models": [
        (lambda: vit_jax.list_models(3), "pattern=3"),
        (lambda: vit_jax.list_models(None), "pattern=None"),
        (lambda: vit_jax.list_models(pretrained="deit"), "pretrained='deit'"),
        (lambda: vit_jax.list_models("a", "b"), "list_models: too many"),
        (lambda: vit_jax.list_models(patern="a"), "list_models: .*'patern'"),
    ],
    "create_model": [
        (lambda: vit_jax.create_model(), "create_model: .*'variant'"),
        (lambda: vit_jax.create_model(16), "variant=16"),
        (lambda: vit_jax.create_model("B/16", width=-3), "width=-3"),
        (lambda: vit_jax.create_model("B/16", width="wide"), "width='wide'"),
        (lambda: vit_jax.create_model("B/16", depth=2.5), "depth=2.5"),
        (lambda: vit_jax.create_model("B/16", dropout=np.nan), "dropout=nan"),
        (lambda: vit_jax.create_model("B/16", dropout=1.5), "dropout=1.5"),
        (lambda: vit_jax.create_model("B/16", drop_path_rate=-1), "drop_path_rate=-1"),
        (lambda: vit_jax.create_model("B/16", pool="mean"), "pool='mean'"),
        (lambda: vit_jax.create_model("B/16", dtype="int8"), "dtype='int8'"),
        (lambda: vit_jax.create_model("B/16", num_classes=-1), "num_classes=-1"),
        (lambda: vit_jax.create_model("B/16", num_classes=1.5), "num_classes=1.5"),
        (lambda: vit_jax.create_model("B/16", num_classes=True), "num_classes=True"),
        (lambda: vit_jax.create_model("B/16", image_size=0), r"image_size=\(0, 0\)"),
        (lambda: vit_jax.create_model("B/16", image_size=-16), "image_size=.*-16"),
        (lambda: vit_jax.create_model("B/16", image_size="224"), "image_size='224'"),
        (lambda: vit_jax.create_model("B/16", image_size=2.5), "image_size=2.5"),
        (lambda: vit_jax.create_model("B/16", image_size=None), "image_size=None"),
        (lambda: vit_jax.create_model("B/16", image_size=(16, 2.5)), "image_size.*2.5"),
        (
            lambda: vit_jax.create_model("B/16", heads=3),
            r"key model.heads; the .* model\.num_heads",
        ),
        (lambda: vit_jax.create_model("Ti/7x", width=3), "Ti/7x"),
        (lambda: vit_jax.create_model("B/16", img_size=3), "is called image_size here"),
        (lambda: vit_jax.create_model("vit_base_patch16_224"), "a name of timm: load_"),
        (lambda: vit_jax.create_model("B/16", image_size=(1, 2, 3)), "neither a side"),
    ],
    "load_model": [
        (lambda w: vit_jax.load_model(None), "source=None"),
        (lambda w: vit_jax.load_model(3), "source=3"),
        (lambda w: vit_jax.load_model(""), "''"),
        (lambda w: vit_jax.load_model("nowhere"), "nowhere"),
        (lambda w: vit_jax.load_model(w, crop=1), "crop=1: not one of .*crop_f"),
        (lambda w: vit_jax.load_model("google/vit-base-patch16-224"), "hf://google/"),
        (lambda w: vit_jax.load_model(w, image_size=0), "image_size"),
        (lambda w: vit_jax.load_model(w, image_size="32"), "image_size.*='32'"),
        (lambda w: vit_jax.load_model(w, num_classes=-1), "num_classes=-1"),
        (lambda w: vit_jax.load_model(w, num_classes="ten"), "num_classes='ten'"),
        (lambda w: vit_jax.load_model(w, class_names=3), "class_names=3"),
        (lambda w: vit_jax.load_model(w, class_names=[1, 2]), r"class_names\[0\]=1"),
        (lambda w: vit_jax.load_model(w, class_names=["a"]), "1 class names"),
        (lambda w: vit_jax.load_model(w, step=3), "step=3"),
        (lambda w: vit_jax.load_model(w, step=-1), "step=-1"),
        (lambda w: vit_jax.load_model(w, step="last"), "step='last'"),
        (lambda w: vit_jax.load_model(w, use_ema=3), "use_ema=3"),
        (lambda w: vit_jax.load_model(w, num_heads=-2), "num_heads=-2"),
        (lambda w: vit_jax.load_model(w, num_heads=5), "num_heads=5: "),
        (lambda w: vit_jax.load_model(w, architecture=3), "architecture=3"),
        (lambda w: vit_jax.load_model(w, architecture="vit"), "architecture='vit': "),
        (lambda w: vit_jax.load_model(w, tokenizer=3), "tokenizer=3"),
        (lambda w: vit_jax.load_model(w, tell=3), "tell=3"),
        (lambda w: vit_jax.load_model(w, mean="0.5"), r"mean\[0\]='0.5'"),
        (lambda w: vit_jax.load_model(w, std=(0.0,)), "std="),
        (lambda w: vit_jax.load_model(w, std=(np.nan,)), "std="),
        (lambda w: vit_jax.load_model(w, crop_fraction=np.nan), "crop_fraction=nan"),
        (lambda w: vit_jax.load_model(w, crop_fraction=2), "crop_pct=2"),
        (lambda w: vit_jax.load_model(w, interpolation="fast"), "interpolation='fast'"),
        (lambda w: vit_jax.load_model(w, squash="yes"), "squash='yes'"),
    ],
    "predict": [
        (lambda m: m.predict(), "predict: .*'images'"),
        (lambda m: m.predict(PICTURE, topk=-1), "topk=-1"),
        (lambda m: m.predict(PICTURE, topk=0), "topk=0"),
        (lambda m: m.predict(PICTURE, topk=2.0), "topk=2.0"),
        (lambda m: m.predict(PICTURE, top_k=2), "predict: .*'top_k'"),
        (lambda m: m.predict(PICTURE, threshold=-0.1), "threshold=-0.1"),
        (lambda m: m.predict(PICTURE, threshold=2), "threshold=2"),
        (lambda m: m.predict(PICTURE, threshold=np.nan), "threshold=nan"),
        (lambda m: m.predict(PICTURE, threshold="half"), "threshold='half'"),
        (lambda m: m.predict(np.zeros((0, 0), np.uint8)), r"image of uint8 \(0, 0"),
        (lambda m: m.predict(np.zeros((0, 32, 3), np.uint8)), "image of uint8"),
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
    ],
    "features": [
        (lambda m: m.features(PICTURE, tokens="all"), "tokens='all'"),
        (lambda m: m.features(None), "images=None"),
        (lambda m: m.attention(3.5), "images=3.5"),
        (lambda m: m.preprocess(None), "images=None"),
        (lambda m: m(None), "images=None"),
    ],
    "zero_shot": [
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
        (lambda: train(data=(GOOD[0], GOOD[1][:5])), "6 images, but 5 labels"),
        (lambda: train(data=(GOOD[0], GOOD[1] * 0.5)), "labels=float64"),
        (lambda: train(data=(GOOD[0], GOOD[1] - 1)), "label -1"),
        (lambda: train(data=(GOOD[0], list("ababab"))), "labels=<U1"),
        (lambda: train(data=(GOOD[0], None)), "labels=object"),
        (lambda: train(data=(None, GOOD[1])), "images=object"),
        (lambda: train(data=(GOOD[0][:, 0, 0], GOOD[1])), "images=uint8"),
        (lambda: train(data=(GOOD[0] + 0.5, GOOD[1])), "images=float64"),
        (lambda: train(data=([[1, 2], [3]], [0, 1])), r"images=\[\[1, 2\], \[3\]\]"),
        (
            lambda: train(data={"train": GOOD, "val": (GOOD[0], GOOD[1] + 7)}),
            "7|label 8",
        ),
        (lambda: train(class_names=["a"]), "label 1"),
        (lambda: train(class_names=3), "class_names=3"),
        (lambda: train(callbacks=function), "callbacks=.*function"),
        (lambda: train(callbacks=[function]), r"callbacks\[0\]=.*function"),
        (lambda: train(callbacks=[vit_jax.Callback]), r"callbacks\[0\]=.*Callback"),
        (lambda: train(callbacks=3), "callbacks=3"),
        (lambda: train(epochs=-1), "epochs=-1"),
        (lambda: train(epochs="two"), "epochs='two'"),
        (lambda: train(batch_size=0), "batch_size=0"),
        (lambda: train(lr=0.1), "optim.learning_rate"),
    ],
    "finetune": [
        (lambda: vit_jax.finetune(), "finetune: .*'photos'"),
        (lambda: vit_jax.finetune(None), "photos=None"),
        (lambda: vit_jax.finetune(3, "w"), "photos=3"),
        (lambda: vit_jax.finetune(GOOD[0], "w"), "photos=.*ndarray"),
        (lambda: vit_jax.finetune((GOOD[0], GOOD[1][:3]), "w"), "but 3 labels"),
        (lambda: vit_jax.finetune({"val": GOOD}, "w"), "no 'train' among val"),
        (lambda: vit_jax.finetune("nowhere/at/all", "w"), "nowhere/at/all"),
        (lambda: vit_jax.finetune(GOOD, 3), "workdir=3"),
        (lambda: vit_jax.finetune(GOOD, "w", model=3), "model=3"),
        (lambda: vit_jax.finetune(GOOD, "w", minutes=-1), "minutes=-1"),
        (lambda: vit_jax.finetune(GOOD, "w", minutes=np.nan), "minutes=nan"),
        (lambda: vit_jax.finetune(GOOD, "w", minutes="5"), "minutes='5'"),
        (lambda: vit_jax.finetune(GOOD, "w", folds=1), "folds=1"),
        (lambda: vit_jax.finetune(GOOD, "w", folds=-2), "folds=-2"),
        (lambda: vit_jax.finetune(GOOD, "w", callbacks=function), "callbacks="),
        (lambda: vit_jax.finetune(GOOD, "w", tell=3), "tell=3"),
        (lambda: vit_jax.finetune(GOOD, "w", init="x"), "init"),
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
        (lambda w: evaluate(w, step=3), "step=3"),
        (lambda w: evaluate(w, use_ema="no"), "use_ema='no'"),
        (lambda w: evaluate(w, class_names=3), "class_names=3"),
        (lambda w: evaluate(w, tell=3), "tell=3"),
        (lambda w: evaluate(w, batch_size=0), "batch_size=0"),
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


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [(name, *case) for name, cases in CALLS.items() for case in cases],
)
def test_a_wrong_argument_is_one_line_at_once(
    name, call, message, request, tmp_path, monkeypatch
):
    given = []
    if call.__code__.co_argcount:
        given = [request.getfixturevalue({"w": "weights"}.get(_first(call), "model"))]
    copied = tmp_path / "configs"
    copied.symlink_to(request.config.rootpath / "configs")
    (tmp_path / "tests").symlink_to(request.config.rootpath / "tests")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vit_jax.UserError, match=message) as raised:
        call(*given)
    assert "\n" not in str(raised.value)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"configs", "tests", "w"}  # Nothing is trained.


def _first(call):
    return call.__code__.co_varnames[0]


def test_every_function_is_in_the_table():
    functions = {*vit_jax.__all__} - {"Callback", "PretrainedModel", "UserError"}
    assert functions <= CALLS.keys()


def test_arguments_are_converted_as_keys_are():
    about = fields.Key(help="")
    take = lambda value, default: arguments.take("x", about, value, default)
    assert take(np.int64(3), 0) == 3 and type(take(np.int64(3), 0)) is int
    assert take(2, 0.5) == 2.0
    assert take(np.array(["a", "b"]), ()) == take(iter(["a", "b"]), ()) == ("a", "b")
    assert take(pathlib_path := pathlib.Path("a"), "") == str(pathlib_path)
