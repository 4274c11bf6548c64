"""Transforms in a module of the user's: found, checked, run, resumed, refused."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kill_after, tiny_config, train

from vit_jax.data import pipeline
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_source
from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError

SIZE = (13, 17)
ROOT = pathlib.Path(__file__).parents[3]
# One transform on the host and one on the device.
EXAMPLE = (ROOT / "docs" / "examples" / "noise.py").read_text()
# Each makes a mistake of its own.
WRONG = '''
import dataclasses

import numpy as np

from vit_jax.data.transforms.mixing import Mixup


@dataclasses.dataclass(frozen=True)
class Host:
    runs_on = "host"
    what: str = ""

    def __call__(self, image, rng):
        if self.what == "write":
            image[0] = 0
        return {"float": image / 255, "grey": image[..., 0], "none": None}[self.what]


@dataclasses.dataclass(frozen=True)
class Device:
    runs_on = "device"
    what: str = ""

    def __call__(self, images, labels, index, key):
        if self.what == "raise":
            raise KeyError("of mine")
        return {"flat": (images[..., 0], labels), "labels": (images, labels[:1])}[
            self.what
        ]


@dataclasses.dataclass(frozen=True)
class Mine(Mixup):
    alpha: float = 1.0


@dataclasses.dataclass(frozen=True)
class Plain:
    share: float = 0.5


class Unfrozen:
    runs_on = "host"


@dataclasses.dataclass(frozen=True)
class Half:
    """Keeps every second row and column."""

    runs_on = "host"
    in_eval = True

    def __call__(self, image, rng):
        return np.ascontiguousarray(image[::2, ::2])

    def output_size(self, before):
        return before and tuple(-(-side // 2) for side in before)
'''


@pytest.fixture(autouse=True)
def outside(tmp_path, monkeypatch):
    """Makes the modules importable."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("noise", EXAMPLE), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


def rows(data, **more):
    """Returns the images of the first batch."""
    source = open_source(data, "train")
    with pipeline.train_batches(
        source, data, batch_size=8, seed=3, start=0, stop=1, **more
    ) as batches:
        return next(batches)["image"]


def test_a_host_transform_runs_in_the_loader(data_config):
    plain = rows(data_config(train_transform=""))
    speckled = rows(data_config(train_transform="noise:Speckle(share=0.25)"))
    changed = (speckled != plain).any(-1)
    assert (speckled[changed] == 255).all()
    assert 0.2 < changed.mean() < 0.3
    np.testing.assert_array_equal(
        rows(data_config(train_transform="noise:Speckle(0)")), plain
    )


def test_loader_processes_find_it_too(data_config):
    ops = "noise:Speckle(share=0.25)"
    expected = rows(data_config(train_transform=ops))
    found = rows(data_config(train_transform=ops, num_workers=1))
    np.testing.assert_array_equal(found, expected)


def test_a_set_in_memory_is_not_changed(data_config):
    with pytest.raises(
        UserError, match=r"wrong:Host: runs .* ValueError: assignment destination is"
    ):
        rows(data_config(train_transform="wrong:Host('write')"))


def test_a_device_transform_draws_by_the_place_in_the_run():
    ops = parse.parse_train("noise:Speckle | flip | noise:Noise(std=4)", SIZE)
    assert [len(part) for part in ops] == [1, 2]
    images, labels = jnp.full((6, *SIZE, 3), 128, jnp.uint8), jnp.eye(6)
    index, key = jnp.arange(6, dtype=jnp.uint32), jax.random.key(0)
    run = jax.jit(lambda *batch: device_transforms.apply(ops.device, *batch, key)[0])
    whole = run(images, labels, index)
    np.testing.assert_allclose(whole.std(), 4, rtol=0.1)
    part = run(images[2:5], labels[2:5], index[2:5])
    np.testing.assert_array_equal(part, whole[2:5])


def test_one_that_mixes_examples_takes_no_copy_of_the_same_image():
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (6, *SIZE, 3)))
    batch = images.astype(jnp.uint8), jnp.eye(6), jnp.arange(6, dtype=jnp.uint32)
    found = []
    for line in ("mixup(1.0)", "wrong:Mine"):
        ops = parse.parse_train(line, SIZE).device
        ops = device_transforms.apart(ops, 3)
        found.append(device_transforms.apply(ops, *batch, jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    labels = np.asarray(found[1][1])
    assert (labels[0] > 0).nonzero()[0].tolist() == [0, 3]


def test_its_size_counts_for_an_enlargement():
    ops = parse.parse_train("resize((8, 5)) | wrong:Half | upsample", SIZE)
    assert parse.loaded(ops, DataConfig()) == {"image": ((4, 3, 3), "uint8")}
    (half,) = parse.parse_eval("wrong:Half()", SIZE)
    image = half(np.zeros((7, 9, 3), np.uint8), None)
    assert image.shape == (4, 5, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("absent:Speckle", "data.train_transform='absent:Speckle': no module 'absent'"),
        ("noise:Speckel", r"train_transform='noise:Speckel': .*noise.py has no"),
        ("noise:Speckle(share=2)", r"share=2 must be at most 1; it is noise:Speckle\("),
        ("noise:Speckle('a')", "share='a' is not a number; it is noise:Speckle"),
        ("noise:Speckle(True)", "share=True is not a number"),
        ("noise:Speckle(shares=1)", r"argument 'shares'; it is .*Speckle\(share=0.1\)"),
        ("noise:Speckle(open('x'))", "cannot read"),
        ("noise:Noise | noise:Speckle", "noise:Speckle runs in the loader, so it must"),
        ("noise:np", "is <module .*: it must be a frozen dataclass with runs_on"),
        ("wrong:Plain", "must be a frozen dataclass with runs_on"),
        ("wrong:Unfrozen", "must be a frozen dataclass with runs_on"),
        ("noyse.Speckle", "cannot read"),
    ],
)
def test_a_mistake_in_the_line_is_told_in_one_line(line, message):
    with pytest.raises(UserError, match=message) as found:
        parse.parse_train(line, SIZE)
    assert "\n" not in str(found.value)


def test_evaluation_takes_one_that_says_it_may():
    for line in ("noise:Speckle", "noise:Noise"):
        with pytest.raises(
            UserError, match=rf"data\.eval_transform='{line}': .* is for trai"
        ):
            parse.parse_eval(line, SIZE)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("float", r"returned float64 \(13, 17, 3\), not uint8 \(H, W, C\)"),
        ("grey", r"returned uint8 \(13, 17\), not uint8 \(H, W, C\)"),
        ("none", "returned <class 'NoneType'> , not uint8"),
        ("else", "runs the code of that module, which raised KeyError: 'else'"),
    ],
)
def test_what_it_returns_on_the_host_is_checked(what, message, data_config):
    match = rf"made train record \d+: data\.train_transform=.*wrong:Host:? {message}"
    with pytest.raises(UserError, match=match):
        rows(data_config(train_transform=f"wrong:Host({what!r})"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "runs the code of that module, which raised KeyError: 'of mine'"),
        ("flat", r"returned arrays of the shapes \[\(6, 13, 17\), \(6, 6\)\], not"),
        ("labels", r"\(1, 6\)\], not images \(B, H, W, C\) and labels \(6, 6\)"),
    ],
)
def test_what_it_returns_on_the_device_is_checked(what, message):
    ops = parse.parse_train(f"wrong:Device({what!r})", SIZE).device
    images, labels = jnp.zeros((6, *SIZE, 3), jnp.uint8), jnp.eye(6)
    index = jnp.arange(6, dtype=jnp.uint32)
    with pytest.raises(UserError, match=rf"wrong:Device:? .*{message}"):
        device_transforms.apply(ops, images, labels, index, jax.random.key(0))


@pytest.mark.slow
def test_a_run_with_them_resumes_exactly(tmp_path):
    ops = "noise:Speckle(0.2) | flip | noise:Noise(std=4)"
    config, run = tiny_config(data={"train_transform": ops}), tmp_path / "run"
    whole = train(config, run)
    kill_after(3, run)
    assert train(config, run)["params_sha256"] == whole["params_sha256"]
    other = ops.replace("0.2", "0.3")
    with pytest.raises(
        UserError, match=r"another config \(data.train_transform: noise"
    ):
        train(tiny_config(data={"train_transform": other}), run)
