"""What benchmarks/step/step.py compares: ours, timm under PyTorch, and plain Linen.

Each has `forward()`, `step()` and `peak()`. A step is forward pass, loss, backward pass
and optimiser; everything it needs is on the device before. Ours is the product's own
step: it takes uint8 images, and it gives top-1, gradient norm and parameter norm as well.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.compile import baseline_vit
from benchmarks.step import plain_linen
from vit_jax.distributed import compilation
from vit_jax.distributed import mesh as meshes
from vit_jax.models import variants
from vit_jax.training import config as configuration
from vit_jax.training import train_setup
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import find_reader

CLASSES, RATE, MOMENTUM = 1000, 1e-3, 0.9
TIMM = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/32": "vit_small_patch32_224",
    "S/16": "vit_small_patch16_224",
    "B/32": "vit_base_patch32_224",
    "B/16": "vit_base_patch16_224",
    "L/16": "vit_large_patch16_224",
    "H/14": "vit_huge_patch14_224",
}
PLAIN = tuple(TIMM)
TIMM |= {
    "Swin-T": "swin_tiny_patch4_window7_224",
    "Swin-B": "swin_base_patch4_window7_224",
    "Mixer-B/16": "mixer_b16_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R50x1": "resnetv2_50x1_bit",
}


def made_batch(size: int, side: int = 224):
    """Returns random images, uint8 (B, Y, X, C), and labels (B,)."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, side, side, 3), dtype=np.uint8)
    return images, rng.integers(0, CLASSES, size).astype(np.int32)


class Timm:
    """timm under PyTorch: autocast for bfloat16, torch.compile on a GPU."""

    def __init__(self, variant, images, labels, *, dtype, optimizer, spread=0.0):
        import torch

        from benchmarks import timm_import

        self._torch, self._name = torch, TIMM[variant]
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        keys = {"drop_path_rate": 0.0}  # Swin's own is 0.1.
        if not TIMM[variant].startswith("resnet"):  # Which takes any image.
            keys["img_size"] = images.shape[1]
        if variant in PLAIN:  # As timm's own, but after `smoke.shrink`.
            keys["depth"] = variants.parse(variant).size.depth
        self.model = timm_import.import_timm().create_model(
            TIMM[variant], num_classes=CLASSES, **keys
        )
        with torch.no_grad():
            for x in self.model.parameters():  # Where nothing is 0, all is compared.
                x.add_(torch.randn_like(x), alpha=spread)
        self.model.to(self._device)
        images = images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
        self.images = torch.from_numpy(images).contiguous().to(self._device)
        self.labels = torch.from_numpy(labels).long().to(self._device)
        make, keys = torch.optim.SGD, {"momentum": MOMENTUM}
        if optimizer == "adam":
            make, keys = torch.optim.AdamW, {"fused": True}
        self.optimizer = make(self.model.parameters(), lr=RATE, **keys)
        compiled = self._device == "cuda"
        self._run = torch.compile(self.model) if compiled else self.model
        self._cast = contextlib.nullcontext
        if dtype == "bfloat16":
            self._cast = lambda: torch.autocast(self._device, torch.bfloat16)

    def weights(self):
        """Returns a copy of the state dict."""
        return {k: v.cpu().numpy().copy() for k, v in self.model.state_dict().items()}

    def for_ours(self):
        """Returns what makes `Ours` this network: params, and options of the model."""
        tensors = Tensors(self.weights(), {}, {}, self._name)
        reader, tensors = find_reader(tensors)
        read = reader.read(tensors, 0)
        told = ("activation", "window_padding")
        options = {name: read.options[name] for name in told if name in read.options}
        return {"params": read.params} | options

    def forward(self):
        """Returns logits."""
        self.model.eval()
        with self._torch.inference_mode(), self._cast():
            return self._run(self.images).float().cpu().numpy()

    def step(self):
        """Trains; returns the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        with self._cast():
            loss = self._torch.nn.functional.cross_entropy(
                self._run(self.images), self.labels
            )
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def peak(self):
        """Returns the most memory that the device held, in bytes; None if unknown."""
        if self._device == "cpu":
            return None
        return self._torch.cuda.max_memory_allocated()


class OfJax:
    """A contender that runs in JAX."""

    def peak(self):
        """Returns the most memory that the device held, in bytes; None if unknown."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


class Plain(OfJax):
    """Plain Linen with a plain training step, float32, with our weights."""

    def __init__(self, variant, images, labels, *, params):
        size, patch = variants.parse(variant).size, variants.parse(variant).patch_size
        network = plain_linen.VisionTransformer(
            CLASSES, patch, size.width, size.depth, size.num_heads, size.mlp_dim
        )
        tx = optax.sgd(RATE, MOMENTUM)

        def apply(params, images):
            return network.apply({"params": params}, images)

        def step(params, opt_state, images, labels):
            def loss_fn(params):
                logits = apply(params, images)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return losses.mean()

            loss, grads = jax.value_and_grad(loss_fn)(params)
            updates, opt_state = tx.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, loss

        self.batch = jax.device_put((images.astype(np.float32) / 127.5 - 1, labels))
        self.params = jax.device_put(params)
        copy = jax.jit(lambda p: (jax.tree.map(jnp.copy, p), tx.init(p)))
        self.state = copy(self.params)
        self._apply = jax.jit(apply)
        self._step = jax.jit(step, donate_argnums=(0, 1))

    def forward(self):
        """Returns logits."""
        return np.asarray(self._apply(self.params, self.batch[0]))

    def step(self):
        """Trains; returns the loss."""
        *self.state, loss = self._step(*self.state, *self.batch)
        jax.block_until_ready(self.state)
        return float(loss)


class Baseline(OfJax):
    """benchmarks/compile/baseline_vit.py: scan, full rematerialisation, bfloat16, Adam."""

    def __init__(self, variant, images, labels):
        model = baseline_vit.VisionTransformer(baseline_vit.SIZES[variant], CLASSES)
        tx = baseline_vit.optimizer()
        self.batch = jax.device_put((images, labels))

        def init():
            params = model.init(jax.random.key(0), jnp.zeros((1, *images.shape[1:])))
            return params["params"], tx.init(params["params"])

        def forward(params, images):
            images = images.astype(jnp.float32) / 127.5 - 1
            return model.apply({"params": params}, images)

        def step(state, images, labels):
            return baseline_vit.step(model, tx, state, images, labels)

        self.state = jax.jit(init)()
        self._apply = jax.jit(forward)
        self._step = jax.jit(step, donate_argnums=0)

    def forward(self):
        """Returns logits."""
        return np.asarray(self._apply(self.state[0], self.batch[0]))

    def step(self):
        """Trains; returns the loss."""
        self.state, loss = self._step(self.state, *self.batch)
        jax.block_until_ready(self.state)
        return float(loss)


class Ours(OfJax):
    """The product: `Model.apply` under jit, and the step of `training.step`."""

    def __init__(
        self, variant, images, labels, *, dtype, optimizer, params=None, **options
    ):
        data = {"name": "synthetic", "num_classes": CLASSES, "num_examples": 1_000_000}
        raw = {
            "total_steps": 1_000_000,
            "batch_size": len(images),
            "data": data | {"image_size": images.shape[1:3]},
            "model": {"variant": variant, "dtype": dtype} | options,
            "optim": {"name": optimizer, "learning_rate": RATE, "schedule": "constant"},
            "ema": {"decay": 0.0},
        }
        if optimizer == "sgd":
            raw["optim"]["momentum"] = MOMENTUM
        config = configuration.complete(raw)
        mesh = meshes.create(config.mesh)
        program = train_setup.build(config, mesh, 1_000_000)
        self.model = program.model
        if params is None:
            self.state = program.initial_state()
        else:
            self.state = program.state_from(jax.tree.map(np.array, params))
        index = np.arange(len(images), dtype=np.uint32)
        self.batch = meshes.to_devices(
            {"image": images, "label": labels, "index": index}, mesh
        )

        def forward(params, images):
            images = (images.astype(jnp.float32) / 127.5 - 1).astype(dtype)
            return program.model.apply(params, images)["logits"]

        platform = mesh.devices.flat[0].platform
        self._apply = jax.jit(  # As predict and the evaluations.
            forward,
            compiler_options=compilation.options(
                platform, bfloat16=config.model.rounds_products
            ),
        )
        self._step = program.train_step

    def forward(self):
        """Returns logits."""
        return np.asarray(self._apply(self.state.params, self.batch["image"]))

    def step(self):
        """Trains; returns the loss."""
        self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready(self.state.params)
        return float(metrics["loss"])
