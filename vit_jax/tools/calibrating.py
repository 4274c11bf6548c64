"""Calibrates the model of a workdir on the run's own images, and stores the result."""

import functools
import os

import jax

from vit_jax import weights
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.open import open_unchecked
from vit_jax.errors import UserError
from vit_jax.evaluators import calibration
from vit_jax.evaluators.classification import ClassificationConfig
from vit_jax.evaluators.multi_label import MultiLabelConfig
from vit_jax.tools.finetuning.evaluated import TrainedNetwork
from vit_jax.training.config import TrainConfig, complete
from vit_jax.weights import calibration as stored
from vit_jax.weights import checkpoint_folders
from vit_jax.weights.calibration import Calibration

lines = calibration.lines


def calibrate(
    workdir: str | os.PathLike,
    split: str = "",
    *,
    scale: bool = True,
    use_ema: bool = True,
    config: TrainConfig | None = None,
    network: TrainedNetwork | None = None,
) -> Calibration:
    """Fits temperature, thresholds and sets of a run, and writes them to its workdir.

    The scores are of the evaluation "test" of the run if none of its images is fitted
    on; else parts of the images are left out in turn.

    Args:
      workdir: workdir of a run.
      split: split to fit on; "" is that of the run's first evaluation of classes.
      scale: whether to fit temperature and sets; if not, only thresholds.
      use_ema: whether to calibrate the averaged parameters, if there are any.
      config: config of the run; None reads it from the workdir.
      network: network of the run, whose outputs may be known; None loads it on the
        devices of all processes.

    Raises:
      UserError: the workdir holds no run of a classifier, or its images cannot be read.
    """
    if not checkpoint_folders.has_checkpoint(workdir):
        raise UserError(
            f"--calibrate: {workdir} is not the workdir of a run, where the result is "
            "stored: give one"
        )
    if config is None:
        config = complete(checkpoint_folders.read_metadata(workdir)["config"])
    kinds = ClassificationConfig, MultiLabelConfig
    evals = {name: one for name, one in config.evals.items() if isinstance(one, kinds)}
    evals = {name: one for name, one in evals.items() if not (one.name or one.data_dir)}
    first = next(iter(evals), "")
    if not (split or first):
        raise UserError(
            f"--calibrate: {workdir} has no evaluation of classes on its own data set: "
            "give a split, such as --calibrate='train[90%:]'"
        )
    split = split or evals[first].split
    test = evals["test"].split if "test" in evals else ""
    if split:  # Otherwise it is the usual validation split.
        _check_apart(config.data, split)
        if test and common_images(config.data, split, test):
            test = ""
    chose = config.checkpoint.best_metric.partition("/")[0]
    if network:
        pretrained, compute = network.pretrained, network.of_split
    else:
        pretrained, preprocess = weights.open_weights(
            os.fspath(workdir), {}, use_ema=use_ema, num_heads=0, tell=lambda line: None
        )
        compute = functools.partial(
            calibration.outputs_of, pretrained, preprocess.upright(), config
        )
    found = calibration.calibrate(
        pretrained,
        compute,
        split,
        test,
        scale=scale,
        chose_checkpoint=chose in evals and evals[chose].split == split,
    )
    if jax.process_index() == 0:
        stored.write(checkpoint_folders.split_step(workdir)[0], found)
    return found


def common_images(data: DataConfig, split: str, other: str) -> int:
    """Returns the number of images that two splits of a data set have in common."""
    one, another = (
        {source.record_id(i) for i in range(len(source))}
        for source in (open_unchecked(data, name) for name in (split, other))
    )
    return len(one & another)


def _check_apart(data: DataConfig, split: str) -> None:
    """Raises UserError if images of a split were trained on."""
    if both := common_images(data, split, data.split):
        raise UserError(
            f"--calibrate={split}: {both:,} of its images were trained on, so their "
            "probabilities are too high: give images that were not"
        )
