"""The training step: gradients of a batch, update of the parameters, moving average."""

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

    The step maps a state and a batch (`task.batch_spec`, split over the mesh) to the
    next state and a dict of scalars: the metrics of the task, learning_rate, grad_norm
    of the parameters that are not frozen in this step, and param_norm.
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
    """Returns a function that computes the gradients of a loss.

    Args:
      loss: (params, extra, batch, key) -> (loss, (metrics, statistics)).
      shardings: shardings of the parameters.
    """

    def gradients(state, batch, key):
        grads, aux = jax.grad(loss, has_aux=True)(state.params, state.extra, batch, key)
        # Split as soon as they exist, so that no device holds all gradients.
        return jax.lax.with_sharding_constraint(grads, shardings), aux

    return gradients


def accumulate(function: Callable, parts: int) -> Callable:
    """Returns a function that averages the results of another over parts of a batch.

    Args:
      function: (..., batch, key) -> arrays, each a mean over images or a `Ratio` of
        means; a batch maps names to arrays with B rows.
      parts: number of parts, a divisor of B; each part has rows of every device.
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
    bfloat16: bool,
    donate: bool = True,
    num_scalars: int = 0,
) -> Step:
    """Jits a training step.

    Args:
      step: step of `make_train_step`, or a step with `num_scalars` extra arguments.
      mesh: mesh of all devices.
      shardings: state with the sharding of each array.
      bfloat16: whether matrix products have bfloat16 operands.
      donate: whether to reuse the memory of the state that is passed in. Set it to
        False for JAX's NaN check, which runs a failed step again with the same input.
      num_scalars: number of replicated arguments after the batch.
    """
    replicated = meshes.replicated(mesh)
    return jax.jit(
        step,
        donate_argnums=(0,) if donate else (),
        in_shardings=(shardings, meshes.batched(mesh), *[replicated] * num_scalars),
        out_shardings=(shardings, replicated),
        compiler_options=compilation.options(
            mesh.devices.flat[0].platform, bfloat16=bfloat16
        ),
    )


def compile_in_background(
    step: Step, shapes: TrainState, batch: dict[str, jax.ShapeDtypeStruct]
) -> Callable[[], Step]:
    """Starts to compile a training step while the state is initialised or restored.

    The step is traced in the calling thread, so that settings of this thread (such as
    `with jax.default_matmul_precision(...)`) apply to it.

    Returns:
      Function that waits for the compiled step and returns it, or raises the error of
      the compilation, such as running out of device memory.
    """
    lowered = step.lower(shapes, batch)
    executor = concurrent.futures.ThreadPoolExecutor(1, _COMPILING)
    future = executor.submit(lowered.compile)
    executor.shutdown(wait=False)
    return future.result


def of_any_shape(
    compiled: Step, jitted: Step, batch: dict[str, jax.ShapeDtypeStruct]
) -> Step:
    """Returns a step that also accepts batches of other shapes, which it compiles for.

    Args:
      compiled: step that is compiled for batches of the shapes of `batch`.
      jitted: the same step, jitted; it is used for batches of other shapes.
      batch: names of arrays to their shapes.
    """

    def step(state, given):
        known = all(given[name].shape == spec.shape for name, spec in batch.items())
        return (compiled if known else jitted)(state, given)

    return step


def is_compiling() -> bool:
    """Returns whether a step is being compiled, which delays the process's exit."""
    return any(t.name.startswith(_COMPILING) for t in threading.enumerate())
