"""What benchmarks/self_supervised/selfsup.py compares: our MAE and DINO, and the same in PyTorch.

Each has `step()` and `peak()`, as those of step_contenders.py; most have `forward()`, the
answers of the network that learns, `gradient()`, the same with loss and backward pass,
and in DINO `teacher()`, the other one's answers. A step of ours is the product's own, and
computes the metrics that a run logs. Both sides have the same weights, images, masks and
optimiser; PyTorch has its masks sorted but not drawn, and its images normalised before.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import smoke
from benchmarks.step import step_contenders
from vit_jax.distributed import compilation
from vit_jax.distributed import mesh as meshes
from vit_jax.models import cost, variants
from vit_jax.tasks.mae import Mae, MaeConfig
from vit_jax.training import config as configuration
from vit_jax.training import train_setup
from vit_jax.weights.formats import mae as mae_weights
from vit_jax.weights.formats import timm as timm_weights
from vit_jax.weights.formats.files import Tensors

RATE = 1e-4
MASK_RATIO = 0.75
DECODER = {"width": 512, "depth": 8, "num_heads": 16}
HEAD = {"hidden": 2_048, "bottleneck": 256, "outputs": 65_536}
LARGE, SMALL, SMALL_SIDE = 2, 8, 96 / 224
OPTIM = {
    "mae": {"weight_decay": 0.05, "b2": 0.95},
    "dino": {"weight_decay": 0.04, "b2": 0.999},
}
# What has more than one axis in PyTorch.
DECAYING = r"(/kernel|cls|mask_token|pos_embedding|last_layer)$"
CLIP_NORM = 3.0  # Of each parameter's gradient, in DINO.


def shrink():
    """Makes the networks small, for a run of seconds."""
    smoke.shrink()
    DECODER["depth"] = 1
    HEAD.update(hidden=32, bottleneck=16, outputs=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(MaeConfig):
    """MAE's encoder without a decoder."""

    def build(self, model, data, run, saved=None):
        return Encoder(self, model, data)


class Encoder(Mae):
    """MAE's encoder without a decoder: what MAE's step would cost if that were free.

    Its loss is the distance of each visible patch's output to 1, so that all blocks have
    gradients for all tokens.
    """

    def init(self, rng):
        return {"network": self.model.init(rng)}, None

    def _predict(self, model, decoder, params, batch, train=False, key=None):
        visible = jnp.argsort(batch["noise"], axis=1)[:, : self.num_visible]
        latent = model.encode(
            params["network"],
            batch["image"].astype(model.options["dtype"]),
            train=train,
            key=key,
            visible=visible,
        )
        return latent.astype(jnp.float32), visible

    def metrics(self, extra, batch, predicted, mask):
        return {"loss": jnp.square(predicted - 1).mean((1, 2))}


class Ours(step_contenders.OfJax):
    """A task in the training step of `training.step`.

    Args:
      variant: of the network.
      batch: of `task.batch_spec`, without its index.
      task, model, data, optim: sections of the config beside what all have.
      params: first parameters; drawn if None.
    """

    def __init__(
        self, variant, batch, *, dtype, task, optim, model, data=None, params=None
    ):
        size, side = len(batch["image"]), batch["image"].shape[-2]
        synthetic = {"name": "synthetic", "num_classes": 0, "num_examples": 1_000_000}
        raw = {
            "total_steps": 1_000_000,
            "batch_size": size,
            "data": synthetic | {"image_size": (side, side)} | (data or {}),
            "task": task,
            "model": {"variant": variant, "dtype": dtype, "activation": "gelu"} | model,
            "optim": {"name": "adam", "learning_rate": RATE, "schedule": "constant"}
            | {"weight_decay_mask": [DECAYING]}
            | optim,
            "ema": {"decay": 0.0},
        }
        config = configuration.complete(raw)
        mesh = meshes.create(config.mesh)
        program = train_setup.build(config, mesh, 1_000_000)
        self.task = program.task
        index = np.arange(size, dtype=np.uint32)
        self.batch = meshes.to_devices(batch | {"index": index}, mesh)
        self.state = program.initial_state()
        if params is not None:
            start = jax.jit(self.first_state, out_shardings=program.layout.shardings)
            self.state = start(self.state, params)
        self._compiler_options = compilation.options(mesh.devices.flat[0].platform)
        self._gradient = self._of_state(
            lambda state, batch: jax.grad(self.task.loss, has_aux=True)(
                state.params, state.extra, batch, state.key
            )
        )
        self._forward = self._of_state(self.answers)
        self._step = program.train_step

    def _of_state(self, function):
        """Jits a function of the state and of the batch as the step prepares it."""
        return jax.jit(
            lambda state, batch: function(state, self._prepare(state, batch)),
            compiler_options=self._compiler_options,
        )

    def _prepare(self, state, batch):
        return self.task.prepare(batch, jax.random.split(state.key)[0])

    def first_state(self, state, params):
        """Returns a first state with these parameters."""
        return state.replace(params=params)

    def forward(self):
        """Returns the answers of the network that learns."""
        return np.asarray(self._forward(self.state, self.batch))

    def gradient(self):
        """Computes loss and gradients."""
        jax.block_until_ready(self._gradient(self.state, self.batch))

    def step(self):
        """Trains; returns the loss."""
        self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready(self.state.params)
        return float(metrics["loss"])

    @property
    def flops(self):
        """Operations of the products of a step, per image."""
        return self.task.training_flops()


class OurMae(Ours):
    def answers(self, state, batch):
        return self.task.predict(state.params, batch)[0]

    def noise(self):
        """Returns the numbers (B, N) that each step makes its masks of."""
        return np.asarray(self._prepare(self.state, self.batch)["noise"])


class OurDino(Ours):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._teacher = self._of_state(
            lambda state, batch: self.task.answers(
                state.extra["teacher"], {"image": batch["image"]}
            )
        )

    def answers(self, state, batch):
        return self.task.answers(state.params, batch)

    def first_state(self, state, params):
        teacher = jax.tree.map(jnp.copy, params)
        return state.replace(params=params, extra=state.extra | {"teacher": teacher})

    def teacher(self):
        """Returns the teacher's answers."""
        return np.asarray(self._teacher(self.state, self.batch))


class Supervised(step_contenders.Ours):
    """Our supervised step of the encoder that MAE has."""

    @property
    def flops(self):
        """Operations of the products of a step, per image."""
        return cost.training_flops(self.model)


def mae(names, variant, size, side, dtype):
    """Returns contenders of MAE by name.

    Args:
      names: any of "supervised", "encoder alone", "ours" and "PyTorch"; the last two,
        where both are wanted, have the same weights and masks.
      variant: of the network.
      size: images per step.
      side: of the images, in pixels.
      dtype: "float32" or "bfloat16".
    """
    images, labels = step_contenders.made_batch(size, side)
    found, params = {}, None
    model = {"posemb": "sincos2d_mae"}
    if "supervised" in names:
        found["supervised"] = Supervised(
            variant,
            images,
            labels,
            dtype=dtype,
            optimizer="adam",
            activation="gelu",
            **model,
        )
    if "PyTorch" in names:
        from benchmarks.self_supervised import selfsup_torch

        found["PyTorch"] = selfsup_torch.mae(
            variant,
            images,
            decoder=DECODER,
            mask_ratio=MASK_RATIO,
            dtype=dtype,
            optim=OPTIM["mae"] | {"rate": RATE},
        )
        params = _mae_params(found["PyTorch"].weights(), variant)
    make = functools.partial(
        OurMae, variant, {"image": images}, dtype=dtype, optim=OPTIM["mae"], model=model
    )
    task = {"mask_ratio": MASK_RATIO} | {f"decoder_{k}": v for k, v in DECODER.items()}
    if "encoder alone" in names:
        task_name = f"{__name__}:EncoderConfig"
        found["encoder alone"] = make(task=task | {"name": task_name})
    if "ours" in names:
        found["ours"] = make(task=task | {"name": "mae"}, params=params)
        if params is not None:
            found["PyTorch"].same_masks(found["ours"].noise())
    return found


def dino(names, variant, size, side, dtype):
    """Returns contenders of DINO by name.

    Args:
      names: any of "ours" and "PyTorch", which then have the same weights.
      variant, size, side, dtype: as of `mae`.
    """
    patch = variants.parse(variant).patch_size
    small = max(1, round(side * SMALL_SIDE / patch)) * patch
    large_crops, small_crops = (
        step_contenders.made_batch(size * views, pixels)[0].reshape(
            size, views, pixels, pixels, 3
        )
        for views, pixels in ((LARGE, side), (SMALL, small))
    )
    found, params = {}, None
    if "PyTorch" in names:
        from benchmarks.self_supervised import selfsup_torch

        found["PyTorch"] = selfsup_torch.dino(
            variant,
            (large_crops, small_crops),
            head=HEAD,
            dtype=dtype,
            clip_norm=CLIP_NORM,
            optim=OPTIM["dino"] | {"rate": RATE},
        )
        params = _dino_params(found["PyTorch"].weights(), variant)
    if "ours" in names:
        crops = f"multi_crop(small_size={small}, num_small={SMALL})"
        found["ours"] = OurDino(
            variant,
            {"image": large_crops, "small_crops": small_crops},
            dtype=dtype,
            task={
                "name": "dino",
                "hidden_dim": HEAD["hidden"],
                "bottleneck_dim": HEAD["bottleneck"],
                "num_outputs": HEAD["outputs"],
            },
            optim=OPTIM["dino"] | {"grad_clip_norm_per_parameter": CLIP_NORM},
            model={"posemb_resize": "bicubic_dino"},
            data={"train_transform": crops},
            params=params,
        )
    return found


def _mae_params(flat, variant):
    """Returns PyTorch's weights as parameters of our task."""
    heads = variants.parse(variant).size.num_heads
    found = mae_weights.read(Tensors(flat, {}, {}, "PyTorch"), heads)
    return {"network": found.params, **found.task_params}


def _dino_params(flat, variant):
    """Returns the student's weights as parameters of our task."""
    heads = variants.parse(variant).size.num_heads
    backbone = {
        name.removeprefix("backbone."): value
        for name, value in flat.items()
        if name.startswith("backbone.")
    }
    head = {
        f"Dense_{i}": {
            "kernel": flat[f"head.mlp.{2 * i}.weight"].T,
            "bias": flat[f"head.mlp.{2 * i}.bias"],
        }
        for i in range(3)
    }
    # The directions of weight normalisation; their lengths are 1.
    last = "head.last_layer.parametrizations.weight.original1"
    head["last_layer"] = flat[last].T
    network = timm_weights.read(Tensors(backbone, {}, {}, "PyTorch"), heads).params
    return {"network": network, "head": head}
