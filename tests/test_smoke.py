"""Every recipe comes to life: initialised by shape, and three real steps."""

import functools
import pathlib
import resource

import jax
import numpy as np
import pytest
import warm
from flax.traverse_util import flatten_dict
from helpers import (
    ON_SITE,
    RECIPES,
    assert_took_three_steps,
    commands_of,
    run_python,
    slow_but,
)
from hosts import xla_flags

from vit_jax import weights
from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.tasks.task import backbone_paths
from vit_jax.training import config as configuration
from vit_jax.training import optim, train_state

ROOT = pathlib.Path(__file__).parent.parent
# Programs of evaluations take a third of the time; commands of the site run k-NN.
EVALUATED = ("b16_i1k", "clip", "segmentation")
_UNEVALUATED = "--config.evals={}"
# Of training with labels, with texts and without either.
FAST = ("b16_i21k", "clip", "deit", "digits", "dinov2", "mae")


@pytest.mark.parametrize("recipe", slow_but(FAST, RECIPES))
def test_recipe_initialises(recipe):
    config = configuration.load(f"{ROOT}/configs/{recipe}.py")
    if getattr(config.model, "depth", None) == 0:  # Of 12 layers and more: two show it.
        config = fields.replace(config, {"model.depth": 2})
        if len(getattr(config.task, "layers", ())) > 2:
            config = fields.replace(config, {"task.layers": (0, 1)})
    if hasattr(config.task, "teachers"):  # Their files are not here.
        config = fields.replace(config, {"task.teachers": ("untrained",)})
    examples = config.data.num_examples or 10_000_000
    run = RunLength(config.num_steps(examples), examples / config.batch_size)
    task = config.task.build(config.build_model(), config.data, run)
    params, extra = jax.eval_shape(task.init, jax.random.key(0))
    network = task.backbone(params, extra)
    num_classes = config.data.num_classes if config.task.has_classifier else 0
    assert ("head" in network) == bool(num_classes)
    if num_classes:
        assert network["head"]["kernel"].shape[1] == num_classes

    # Every mask matches, and the schedule starts and ends where it should.
    peak = config.optim.peak_learning_rate(config.batch_size)
    rate = optim.learning_rate(config.optim, peak, run)
    tree, _, within = backbone_paths(task, params, extra)["path"].partition("/")
    of_network = config.model, within if tree == "params" else task.trained
    tx = optim.optimizer(config.optim, params, rate, run, *of_network)
    total = run.total_steps
    create = functools.partial(
        train_state.create_train_state, init_optimizer=tx.init, seed=0
    )
    average = config.ema.decay > 0
    state = jax.eval_shape(lambda p: create(p, extra, average=average), params)
    assert (state.average is None) == (config.ema.decay == 0)
    if config.optim.schedule.name != "constant":
        # SimMIM ends with a tenth of its rate.
        assert float(rate(total)) <= max(1e-5, peak / 10) and float(rate(total)) < peak


# Runs in the place of the checkpoints that commands begin with, by their networks.
BEGINNINGS = {
    "R": "configs/bit_hyperrule.py:model=R50x1,dataset=cifar100",
    "": "configs/b16_i21k.py",
}


def starts(words):
    """Returns the flags of a command that name the run which it begins with."""
    flags = {word.partition("=")[0] for word in words}
    return flags & {"--config.init", "--config.init.checkpoint"}


def quick(spec):
    """Returns a config's small version as flags, its network of one block."""
    spec = f"{spec}{',' if ':' in spec else ':'}quick"
    blocks = hasattr(configuration.load(f"{ROOT}/{spec}").model, "depth")
    return [f"--config={spec}", *["--config.model.depth=1"] * blocks]


def quick_words(words, folder, number):
    """Returns the words of the quick version of a training command of a config's head.

    Made images stand for its own, and runs in the folder for those that it begins with.
    """
    flags = dict(word.partition("=")[::2] for word in words)
    spec = flags["--config"]
    name = flags.get("--workdir", "").partition("gs://.../")[2] or str(number)
    found = [*quick(spec), f"--workdir={folder / name}"]
    for flag in starts(words):
        usual = "R" if "model=R" in spec else ""
        before = flags[flag].partition("gs://.../")[2] or f"before{usual}"
        found.append(f"{flag}={folder / before}")
    return found


def kernels(place):
    """Returns the kernels of a run's network without its classifier's."""
    flat = flatten_dict(weights.open_pretrained(str(place)).params, sep="/")
    return {k: v for k, v in flat.items() if k.endswith("kernel") and "head" not in k}


def heads():
    """Returns recipes and their commands: the first, and those that begin with a run.

    Others of the same recipe differ in what its quick version replaces.
    """
    # Others begin with b16_i21k, which jft repeats with another data set, as dinov3_7b does
    # dinov3 with other sizes; the recipes of flowers are run by test_config_commands.py.
    elsewhere = (
        *ON_SITE,
        "b16_i21k",
        "flowers",
        "flowers_finetune",
        "jft",
        "dinov3_7b",
    )
    for recipe in RECIPES:
        if recipe not in elsewhere and "digits" not in recipe:
            lines = commands_of(ROOT / "configs" / f"{recipe}.py")
            first, *more = (words for words in lines if words[0] == "vit_jax.train")
            yield from ((recipe, words) for words in (first, *filter(starts, more)))


@pytest.mark.slow
def test_recipes_take_three_steps_on_made_data(tmp_path):
    jobs = [
        [*quick(spec), f"--workdir={tmp_path / f'before{name}'}", _UNEVALUATED]
        for name, spec in BEGINNINGS.items()
    ]
    for number, (recipe, words) in enumerate(heads()):
        jobs.append(quick_words(words, tmp_path, number))
        jobs[-1] += [_UNEVALUATED] * (recipe not in EVALUATED)
    commands = [["python", "-m", "vit_jax.train", *words] for words in jobs]
    warm.run_all(commands, ROOT, XLA_FLAGS=xla_flags())
    begun = 0
    for words in jobs:
        flags = dict(word.partition("=")[::2] for word in words)
        workdir = flags["--workdir"]
        assert_took_three_steps(pathlib.Path(workdir))
        for flag in starts(words):
            before, after = kernels(flags[flag]), kernels(workdir)
            assert before.keys() & after.keys(), words
            for name in before.keys() & after.keys():
                a, b = before[name].ravel(), after[name].ravel()
                cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
                assert cosine > 0.9, (words, name)
            begun += 1
    assert begun >= 8


def test_the_loop_imports_in_few_seconds_and_without_frameworks():
    code = (
        "import sys, vit_jax.training.loop;"
        # Not torch, which tensorboardX imports where it is installed.
        "print([m for m in ('tensorflow', 'sklearn') if m in sys.modules])"
    )

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = run_python("-c", code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert out.stdout.strip() == "[]", out.stderr
    # CPU time, the same on a busy and on an idle machine.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 5
