"""One optimiser step, as one jitted function."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from vit_jax.data import device_ops
from vit_jax.models import Model
from vit_jax.parallel import compiler, sharding
from vit_jax.parallel import mesh as meshes
from vit_jax.training import losses, optim
from vit_jax.training import state as states
from vit_jax.training.config import TrainConfig
from vit_jax.training.optim import Schedule

Step = Callable[[states.TrainState, dict], tuple[states.TrainState, dict]]


def define(
    model: Model,
    tx: optax.GradientTransformation,
    rate: Schedule,
    ops: tuple,
    config: TrainConfig,
    mesh: Mesh,
    shardings: states.TrainState,
) -> Step:
    """Returns what the training step computes.

    Args:
      model: network.
      tx: optimiser.
      rate: its schedule, only to be logged.
      ops: device transforms of the training images.
      config: complete config.
      mesh: of all devices.
      shardings: of each array of the state.

    Returns:
      Function from state and batch (image uint8 (B, Y, X, C), label (B,), index (B,),
      split over the mesh) to the next state and scalars: loss, top1, grad_norm,
      param_norm, rate.
    """
    loss_fn = functools.partial(_loss, model, config)

    def train_step(state, batch):
        augment_key, dropout_key = jax.random.split(state.key)
        images, labels = prepare(batch, ops, augment_key, config)
        key = jax.random.fold_in(dropout_key, state.step)
        with sharding.activations(mesh):
            grads, scores = accumulate(
                loss_fn,
                state.params,
                images,
                labels,
                key,
                config.optim.accumulate,
                shardings.params,
            )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            average = states.average(
                average, params, state.step + 1, config.average.decay
            )
        metrics = scores | {
            "grad_norm": optax.tree.norm(grads),
            "param_norm": optax.tree.norm(params),
            "rate": jnp.asarray(rate(state.step), jnp.float32),
        }
        state = state.replace(
            step=state.step + 1, params=params, opt_state=opt_state, average=average
        )
        return state, metrics

    return train_step


def jitted(
    step: Callable,
    config: TrainConfig,
    mesh: Mesh,
    shardings: states.TrainState,
    scalars: int = 0,
) -> Step:
    """Jits a training step.

    Args:
      step: from `define`, or what takes so many scalars after its state and batch.
      config: complete config.
      mesh: of all devices.
      shardings: of each array of the state.
      scalars: how many.

    Returns:
      The jitted function. The state passed in is used up.
    """
    everywhere = meshes.replicated(mesh)
    return jax.jit(
        step,
        # debug_nans runs a failed step again, which needs its input.
        donate_argnums=() if config.debug_nans else (0,),
        in_shardings=(shardings, meshes.batched(mesh), *[everywhere] * scalars),
        out_shardings=(shardings, everywhere),
        compiler_options=compiler.options(mesh.devices.flat[0].platform),
    )


def prepare(
    batch: dict, ops: tuple, key: jax.Array, config: TrainConfig
) -> tuple[jax.Array, jax.Array]:
    """Transforms and normalises a batch on the device.

    Returns:
      Images (B, Y, X, C), float32, and labels (B, classes) that sum to 1.
    """
    labels = losses.one_hot(batch["label"], config.data.classes)
    images, labels = device_ops.apply(ops, batch["image"], labels, batch["index"], key)
    return device_ops.normalize(images, config.data.mean, config.data.std), labels


def accumulate(
    loss_fn, params, images, labels, key, microbatches: int, shardings: dict | None
):
    """Averages the gradients of a batch's microbatches.

    Args:
      loss_fn: (params, images, labels, key) -> (loss, scores), both batch means.
      params: to differentiate by.
      images: (B, ...).
      labels: (B, classes).
      key: of dropout.
      microbatches: how many; divides B.
      shardings: of the parameters, which the gradients take on as soon as they are
        there, so that no device holds all of them; None to leave it to the compiler.

    Returns:
      Gradients and scores of the whole batch.
    """
    derive = jax.grad(loss_fn, has_aux=True)

    def grad_fn(*args):
        grads, scores = derive(*args)
        if shardings is not None:
            grads = jax.lax.with_sharding_constraint(grads, shardings)
        return grads, scores

    if microbatches == 1:
        return grad_fn(params, images, labels, key)

    def split(x):
        # Each microbatch takes a part of every device's images.
        x = x.reshape(len(x) // microbatches, microbatches, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def body(total, xs):
        images, labels, i = xs
        part = grad_fn(params, images, labels, jax.random.fold_in(key, i))
        return jax.tree.map(lambda t, p: t + p / microbatches, total, part), None

    xs = (split(images), split(labels), jnp.arange(microbatches))
    zero = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(grad_fn, params, *jax.tree.map(lambda x: x[0], xs[:2]), key),
    )
    return jax.lax.scan(body, zero, xs)[0]


def _loss(model, config, params, images, labels, key):
    images, params = images.astype(config.model.dtype), optim.hold(params, config.optim)
    logits = model.apply(params, images, train=True, key=key)["logits"]
    targets = losses.smooth(labels, config.loss.label_smoothing)
    loss = losses.LOSSES[config.loss.name](logits, targets).mean()
    top1 = (logits.argmax(-1) == labels.argmax(-1)).mean()
    return loss, {"loss": loss, "top1": top1}
