"""Averages of networks: the plain one, the greedy choice, and the command."""

import dataclasses

import jax
import numpy as np
import pytest
import trees
from helpers import tiny_config, train

from vit_jax import average, weights
from vit_jax.command_line import cli
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint
from vit_jax.tools.soups import averaging


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of digits from one start, of other seeds; the last at a bad rate."""
    root = tmp_path_factory.mktemp("soup")
    digits = {"name": "digits", "num_classes": 10, "num_examples": 0, "channels": 1}
    digits |= {"image_size": (8, 8)}
    start = root / "start"
    first = tiny_config(
        data=digits,
        batch_size=64,
        total_steps=60,
        optim={"learning_rate": 0.02},
        evals={},
        checkpoint_every_steps=1_000,
    )
    train(first, start)
    folders = []
    for seed, rate in ((1, 0.003), (2, 0.003), (3, 1.0)):
        config = tiny_config(
            data=digits | {"split": "train[:1000]"},
            seed=seed,
            init=str(start),
            batch_size=64,
            total_steps=4,
            evals={"val": "train[1000:1200]"},
            optim={"learning_rate": rate, "name": "sgd"},
            ema={"decay": 0.0},
            checkpoint_every_steps=1_000,
        )
        train(config, root / f"seed{seed}")
        folders.append(str(root / f"seed{seed}"))
    return folders


def test_the_mean_is_that_of_all_parameters():
    plain = trees.checkpoint(trees.encoder())

    def times(n):
        params = jax.tree.map(lambda x: np.float32(n) * x, plain.params)
        return dataclasses.replace(plain, params=params, source=str(n))

    models = [*map(times, (1, 2, 4))]
    found = averaging.average(models)
    assert found.taken == ("1", "2", "4")
    for path, leaf in jax.tree.leaves_with_path(found.average.params):
        of = [dict(jax.tree.leaves_with_path(m.params))[path] for m in models]
        expected = np.mean(of, axis=0, dtype=np.float64)
        np.testing.assert_allclose(leaf, expected, rtol=1e-6)
        assert leaf.dtype == of[0].dtype
    other = dataclasses.replace(plain, options=plain.options | {"depth": 9})
    match = r"differs from .* in options\.depth \(9, not 2\)"
    with pytest.raises(UserError, match=match):
        averaging.mean([plain, other])


def test_the_greedy_soup_leaves_out_what_makes_it_worse():
    # The score is the distance from 1: 0.9 and 1.2 are better together, 5 never.
    def made(value):
        return dataclasses.replace(plain, params={"w": np.float32(value)})

    plain = weights.pretrained.Pretrained({}, {}, "vit_jax", "made")
    models = [made(5.0), made(1.2), made(0.9)]
    chosen, scores, best = averaging.greedy(
        models, lambda model: -abs(float(model.params["w"]) - 1)
    )
    assert chosen == [2, 1]
    np.testing.assert_allclose(scores, [-4, -0.2, -0.1], atol=1e-6)
    assert best == pytest.approx(-0.05, abs=1e-6)


@pytest.mark.slow
def test_the_command_writes_a_model_of_the_best(runs, tmp_path, capsys):
    out = tmp_path / "soup.safetensors"
    words = [*runs, "--by=val", f"--out={out}"]
    assert average.main(cli.parse(average.parser(), words)) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = {line.split()[1]: line for line in lines[:-1]}
    assert "*" not in scores[runs[2]]  # At such a rate it has forgotten all.
    assert "*" in lines[0]
    best = float(lines[0].split("%")[0])
    assert float(scores["average"].split("%")[0]) >= best
    opened = weights.open_pretrained(str(out))
    config = averaging.evaluation_of(runs[0], "val")
    how = weights.preprocessing_of(opened)
    found = checkpoint.evaluate(opened, how, config).scores["val"]["weights"]["top1"]
    assert f"{found:.2%}" == scores["average"].split()[0]


@pytest.mark.slow
def test_what_cannot_be_averaged_is_refused(runs, tmp_path):
    def command(*words):
        flags = cli.parse(average.parser(), [*words, f"--out={tmp_path / 'a'}"])
        average.main(flags)

    with pytest.raises(UserError, match="has no such evaluation; it has val"):
        command(*runs, "--by=test")
    with pytest.raises(UserError, match="two runs or more"):
        command(runs[0], runs[0])
