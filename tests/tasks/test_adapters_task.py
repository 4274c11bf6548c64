"""Tasks without labels that train low-rank updates of a frozen network."""

import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import (
    assert_same_training,
    begin,
    draw_params,
    kill_after,
    run_command,
    slow_but,
    train,
    trained_on,
    write_workdir,
)
from test_self_supervised import DINOV2, FSDP, MAE, config_of

from vit_jax import weights
from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.errors import UserError
from vit_jax.training import config as configuration

RANK, ALPHA = 2, 3.0
WRAPPED = {"mae": MAE, "dinov2": DINOV2}
OWN = {"mae": {"decoder"}, "dinov2": {"head", "patch_head", "mask_token"}}
BLOCK = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1"
FACTORS = {f"{BLOCK}/{part}/{x}" for part in ("query", "value") for x in "ab"}


def plain(name, **sections):
    """Returns the config of a run of the task itself, which other formats hold."""
    model = {"activation": "gelu"} | sections.pop("model", {})
    return config_of(name, model=model, **sections)


def config(name, of=(), keys=(), **sections):
    """Returns the config of a run of adapters; `keys` are those of their task."""
    raw = fields.to_dict(plain(name, **sections))
    task = {"name": "adapters", "rank": RANK, "alpha": ALPHA}
    task |= {"of": WRAPPED[name] | dict(of)} | dict(keys)
    return configuration.complete(raw | {"task": task})


def build(name, *args, **sections):
    given = config(name, *args, **sections)
    return given.task.build(given.build_model(), given.data, RunLength(4, 1.0))


def flat(tree):
    return flatten_dict(tree, sep="/")


def added(network, factors):
    """Returns a network with scaled products of factors added, by NumPy."""
    network, factors = flat(network), flat(factors)
    for path in {name.rpartition("/")[0] for name in factors}:
        a, b = (np.asarray(factors[f"{path}/{x}"], np.float64) for x in "ab")
        kernel = np.asarray(network[f"{path}/kernel"])
        network[f"{path}/kernel"] = kernel + ALPHA / RANK * (a @ b).reshape(
            kernel.shape
        )
    return network


def assert_close(found, expected):
    found = flat(found)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", WRAPPED)
def test_it_begins_with_the_given_weights(name):
    task = build(name)
    network = draw_params(task.model)
    params, extra = jax.jit(
        lambda network: task.with_backbone(*task.init(jax.random.key(0)), network)
    )(network)
    assert params.keys() == {"network", *OWN[name]}
    assert flat(params["network"]).keys() == FACTORS
    whole, others = task._merged(params, extra)
    networks = [whole["network"], task.backbone(params, extra)]
    if name == "dinov2":
        networks.append(others["teacher"]["network"])
        assert flat(extra["teacher"]["network"]).keys() == FACTORS
    for found in networks:
        jax.tree.map(np.testing.assert_array_equal, found, network)


def test_the_teacher_is_an_average_of_factors():
    plain = {"large_transforms": ("", ""), "gram_weight": 1.0}
    task = build("dinov2", plain)
    student, _ = draw_params(task, seed=1)
    _, extra = draw_params(task)
    extra["step"] = np.int32(0)
    after = jax.jit(task.update)(extra, student, {}, 1)
    momentum = task.inner.teacher_momentum(0)
    mix = lambda old, new: momentum * old + (1 - momentum) * new
    teacher = jax.tree.map(mix, extra["teacher"]["network"], student["network"])
    for factors in (after["teacher"]["network"], after["lora"]):
        assert_close(factors, flat(teacher))
    # Gram anchoring's anchor is an earlier teacher.
    assert_close(after["anchor"], flat(extra["anchor"]))
    base = task._updates.merge(
        jax.tree.map(np.zeros_like, teacher), extra["network"], extra["kernels"]
    )
    assert_close(task.backbone(student, after), added(base, teacher))


@pytest.fixture(scope="module", params=slow_but(["mae"], WRAPPED))
def run(request, tmp_path_factory):
    """Trains from a workdir: the task's name, both workdirs and the report."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    # Sinkhorn-Knopp overflows with heads as of `draw_params`.
    make = train if name == "dinov2" else write_workdir
    make(plain(name), folder / "base")
    given = config(name, init={"checkpoint": str(folder / "base")})
    return name, folder / "base", folder / "run", train(given, folder / "run")


def test_the_workdir_holds_the_merged_network(run):
    name, base, workdir, report = run
    found = weights.open_pretrained(workdir, with_task=True)
    before = weights.open_pretrained(base).params
    assert_close(found.params, added(before, found.task_params["lora"]))
    change = found.params["Transformer"]["encoderblock_0"]
    change = change["MultiHeadDotProductAttention_1"]["query"]["kernel"]
    assert (change != flat(before)[f"{BLOCK}/query/kernel"]).any()
    assert found.task["name"] == "adapters" and found.objective["name"] == name
    teacher = {"teacher"} if name == "dinov2" else set()
    assert found.task_params.keys() == {"lora", *OWN[name], *teacher}
    assert np.isfinite(list(fields.flatten(report["final"]).values())).all()


def test_the_optimiser_has_moments_of_factors_and_of_the_tasks_parameters(
    run, tmp_path
):
    name, base, _, _ = run
    init = {"checkpoint": str(base)}
    _, state, notes = begin(config(name, init=init), tmp_path / "run")
    assert state.params.keys() == {"network", *OWN[name]}
    assert flat(state.params["network"]).keys() == FACTORS
    count = sum(x.size for x in jax.tree.leaves(state.params))
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert moments == 2 * count
    # The base has the same task's parameters, with which the run begins.
    given = weights.open_pretrained(base, with_task=True).task_params
    for part in OWN[name]:
        jax.tree.map(np.testing.assert_array_equal, state.params[part], given[part])
        assert f"{part} of the task: loaded" in notes
    if name == "dinov2":
        line = "network of the task: left out, as adapters begin anew"
        assert any(note.startswith(line) for note in notes)
        teacher = state.extra["teacher"]["head"]
        jax.tree.map(np.testing.assert_array_equal, teacher, given["teacher"]["head"])


def test_a_resumed_run_is_equal_to_the_bit(run, tmp_path):
    name, base, workdir, report = run
    shutil.copytree(workdir, tmp_path / "run")
    kill_after(2, tmp_path / "run")
    again = train(config(name, init={"checkpoint": str(base)}), tmp_path / "run")
    assert again["params_sha256"] == report["params_sha256"]
    assert again["final"] == report["final"]


def test_other_runs_start_from_it(run, tmp_path):
    name, _, workdir, _ = run
    found = weights.open_pretrained(workdir, with_task=True)
    init = {"checkpoint": str(workdir)}
    setup, state, notes = begin(config(name, init=init), tmp_path / "adapters")
    assert_close(setup.task.backbone(state.params, state.extra), flat(found.params))
    assert any(line.startswith("lora of the task: left out") for line in notes)
    assert not any(
        x.any() for path, x in flat(state.extra["lora"]).items() if path.endswith("b")
    )
    setup, state, _ = begin(plain(name, init=init), tmp_path / "plain")
    assert_close(state.params["network"], flat(found.params))
    part = min(OWN[name])
    given = found.task_params if name == "mae" else found.task_params["teacher"]
    jax.tree.map(np.testing.assert_array_equal, state.params[part], given[part])


def test_it_is_written_for_peft(run, tmp_path, capsys):
    _, base, workdir, _ = run
    words = [f"--model={workdir}", "--to=peft", f"--out={tmp_path}/adapter"]
    assert not run_command("convert", words)
    out = capsys.readouterr().out
    assert "with its base, equal to the network of the run" in out
    assert f"--model={base} --to=hf --resolution=8x12 " in out
    found = weights.open_pretrained(tmp_path / "adapter")
    assert_close(found.params, flat(weights.open_pretrained(workdir).params))


@pytest.mark.parametrize(
    ("run", "to", "part"),
    slow_but(
        [("mae", "hf_mae", "decoder")],
        [("mae", "hf_mae", "decoder"), ("dinov2", "dino", "teacher")],
    ),
    indirect=["run"],
)
def test_other_formats_have_the_wrapped_tasks_parameters(run, to, part, tmp_path):
    name, _, workdir, _ = run
    out = tmp_path / ("weights.pth" if to == "dino" else "weights")
    # The authors' code has square images only.
    words = [f"--model={workdir}", f"--to={to}", f"--out={out}", "--resolution=8"]
    assert not run_command("convert", words)
    expected = weights.open_pretrained(workdir, with_task=True)
    found = weights.open_pretrained(out, with_task=True, num_heads=3)
    assert found.task["name"] == name
    expected, found = (flat({part: x.task_params[part]}) for x in (expected, found))
    assert expected.keys() & found.keys()  # The other code has a gain in heads.
    for path in expected.keys() & found.keys():
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "sections"),
    [
        ("mae", 8, {"mesh": {"data": 8}}),
        ("dinov2", 8, FSDP),
        ("mae", 1, {"model": {"scan": True}}),
        ("dinov2", 1, {"model": {"scan": True}}),
    ],
    ids=str,
)
def test_it_is_the_same_on_any_mesh(name, devices, sections):
    alone = trained_on(config(name), 1)
    assert_same_training(trained_on(config(name, **sections), devices), alone)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": 0}, "task.rank=0 must be at least 1"),
        ({"projections": "quary"}, "task.projections: 'quary' matches no layer"),
        ({"of": {"name": "lora"}}, "task.of.name='lora' is not one of"),
        ({"of": MAE | {"mask": 0.5}}, "config key task.of.mask; .*task.of.mask_ratio"),
        ({"of": MAE | {"mask_ratio": 0.99}}, "task.of.mask_ratio=0.99 leaves none"),
    ],
)
def test_what_cannot_be_is_one_line(keys, message):
    with pytest.raises(UserError, match=message) as error:
        build("mae", keys=keys)
    assert "\n" not in str(error.value)
