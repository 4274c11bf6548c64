"""The training step: gradients of a batch, the update, and what follows from it."""

import concurrent.futures
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.tasks.task import Task, divide_ratios
from vit_jax.training.config import EmaConfig
from vit_jax.training.optim import Optimizer
from vit_jax.training.optim.config import GradFn
from vit_jax.training.train_state import TrainState, update_average

Step = Callable[[TrainState, dict], tuple[TrainState, dict]]

_COMPILING = "compile-train-step"  # Name of the thread.


def make_train_step(
    task: Task, gradients: GradFn, optimizer: Optimizer, ema: EmaConfig, mesh: Mesh
) -> Step:
    """Returns the training step, not jitted.

    It maps state and batch (`task.batch_spec`, split over the mesh) to the next state and
    scalars: the metrics of the task, the learning rate, grad_norm of the parameters that
    move in this step, and param_norm.
    """

    def train_step(state, batch):
        augment_key, dropout_key = jax.random.split(state.key)
        batch = task.prepare(batch, augment_key)
        key = jax.random.fold_in(dropout_key, state.step)
        with sharding.activations(mesh):
            grads, aux = gradients(state, batch, key)
            metrics, stats = divide_ratios(aux)
            updates, opt_state = optimizer.update(grads, metrics, state, batch, key)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        evaluated = optimizer.evaluated(opt_state, params)
        average = update_average(state.average, evaluated, step, ema)
        extra = task.update(state.extra, evaluated, stats, step)
        metrics = {
            **metrics,
            "learning_rate": jnp.asarray(optimizer.rate(state.step), jnp.float32),
            "grad_norm": optax.tree.norm(optimizer.moving(grads, state.step)),
            "param_norm": optax.tree.norm(params),
        }
        state = state.replace(
            step=step, params=params, opt_state=opt_state, average=average, extra=extra
        )
        return state, metrics

    return train_step


def gradients_of(loss: Callable, shardings: dict) -> GradFn:
    """Returns the function of the gradients of a loss.

    Args:
      loss: (params, extra, batch, key) -> (loss, (metrics, statistics)).
      shardings: of the parameters.
    """

    def gradients(state, batch, key):
        grads, aux = jax.grad(loss, has_aux=True)(state.params, state.extra, batch, key)
        # As soon as they exist, so that no device holds all of them.
        return jax.lax.with_sharding_constraint(grads, shardings), aux

    return gradients


def accumulate(function: Callable, parts: int) -> Callable:
    """Returns a function like the given one that averages over the parts of a batch.

    Args:
      function: (..., batch, key) -> arrays, all means, or ratios of them; a batch is a
        name to an array of B rows.
      parts: number of parts, which divides B; each has rows of every device.
    """
    if parts == 1:
        return function

    def split(x):
        x = x.reshape(len(x) // parts, parts, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def accumulated(*args):
        *state, batch, key = args

        def body(total, xs):
            part, i = xs
            means = function(*state, part, jax.random.fold_in(key, i))
            return jax.tree.map(lambda t, p: t + p / parts, total, means), None

        batches = jax.tree.map(split, batch)
        first = jax.tree.map(lambda x: x[0], batches)
        zero = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype),
            jax.eval_shape(function, *state, first, key),
        )
        return jax.lax.scan(body, zero, (batches, jnp.arange(parts)))[0]

    return accumulated


def jit_step(
    step: Callable,
    mesh: Mesh,
    shardings: TrainState,
    *,
    donate: bool = True,
    num_scalars: int = 0,
) -> Step:
    """Jits a training step.

    Args:
      step: step of `make_train_step`, or one with `num_scalars` extra arguments.
      mesh: mesh of all devices.
      shardings: state with the sharding of each array.
      donate: reuse the memory of the state that is passed in. JAX's NaN check runs a
        failed step again, which needs its input.
      num_scalars: number of replicated arguments after the batch.
    """
    replicated = meshes.replicated(mesh)
    return jax.jit(
        step,
        donate_argnums=(0,) if donate else (),
        in_shardings=(shardings, meshes.batched(mesh), *[replicated] * num_scalars),
        out_shardings=(shardings, replicated),
        compiler_options=compilation.options(mesh.devices.flat[0].platform),
    )


def compile_in_background(
    step: Step, shapes: TrainState, batch: dict[str, jax.ShapeDtypeStruct]
) -> Callable[[], Step]:
    """Starts to compile a training step while the state is initialised or restored.

    The step is traced here and now, so that settings of this thread (such as `with
    jax.default_matmul_precision(...)`) apply to it.

    Returns:
      Function that waits for the step, and raises what compiling raised, such as running
      out of device memory.
    """
    lowered = step.lower(shapes, batch)
    executor = concurrent.futures.ThreadPoolExecutor(1, _COMPILING)
    future = executor.submit(lowered.compile)
    executor.shutdown(wait=False)
    return future.result


def of_any_shape(
    compiled: Step, jitted: Step, batch: dict[str, jax.ShapeDtypeStruct]
) -> Step:
    """Returns a step that is compiled anew for batches of other shapes than one.

    Args:
      compiled: step for batches of the shapes of `batch`.
      jitted: the same step, which compiles.
      batch: names to shapes.
    """

    def step(state, given):
        known = all(given[name].shape == spec.shape for name, spec in batch.items())
        return (compiled if known else jitted)(state, given)

    return step


def is_compiling() -> bool:
    """Returns whether a compilation is running, which a process would wait for at exit."""
    return any(t.name.startswith(_COMPILING) for t in threading.enumerate())
