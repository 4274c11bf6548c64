"""ImageNet-C: all sets are read, and errors are divided by AlexNet's."""

import shutil

import jax
import numpy as np
import pytest
from helpers import TINY, draw_params, tiny_config
from PIL import Image

from vit_jax import models
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.evaluators import corruptions
from vit_jax.evaluators.corruptions import ALEXNET, ALEXNET_CLEAN, GROUPS, SEVERITIES
from vit_jax.evaluators.suite import Suite

NAMES = ("bee", "cat", "ant")  # Of the model; folders are sorted.
COUNTED = [name for group in GROUPS if group != "extra" for name in GROUPS[group]]


def answers(errors, count=1000):
    """Returns right and wrong answers with given errors by corruption and severity."""
    return {
        of_set: np.arange(count) >= round(error * count)
        for of_set, error in errors.items()
    }


def test_the_mean_is_of_the_errors_divided_by_alexnets():
    assert list(ALEXNET) == COUNTED and len(COUNTED) == 15
    drawn = np.random.default_rng(0).integers(100, 900, (15, 5)) / 1000
    errors = {
        (name, severity): drawn[i, severity - 1]
        for i, name in enumerate(COUNTED)
        for severity in SEVERITIES
    }
    found = corruptions.score(answers(errors), np.arange(8) >= 3).metrics
    alexnet = np.array(list(ALEXNET.values()))
    # Sums over the severities, as in the paper's equation.
    ce = drawn.sum(1) / (5 * alexnet)
    assert found["mce"] == pytest.approx(ce.mean())
    relative = (drawn - 3 / 8).sum(1) / (5 * (alexnet - ALEXNET_CLEAN))
    assert found["relative_mce"] == pytest.approx(relative.mean())
    assert found["clean_error"] == 3 / 8
    assert found["mean_error"] == pytest.approx(drawn.mean())
    assert found["ce/fog"] == pytest.approx(ce[COUNTED.index("fog")])
    assert found["error/fog"] == pytest.approx(drawn[COUNTED.index("fog")].mean())
    assert found["error/fog/4"] == pytest.approx(errors["fog", 4])
    assert found["examples"] == 75_000
    # What is not among the 15 is not in the means.
    more = errors | {("saturate", severity): 0.5 for severity in SEVERITIES}
    again = corruptions.score(answers(more)).metrics
    assert again["mce"] == found["mce"] and again["mean_error"] == found["mean_error"]
    assert again["error/saturate"] == pytest.approx(0.5)
    assert not {"ce/saturate", "relative_mce", "clean_error"} & again.keys()


def test_alexnet_itself_has_the_error_1():
    errors = {(name, s): ALEXNET[name] for name in COUNTED for s in SEVERITIES}
    clean = np.arange(1000) >= 1000 * ALEXNET_CLEAN
    found = corruptions.score(answers(errors, 100_000), clean).metrics
    assert found["mce"] == pytest.approx(1, abs=1e-5)
    assert found["relative_mce"] == pytest.approx(1, abs=1e-5)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The folders of ImageNet-C, some in those of the archives, and clean images."""
    root, rng = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for group, names in GROUPS.items():
        for name in names if group != "extra" else ():
            above = root / "c" / (group if group == "blur" else "") / name
            for place in [above / str(severity) for severity in SEVERITIES]:
                write(place, rng)
    write(root / "clean" / "val", rng)
    return root


def write(place, rng):
    for name in sorted(NAMES):
        (place / name).mkdir(parents=True)
        cells = rng.integers(0, 256, (2, 3, 3), np.uint8)
        pixels = cells.repeat(4, 0).repeat(4, 1)
        Image.fromarray(pixels).save(place / name / "1.png")


def suite_of(root, folder="c", **keys):
    evals = {
        "c": {"kind": "corruptions", "data_dir": str(root / folder), "clean": "val"}
        | keys,
        "clean": {"kind": "classification", "split": "val"},
    }
    data = {"name": "folder", "data_dir": str(root / "clean"), "split": "val"}
    data |= {"num_classes": 3, "num_examples": 3}
    config = tiny_config(data=data, evals=evals)
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    model = models.create(variant="Ti/4", num_classes=3, image_size=(8, 12), **TINY)
    suite = Suite(model, config.evals, config.data, 4, mesh, class_names=NAMES)
    return suite, model


def test_all_sets_are_read_by_one_program(sets, passed):
    suite, model = suite_of(sets)
    params = draw_params(model)
    kernel = jax.random.normal(jax.random.key(9), (TINY["width"], 3))
    params["head"] = {"kernel": kernel, "bias": np.zeros(3, np.float32)}
    scores = suite.run({"params": params})
    found = scores["c"]["params"]
    assert passed == [3] * 76  # The clean images once for both.
    # One for all sets, and one that computes the losses of the clean images too.
    assert [step._cache_size() for step in suite._steps.values()] == [1, 1]
    # One note on the classes, not one for each set.
    assert len(suite.notes) == len(set(suite.notes)) <= 2
    assert found["clean_error"] == pytest.approx(1 - scores["clean"]["params"]["top1"])

    @jax.jit
    def predicted(images):
        return model.apply(params, images)["logits"].argmax(-1)

    wrong = {}
    for name, severity in ((n, s) for n in COUNTED for s in SEVERITIES):
        above = sets / "c" / ("blur" if name in GROUPS["blur"] else "") / name
        paths = [above / str(severity) / of_class / "1.png" for of_class in NAMES]
        images = np.stack([np.array(Image.open(path)) for path in paths])
        best = predicted(images.astype(np.float32) / 127.5 - 1)
        wrong[name, severity] = float((best != np.arange(3)).mean())
        assert found[f"error/{name}/{severity}"] == pytest.approx(wrong[name, severity])
    assert len(set(wrong.values())) > 1
    described = suite.described()["c"]
    assert described["splits"][:2] == ["gaussian_noise/1", "gaussian_noise/2"]
    assert described["dataset"] == "c" and len(suite.sources()) == 77


def test_a_missing_set_is_named(sets, tmp_path):
    shutil.copytree(sets / "c", tmp_path / "c")
    with pytest.raises(
        UserError, match="evals.c.data_dir=.*speckle_noise/1 is missing"
    ):
        suite_of(sets, extra=True)
    shutil.rmtree(tmp_path / "c" / "fog" / "3" / "bee")
    (tmp_path / "clean").symlink_to(sets / "clean")
    with pytest.raises(UserError, match="class folders of folder fog/3 are not those"):
        suite_of(tmp_path)
    shutil.rmtree(tmp_path / "c" / "fog" / "3")
    with pytest.raises(UserError, match="fog/3 is missing.*weather.tar"):
        suite_of(tmp_path)
    with pytest.raises(UserError, match="data_dir=.*/d' is not a folder"):
        suite_of(tmp_path, "d")
    with pytest.raises(UserError, match="imagenet2012_corrupted/gaussian_noise_1'"):
        suite_of(sets, name="imagenet2012_corrupted")
