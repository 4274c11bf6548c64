"""A training step through Flax's bridge to NNX beside the same in Linen.

Run:  python -m benchmarks.step.nnx_bridge [--variant=S/16] [--side=224] [--batch_size=4]
          [--rounds=7]

The same network with SGD and momentum: the module of `create_flax` in jax.jit; wrapped by
nnx.bridge.ToNNX in nnx.jit, in graph mode (the default of Flax 0.12) and in tree mode; and
split once, with jax.jit over its variables ("functional"). "empty" is Python's part: a step
of the same variables whose function returns at once. Prints seconds until the first step is
done, without compilation cache, medians of steps, and their ratio to Linen; brackets hold
the quartiles of the ratios of single rounds.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import vit_jax
from benchmarks import smoke
from benchmarks.step import step

OPTIMIZER = optax.sgd(1e-3, momentum=0.9)


def loss_of(outputs, labels):
    logits = outputs["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Linen:
    def __init__(self, module, params, batch):
        def function(params, state, images, labels):
            def loss_fn(params):
                return loss_of(module.apply({"params": params}, images), labels)

            loss, grads = jax.value_and_grad(loss_fn)(params)
            updates, state = OPTIMIZER.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.step = jax.jit(function, donate_argnums=(0, 1))
        self.params = jax.tree.map(jnp.copy, params)
        self.state, self.batch = OPTIMIZER.init(self.params), batch

    def __call__(self):
        self.params, self.state, loss = self.step(self.params, self.state, *self.batch)
        jax.block_until_ready(loss)


def wrapped(module, params):
    """Returns the module that `vit_jax.load_nnx` makes, with its optimiser."""
    network = nnx.bridge.ToNNX(module)
    for name, value in jax.tree.map(lambda a: nnx.Param(jnp.copy(a)), params).items():
        setattr(network, name, nnx.data(value))
    return network, nnx.Optimizer(network, OPTIMIZER, wrt=nnx.Param)


def train_step(network, optimizer, images, labels):
    loss, grads = nnx.value_and_grad(lambda n: loss_of(n(images), labels))(network)
    optimizer.update(network, grads)
    return loss


class Bridge:
    def __init__(self, module, params, batch, function=train_step, *, graph):
        self.mode = functools.partial(self.of, graph)
        self.network, self.optimizer = wrapped(module, params)
        self.batch = batch
        with self.mode():
            self.step = nnx.jit(function)

    @staticmethod
    def of(graph):
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(nnx.set_graph_mode(graph))
        stack.enter_context(nnx.set_graph_updates(graph))
        return stack

    def __call__(self):
        with self.mode():
            jax.block_until_ready(self.step(self.network, self.optimizer, *self.batch))


class Functional:
    def __init__(self, module, params, batch):
        self.definition, self.state = nnx.split(wrapped(module, params))

        def function(state, images, labels):
            network, optimizer = nnx.merge(self.definition, state)
            loss = train_step(network, optimizer, images, labels)
            return nnx.state((network, optimizer)), loss

        self.step = jax.jit(function, donate_argnums=0)
        self.batch = batch

    def __call__(self):
        self.state, loss = self.step(self.state, *self.batch)
        jax.block_until_ready(loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="S/16")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    small = "--variant=Ti/16 --side=32 --batch_size=2 --rounds=2"
    flags = smoke.parse(parser, small)
    if flags.smoke:
        smoke.shrink()
    module, params = vit_jax.create_flax(flags.variant, image_size=flags.side)
    images = np.random.default_rng(0).normal(
        size=(flags.batch_size, flags.side, flags.side, 3)
    )
    batch = jnp.asarray(images, jnp.float32), jnp.zeros(flags.batch_size, jnp.int32)
    given = module, params, batch
    empty = lambda network, optimizer, images, labels: labels.sum()
    calls = {
        "linen": Linen(*given),
        "bridge, graph": Bridge(*given, graph=True),
        "bridge, tree": Bridge(*given, graph=False),
        "bridge, functional": Functional(*given),
        "empty, graph": Bridge(*given, empty, graph=True),
        "empty, tree": Bridge(*given, empty, graph=False),
    }
    first = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        first[name] = time.perf_counter() - start
    seconds = step.timed(calls, flags.rounds)
    print(f"{'':20}first step, s  step, ms  by Linen's")
    for name, took in seconds.items():
        print(
            f"{name:20}{first[name]:13.1f}  {1e3 * np.median(took):8.1f}  "
            f"{step.ratio(took, seconds['linen'])}"
        )


if __name__ == "__main__":
    main()
