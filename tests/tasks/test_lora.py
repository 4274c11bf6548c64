"""LoRA: changes of low rank, merged as if they were beside the kernels.

And runs of both tasks on a frozen network, LoRA and the linear probe.
"""

import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import (
    draw_params,
    evaluated,
    kill_after,
    tiny_config,
    train,
    write_workdir,
)

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.tasks.lora import LoraConfig
from vit_jax.training import loop

SIZE = {"width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 20}
RUN = RunLength(4, 1.0)


def build(projections=("query", "value"), num_classes=5, **options):
    data = DataConfig(image_size=(8, 12), num_classes=num_classes)
    model = models.create(
        "Ti/4", num_classes=num_classes, image_size=(8, 12), **SIZE | options
    )
    config = LoraConfig(rank=2, alpha=3.0, projections=projections)
    return config.build(model, data, RUN)


def moved(task):
    """Returns parameters whose changes are not zero, and what is beside them."""
    params, extra = draw_params(task)
    return params, jax.jit(task.update)(extra, params, None, 1)


def flat(tree):
    return flatten_dict(tree, sep="/")


def test_it_begins_with_the_network_itself():
    task = build()
    params, extra = jax.jit(task.init)(jax.random.key(0))
    merged = task.merge(params, extra)
    jax.tree.map(np.testing.assert_array_equal, merged, extra["network"])
    names = {path.rpartition("/")[0] for path in flat(params["lora"])}
    block = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_1/{}"
    kinds = ("query", "value")
    assert names == {block.format(i, kind) for i in range(2) for kind in kinds}
    a = np.stack([x for path, x in flat(params["lora"]).items() if path.endswith("/a")])
    assert a.shape == (4, 12, 2) and 0.2 < a.std() * 12**0.5 < 2
    # Runs of earlier versions have this layout, and resume.
    assert extra.keys() == {"network", "kernels"} and params.keys() == {"lora", "head"}
    assert flat(extra["kernels"]).keys() == names
    # Another run's network has its updates, which are not added once more.
    assert task.left_out(params, extra, params).keys() == params.keys()
    # Of another network come the classifier and the kernels.
    other = draw_params(task.model)
    params, extra = task.with_backbone(params, extra, other)
    jax.tree.map(np.testing.assert_array_equal, task.merge(params, extra), other)


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_merged_and_unmerged_are_equal(scan):
    """Beside each projection x W + b stands alpha / rank x A B."""
    task = build((".*/encoderblock_1/.*/out", "Dense_0", "embedding"), scan=scan)
    params, extra = moved(task)
    lora = flat(params["lora"])
    assert len(lora) == 2 * 4
    images = np.random.default_rng(2).normal(size=(3, 8, 12, 3))
    images = jnp.asarray(images, jnp.float32)
    merged = jax.jit(task.model.apply)(extra["network"], images)["logits"]
    base = {**extra["network"], **params["head"]}
    every = jax.eval_shape(build((".*",)).init, jax.random.key(0))[1]["kernels"]
    assert set(flat(extra["kernels"])) < set(flat(every))
    plain = build((".*/encoderblock_1/.*/out", "Dense_0", "embedding"))
    zeros = jax.tree.map(jnp.zeros_like, params["lora"])
    base = plain.merge({**params, "lora": zeros}, extra)

    def beside(next_function, args, kwargs, context):
        path = "/".join(context.module.path)
        y = next_function(*args, **kwargs)
        if context.method_name != "__call__" or f"{path}/a" not in lora:
            return y
        x = args[0]
        if path == "embedding":  # Patches of 4 by 4.
            B, Y, X, C = x.shape
            x = x.reshape(B, Y // 4, 4, X // 4, 4, C).swapaxes(2, 3)
            x = x.reshape(B, Y // 4, X // 4, -1)
        else:  # Heads by their width, or one axis.
            x = x.reshape(y.shape[:-1] + (-1,))
        return y + 1.5 * ((x @ lora[f"{path}/a"]) @ lora[f"{path}/b"]).reshape(y.shape)

    apply = lambda params: plain.model.apply(params, images)["logits"]
    before = jax.jit(apply)(base)
    with nn.intercept_methods(beside):
        unmerged = jax.jit(lambda params: apply(params))(base)
    assert abs(merged - before).max() > 0.1
    np.testing.assert_allclose(merged, unmerged, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the workdir of a classifier."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    write_workdir(tiny_config(total_steps=1, evals={}), workdir)
    return workdir


@pytest.mark.parametrize(
    ("task", "trains"),
    [
        pytest.param(
            {"name": "lora", "rank": 2},
            {"query", "value", "head"},
            marks=pytest.mark.slow,
        ),
        ({"name": "linear_probe"}, {"head"}),
    ],
)
def test_a_run_resumes_and_is_a_network_as_any_other(
    trained, tmp_path, capsys, task, trains
):
    def config_of(**sections):
        keys = {"total_steps": 2, "checkpoint_every_steps": 1, "ema": {"decay": 0.0}}
        keys |= {"optim": {"name": "adam", "learning_rate": 0.01}}
        init = {"checkpoint": str(trained)}
        return tiny_config(task=task, init=init, **keys | sections)

    run = tmp_path / "run"
    report = train(config_of(), run)
    kill_after(1, run)
    shutil.copytree(run, tmp_path / "scanned")
    again = train(config_of(), run)
    assert again["params_sha256"] == report["params_sha256"]
    opened = weights.open_pretrained(run)
    assert opened.task["name"] == task["name"]
    given, found = flat(weights.open_pretrained(trained).params), flat(opened.params)
    assert found.keys() == given.keys()
    changed = {
        path.rpartition("/")[0] for path in found if (found[path] != given[path]).any()
    }
    assert {path.rpartition("/")[2] for path in changed} == trains
    scores = evaluated(run, tmp_path, capsys)
    ended = report["final"]["val"]["params"]
    assert {key: scores[key] for key in ended} == pytest.approx(ended, rel=1e-5)
    if task["name"] != "lora":
        return
    # A scan resumes what no scan began.
    loop.train(config_of(model={"scan": True}), tmp_path / "scanned")
    scanned = flat(weights.open_pretrained(tmp_path / "scanned").params)
    for name, value in found.items():
        np.testing.assert_allclose(scanned[name], value, atol=1e-5)


@pytest.mark.parametrize(
    ("projections", "options", "message"),
    [
        (("query",), {"num_classes": 0}, "data.num_classes=0 with task.name='lora'"),
        (("quary",), {}, "projections: 'quary' matches no layer of 'Ti/4': choose of"),
        (("que[ry",), {}, "task.projections: 'que.ry' is not a regular expression"),
        (("head",), {}, "task.projections: 'head' matches no layer of 'Ti/4'"),
    ],
)
def test_what_cannot_be_is_refused(projections, options, message):
    with pytest.raises(UserError, match=message) as error:
        build(projections, **options)
    assert "\n" not in str(error.value)
