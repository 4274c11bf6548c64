"""ViT-S/16 and B/16 at 224 on CPU: ours, timm under PyTorch, plain Linen.

Run: PYTHONPATH=. python benchmarks/against_timm.py [--rounds=20] [--models=S/16,B/16]

Needs the extra `parity`. All three hold the same weights and compute the same function
in float32 on all cores, in one process, one call of each a round, so that the moods of
the machine hit all of them. timm is as its users run it on CPU: eager, with its fused
attention. A training step is forward pass, loss, backward pass and SGD with momentum.
Ours is the product's own step: it takes uint8 images, and it gives top-1, gradient
norm and parameter norm as well. Prints medians in seconds, their ratios, and in
brackets the quartiles of the ratios of single rounds.
"""

import argparse
import os
import time

import jax
import numpy as np
import optax
import plain_linen
import timm_import
import torch

from vit_jax import config as configuration
from vit_jax import models
from vit_jax.models import variants
from vit_jax.parallel import compiler
from vit_jax.parallel import mesh as meshes
from vit_jax.training import optim
from vit_jax.training import state as states
from vit_jax.training import step as steps
from vit_jax.weights.formats import timm as timm_weights
from vit_jax.weights.formats.files import Tensors

CASES = {  # timm's name, batch size.
    "S/16": ("vit_small_patch16_224", 16),
    "B/16": ("vit_base_patch16_224", 8),
}
CLASSES, RATE, MOMENTUM = 1000, 1e-3, 0.9


def made_batch(size):
    """Returns random images, uint8 (B, Y, X, C), and labels (B,)."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, 224, 224, 3), dtype=np.uint8)
    return images, rng.integers(0, CLASSES, size).astype(np.int32)


class Timm:
    """timm under PyTorch."""

    def __init__(self, name, images, labels):
        torch.manual_seed(0)
        self.model = timm_import.import_timm().create_model(name, num_classes=CLASSES)
        with torch.no_grad():
            for x in self.model.parameters():  # Where nothing is 0, all is compared.
                x.add_(torch.randn_like(x), alpha=0.02)
        images = images.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
        self.images = torch.from_numpy(images).contiguous()
        self.labels = torch.from_numpy(labels).long()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=RATE, momentum=MOMENTUM
        )

    def weights(self):
        """Returns a copy of the state dict."""
        return {k: v.numpy().copy() for k, v in self.model.state_dict().items()}

    def forward(self):
        """Returns logits."""
        self.model.eval()
        with torch.inference_mode():
            return self.model(self.images).numpy()

    def step(self):
        """Trains; returns the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Plain:
    """Plain Linen, with a plain training step."""

    def __init__(self, variant, params, images, labels):
        size, patch = variants.parse(variant).size, variants.parse(variant).patch
        network = plain_linen.VisionTransformer(
            CLASSES, patch, size.width, size.depth, size.heads, size.mlp_dim
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
        self.state = jax.jit(lambda p: (jax.tree.map(jax.numpy.copy, p), tx.init(p)))(
            self.params
        )
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


class Ours:
    """The product: `Model.apply` under jit, and `training.step`."""

    def __init__(self, variant, params, images, labels):
        raw = {
            "total_steps": 1_000_000,
            "batch_size": len(images),
            "data": {"name": "made", "classes": CLASSES, "examples": 1_000_000},
            "model": {"variant": variant, "gelu": "erf"},
            "optim": {"name": "sgd", "momentum": MOMENTUM, "rate": RATE},
            "average": {"decay": 0.0},
        }
        raw["optim"]["decay"] = "constant"
        config = configuration.complete(raw)
        model = models.create(**config.model, classes=CLASSES)
        mesh = meshes.create(config.mesh.to_dict())
        everywhere = meshes.replicated(mesh)
        rate = optim.schedule(config, config.total_steps, 1.0)
        tx = optim.optimizer(config, params, rate, config.total_steps, 1.0)
        self.params = jax.device_put(params, everywhere)
        self.state = jax.jit(
            lambda p: states.create(jax.tree.map(jax.numpy.copy, p), tx, config),
            out_shardings=everywhere,
        )(self.params)
        index = np.arange(len(images), dtype=np.uint32)
        self.batch = meshes.to_devices(
            {"image": images, "label": labels, "index": index}, mesh
        )
        self.images = jax.device_put(images.astype(np.float32) / 127.5 - 1)
        self._apply = jax.jit(
            lambda p, x: model.apply(p, x)["logits"],
            compiler_options=compiler.options(),  # As predict and the evaluations.
        )
        self._step = steps.build(model, tx, rate, (), config, mesh)

    def forward(self):
        """Returns logits."""
        return np.asarray(self._apply(self.params, self.images))

    def step(self):
        """Trains; returns the loss."""
        self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready(self.state.params)
        return float(metrics["loss"])


def contenders(variant):
    """Builds all three with the same weights and shows that they do the same."""
    name, size = CASES[variant]
    images, labels = made_batch(size)
    timm = Timm(name, images, labels)
    read = timm_weights.read(Tensors(timm.weights(), {}, {}, name))
    three = {
        "ours": Ours(variant, read.params, images, labels),
        "timm": timm,
        "plain": Plain(variant, read.params, images, labels),
    }
    logits = {name: one.forward() for name, one in three.items()}
    losses = {name: [one.step() for _ in range(2)] for name, one in three.items()}
    for name in ("ours", "plain"):
        np.testing.assert_allclose(logits[name], logits["timm"], atol=1e-3)
        np.testing.assert_allclose(losses[name], losses["timm"], rtol=1e-4)
        error = np.abs(logits[name] - logits["timm"]).max()
        print(
            f"<!-- {variant} batch {size}: {name} and timm differ by {error:.1e} in "
            f"logits of up to {np.abs(logits['timm']).max():.1f}; losses of two steps "
            f"{losses[name]} and {losses['timm']} -->",
            flush=True,
        )
    return three


def timed(calls, rounds):
    """Returns the seconds of each call, (rounds,), one of each a round."""
    seconds = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default=",".join(CASES))
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # As XLA.
    print(
        "| model | what | ours | timm | plain Linen | ours / timm | ours / plain |\n"
        "|---|---|---|---|---|---|---|"
    )
    for variant in args.models.split(","):
        three = contenders(variant)
        for what in ("forward", "step"):
            calls = {name: getattr(one, what) for name, one in three.items()}
            seconds = timed(calls, args.rounds)
            cells = [f"{np.median(values):.3f}" for values in seconds.values()]
            for other in ("timm", "plain"):
                ratio = np.median(seconds["ours"]) / np.median(seconds[other])
                low, high = np.quantile(seconds["ours"] / seconds[other], (0.25, 0.75))
                cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
            print(f"| {variant} | {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
