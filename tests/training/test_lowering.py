"""The whole training step of every recipe and task is lowered for GPUs and TPUs.

Neither is needed for it: what one of them has no rule for, an operation or a type, ends
here and not in a job.
"""

import itertools

import jax
import pytest
from helpers import ALIKE, RECIPES, ROOT, slow_but, write_weights

from vit_jax.config import fields
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import mesh as meshes
from vit_jax.tasks import TASKS
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

# Those with a recipe of their name are lowered with it.
OF_A_RECIPE = {"classification", "contrastive", "dino", "mae", "masked_patch", "simmim"}
OF_A_RECIPE |= {"dinov2", "feature_distillation", "segmentation"}


# Those whose step has operations that others lack.
CORE = [("b16_i1k", "tpu"), ("mae", "gpu")]
LOWERED = {"gpu": "cuda", "tpu": "tpu"}  # What JAX calls them when it lowers.


@pytest.fixture(scope="module")
def traces():
    """Traced steps: two platforms that get the same network share one."""
    return {}


@pytest.fixture
def lowered(monkeypatch, traces):
    """Lowers the step of a recipe at its quick size."""
    build = configuration.TrainConfig.build_model
    # Which cuDNN there is cannot be asked here.
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_100
    )

    def lower(recipe, platform, **overrides):
        # As where it will run: kernels and types follow from the platform.
        monkeypatch.setattr(
            configuration.TrainConfig,
            "build_model",
            lambda config, _=None: build(config, platform),
        )
        path = f"{ROOT}/configs/{recipe}.py:quick"
        config = configuration.load(path, overrides)
        if hasattr(config.model, "depth"):  # One block has all operations.
            config = fields.replace(config, {"model.depth": 1})
        module = config.build_model().module
        # A teacher is a second network that may be another on each platform.
        teacher = "task.teacher" in overrides and platform
        key = recipe, repr(overrides), repr(module), teacher
        if key not in traces:
            mesh = meshes.create(config.mesh, jax.devices()[:1])
            setup = train_setup.build(config, mesh, config.data.num_examples)
            traces[key] = setup.train_step.trace(
                setup.layout.shapes, setup.layout.batch
            )
        return traces[key].lower(lowering_platforms=(LOWERED[platform],))

    return lower


# A step like another recipe's has its operations: one platform shows that it is built.
CASES = [
    case
    for case in itertools.product(RECIPES, LOWERED)
    if case in CORE or case[0] not in ALIKE or case[1] == "tpu"
]


@pytest.mark.parametrize(("recipe", "platform"), slow_but(CORE, CASES))
def test_the_step_of_a_recipe(recipe, platform, lowered):
    lowered(recipe, platform)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "weights.safetensors"
    how = Preprocess(image_size=(4, 4), mean=(0.5,), std=(0.5,))
    sizes = {"num_classes": 10, "image_size": (4, 4), "channels": 1}
    write_weights(path, preprocess=how, variant="Ti/2", **sizes)
    return path


@pytest.mark.parametrize("platform", LOWERED)
@pytest.mark.parametrize(
    "task", slow_but(("linear_probe", "lora"), sorted(TASKS.keys() - OF_A_RECIPE))
)
def test_the_step_of_a_task(task, platform, teacher, lowered):
    more = {"task.teacher": str(teacher)} if task == "distillation" else {}
    if task == "adapters":
        more = {"data.num_classes": 0, "evals": {}}
    if task == "regression":
        more = {"data.num_classes": 0, "data.target_key": "age", "evals": {}}
    lowered("digits", platform, **{"task.name": task, **more})


KERNELS = ("b16_i1k", "clip", "dino", "mae")


@pytest.mark.parametrize("recipe", slow_but(["b16_i1k"], KERNELS))
@pytest.mark.parametrize(
    ("name", "platform", "call"),
    [
        ("cudnn", "gpu", "__cudnn$fmhaSoftmaxBackward"),
        ("splash", "tpu", "splash_mha"),
    ],
)
def test_the_step_with_a_kernel_of_attention(recipe, name, platform, call, lowered):
    sizes = {"model.attention_impl": name, "model.dtype": "bfloat16"}
    assert call in lowered(recipe, platform, **sizes).as_text()
