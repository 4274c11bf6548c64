"""All kinds of evaluation, run together on made images."""

from unittest.mock import Mock

import jax
import numpy as np
import pytest
from helpers import draw_params, tiny_config, train

from vit_jax import models
from vit_jax.config import fields, loading
from vit_jax.config.lengths import RunLength
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint, fewshot, knn
from vit_jax.evaluators.suite import Suite
from vit_jax.training import config as configuration
from vit_jax.training.actions import Evaluating
from vit_jax.training.train_setup import TrainSetup
from vit_jax.weights import open_pretrained

FEW = {"kind": "fewshot", "shots": (1, 3), "seeds": 4, "train": "train", "test": "val"}
KNN = {"kind": "knn", "k": 3, "train": "train", "test": "val"}
PROBE = {"kind": "probe", "train": "train", "test": "val", "l2": (0.1, 0.01)}


def config_of(evals, **data):
    return tiny_config(
        batch_size=16,
        data={"num_examples": 83} | data,
        evals=evals,
        log_every_steps=6,
        eval_every_steps=3,
        checkpoint_every_steps=6,
    )


def suite_of(config, preprocess=None):
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    model = models.create(
        **fields.to_dict(config.model), num_classes=5, image_size=(8, 12)
    )
    suite = Suite(
        model, config.evals, config.data, config.batch_size, mesh, preprocess=preprocess
    )
    return suite, model


def params_of(model, seed=0):
    params = draw_params(model, seed)
    params["head"]["kernel"] = jax.random.normal(jax.random.key(9), (12, 5))
    return params


def features_of(model, params, source):
    images = jax.numpy.asarray(source.images.astype(np.float32) / 127.5 - 1)
    return np.asarray(jax.jit(model.apply)(params, images)["pre_logits"])


@pytest.mark.slow
def test_every_kind_is_scored_as_its_own_function_does(passed):
    config = config_of({"val": "val", "few": FEW, "knn": KNN, "probe": PROBE})
    suite, model = suite_of(config)
    params = {"params": params_of(model), "ema": params_of(model, 1)}
    scores = suite.run(params)
    # Train once and val once, though three or four of them ask for it.
    assert passed == [83, 83]
    train, val = (one.split for one in suite._evaluators["few"].passes)
    for kind, values in params.items():
        known, test = (features_of(model, values, x.source) for x in (train, val))
        found = scores["few"][kind]
        for shots in FEW["shots"]:
            tops = []
            for seed in range(4):
                rows = fewshot.draw(train.labels, shots, seed, 5)
                support = known[rows], train.labels[rows]
                (top,) = fewshot.accuracies(support, (test, val.labels), 5, [1024.0])
                tops.append(top)
            assert found[f"{shots}shot"] == pytest.approx(np.mean(tops), abs=1e-9)
            assert found[f"{shots}shot_std"] == pytest.approx(np.std(tops, ddof=1))
        assert np.std(tops) > 0
        right = knn.predict(known, train.labels, test, 5, k=3) == val.labels
        assert scores["knn"][kind]["top1"] == pytest.approx(right.mean(), abs=1e-9)
        assert scores["probe"][kind]["l2"] in PROBE["l2"]
        assert scores["probe"][kind]["top1"] > 0.3
        assert scores["val"][kind]["examples"] == 83
    assert scores["few"]["params"] != scores["few"]["ema"]
    assert suite.confusions["val"]["params"].counts.sum() == 83
    assert not suite.confusions["few"]


@pytest.mark.slow
def test_a_checkpoint_is_scored_as_at_the_end_of_its_run(tmp_path):
    evals = {"val": "val", "few": FEW, "knn": KNN, "probe": PROBE}
    final = train(config_of(evals), tmp_path)["final"]
    data = {"name": "synthetic", "num_examples": 83}
    raw = {"batch_size": 8, "data": data, "evals": evals, "mesh": {"data": 8}}
    config = loading.complete(configuration.EvaluationConfig, raw)
    pretrained = open_pretrained(tmp_path, use_ema=False)
    scores = checkpoint.evaluate(pretrained, pretrained.preprocess, config).scores
    for name, found in scores.items():
        assert found["weights"] == pytest.approx(final[name]["params"], rel=1e-5)


def test_only_the_support_is_looked_at_where_nothing_else_is_asked(passed):
    config = config_of({"few": FEW})
    suite, model = suite_of(config)
    alone = suite.run({"params": params_of(model)})
    support, test = passed
    assert 15 <= support < 5 * 3 * 4 < 83 == test
    both, _ = suite_of(config_of({"few": FEW, "knn": KNN}))
    assert both.run({"params": params_of(model)})["few"] == alone["few"]


def test_further_strengths_are_told_beside_the_first(passed):
    spec = FEW | {"l2": (64.0, 1024.0), "shots": (3,)}
    suite, model = suite_of(config_of({"one": FEW, "two": spec}))
    found = suite.run({"params": params_of(model)})
    two = found["two"]["params"]
    assert set(two) == {"3shot", "3shot_std", "3shot_l2_1024", "3shot_l2_1024_std"}
    assert two["3shot_l2_1024"] == found["one"]["params"]["3shot"]


def test_classes_with_few_examples_are_counted():
    spec = FEW | {"train": "train[:12]", "shots": (1, 3)}
    suite, model = suite_of(config_of({"few": spec}))
    found = suite.run({"params": params_of(model)})["few"]["params"]
    # Twelve records are two or three of each of the five classes.
    assert "1shot_short" not in found
    assert found["3shot_short"] == 3


def test_each_evaluation_has_its_time():
    evals = {
        "val": "val",
        "few": FEW | {"every": 4},
        "knn": KNN | {"every_epochs": 0.5},
    }
    length = RunLength(11, 9.7)
    setup = Mock(TrainSetup, length=length, total_steps=length.total_steps)
    evaluating = Evaluating(config_of(evals), setup)
    due = [evaluating._due(n) for n in range(1, 13)]
    assert [n + 1 for n, names in enumerate(due) if "val" in names] == [3, 6, 9, 11, 12]
    assert [n + 1 for n, names in enumerate(due) if "few" in names] == [4, 8, 11, 12]
    assert [n + 1 for n, names in enumerate(due) if "knn" in names] == [5, 10, 11, 12]


@pytest.mark.parametrize("kind", [FEW, KNN, PROBE, "val"])
def test_each_kind_can_be_abandoned(kind):
    suite, model = suite_of(config_of({"one": kind}))
    params = {"params": params_of(model)}
    asked = []
    assert suite.run(params, lambda: asked.append(1)) is not None
    for last in (1, len(asked)):
        answers = iter([False] * (last - 1) + [True])
        assert suite.run(params, lambda answers=answers: next(answers)) is None


def test_another_data_set_has_its_own_classes_and_preparation(tmp_path):
    digits = {
        "name": "digits",
        "eval_transform": "resize(8) | resize",
        "train": "train[:300]",
    }
    evals = {
        "few": {"kind": "fewshot", "seeds": 2, "shots": (5,)} | digits,
        "knn": {"kind": "knn"} | digits,
    }
    suite, model = suite_of(config_of(evals))
    found = suite.run({"params": params_of(model)})
    # Of random features; a tenth is chance.
    assert found["few"]["params"]["5shot"] > 0.2
    assert found["knn"]["params"]["top1"] > 0.25
    with pytest.raises(UserError, match=r"evals.top: .* 5 classes lack 5 of 10: '5'"):
        suite_of(config_of({"top": {"name": "digits", "split": "test"}}))


def test_what_travels_with_weights_prepares_the_images(passed):
    whole = Preprocess((8, 12), squash=True)
    zoomed = Preprocess((8, 12), squash=True, crop_fraction=0.5)
    scores = []
    for preprocess in (None, whole, zoomed):
        suite, model = suite_of(config_of({"val": "val"}), preprocess=preprocess)
        scores.append(suite.run({"params": params_of(model)})["val"]["params"])
    assert scores[0] == scores[1]  # The images have that size.
    assert scores[2]["loss"] != scores[1]["loss"]
    assert scores[2]["examples"] == 83


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "real"}, "kind='real' is for classifiers of ImageNet's 1,000"),
        ({"kind": "objectnet"}, "kind='objectnet' is for classifiers of ImageNet's"),
        (FEW | {"name": "absent_set"}, "data.name='absent_set': no such prepared"),
        (FEW | {"eval_transform": "flip"}, "eval_transform='flip'"),
    ],
)
def test_what_does_not_fit_is_refused(spec, message):
    with pytest.raises(UserError, match=message):
        suite, model = suite_of(config_of({"one": spec}))
        suite.run({"params": params_of(model)})


def test_the_evaluations_of_a_run_read_val_where_no_split_is_stated():
    config = config_of({"val": "", "few": FEW | {"test": ""}}, num_examples=20)
    told = suite_of(config)[0].described()
    assert told["val"]["splits"] == ["val"]
    assert told["few"]["splits"] == ["train", "val"]


def test_layers_of_several_evaluations_share_a_pass(passed):
    evals = {
        "knn": KNN,
        "probe": PROBE | {"layers": (0, -1)},
        "last": KNN | {"layers": (0,)},
    }
    suite, model = suite_of(config_of(evals))
    scores = suite.run({"params": params_of(model)})
    assert passed == [83, 83]
    assert scores["last"] == scores["knn"]  # A network of one layer.
    assert scores["probe"]["params"]["top1"] > 0.3


@pytest.mark.slow
def test_a_run_scores_features_of_layers(tmp_path):
    evals = {"joined": KNN | {"layers": (0, -1)}, "last": KNN}
    config = tiny_config(total_steps=2, model={"depth": 2}, evals=evals)
    scores = train(config, tmp_path / "run")["final"]
    for name in evals:
        assert 0 <= scores[name]["params"]["top1"] <= 1
