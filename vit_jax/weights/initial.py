"""Loads the weights that a run starts from."""

from collections.abc import Callable, Sequence

from vit_jax import models
from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models import segmenter, stacking
from vit_jax.weights.init_config import InitConfig
from vit_jax.weights.open import load


def load_initial(
    config: InitConfig,
    data: DataConfig,
    model: models.Model,
    init: Callable[[], dict],
    *,
    head_bias_init: float,
    task: str,
    left_out: Callable[[dict], dict[str, str]] = lambda others: {},
    class_names: Sequence[str] = (),
) -> tuple[dict, dict, list[str]]:
    """Loads the checkpoint that a run starts from, and fits it to the run's model.

    Args:
      config: section `init`.
      data: section `data`; mean, std and the filter of evaluations are compared with
        those of the checkpoint.
      model: the run's model.
      head_bias_init: initial bias of a new classifier.
      init: function that returns the run's initial parameters, used for missing ones.
      task: name of the run's task, or of the task that it wraps.
      left_out: function of the parameters outside the network that returns why the task
        leaves some of them out, see `Task.left_out`.
      class_names: class names of the training data.

    Returns:
      The parameters with one subtree per block, as on disk; the parameters outside the
      network, if the checkpoint is of the same task; and a line for each thing that was
      loaded or changed.

    Raises:
      UserError: the checkpoint cannot be read, or does not fit the model.
    """
    try:
        loaded = load(
            config.checkpoint,
            model,
            head=config.head,
            head_bias_init=head_bias_init,
            allow_mismatch=config.allow_mismatch,
            posemb_resize=config.posemb_resize,
            use_ema=config.use_ema,
            init=init,
            with_task=True,
            class_names=class_names,
            channels=config.channels,
        )
    except UserError as error:
        named = config.checkpoint in str(error)
        prefix = "config.init" if named else f"config.init={config.checkpoint!r}"
        raise UserError(f"{prefix}: {error}") from error
    pretrained = loaded.pretrained
    lines = loaded.table()
    # The first note on a workdir says which parameters were loaded.
    if pretrained.format == "workdir":
        lines[:2] = [f"{pretrained.notes[0]} from {pretrained.source}"]
    lines[0] = f"start: {lines[0]}"
    lines = [line.replace("--no_ema", "config.init.use_ema=False") for line in lines]
    others = pretrained.task_params if pretrained.objective.get("name") == task else {}
    if config.head != "keep":
        others = {k: v for k, v in others.items() if k not in segmenter.NAMES}
    elif pretrained.targets:
        others = others | {"targets": pretrained.targets.affine()}
    left = left_out(others) if others else {}
    lines += [f"{name} of the task: loaded" for name in others if name not in left]
    for name, why in left.items():
        action = "left out" if name.split("/")[0] in others else "initialised"
        lines.append(f"{name} of the task: {action}, as {why}")
    lines += _compare_preprocess(pretrained.preprocess, data)
    return stacking.unstack(loaded.params), others, lines


def _compare_preprocess(preprocess: Preprocess | None, data: DataConfig) -> list[str]:
    """Returns a line for each of mean, std and filter that differs in the checkpoint."""
    lines = []
    used = parse.filter_of(data.eval_transform, data.image_size)
    if preprocess and used not in ("", preprocess.interpolation):
        lines.append(
            f"differs: interpolation {preprocess.interpolation!r} in the checkpoint, "
            f"{used!r} in data.eval_transform={data.eval_transform!r}"
        )
    for name in ("mean", "std") if preprocess else ():
        old, new = getattr(preprocess, name), getattr(data, name)
        # A single number applies to all channels.
        if set(old) != set(new) if 1 in (len(old), len(new)) else old != tuple(new):
            lines.append(f"differs: {name} {old} in the checkpoint, data.{name}={new}")
    return lines
