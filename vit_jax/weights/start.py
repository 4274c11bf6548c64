"""`config.init`: the parameters that a run starts from."""

from etils import epath
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights import google, surgery, workdir


def load(
    config: ConfigDict, expected: dict, grid: tuple[int, int]
) -> tuple[dict, list[str]]:
    """Loads a workdir or an .npz file and fits it to a model.

    Args:
      config: complete config; `init`, `init_head`, `init_average` and
        `model.head_bias` are read.
      expected: the model's parameters, as arrays or shapes.
      grid: the model's patches down and across.

    Returns:
      The parameters and a line for each thing that was loaded or changed.

    Raises:
      UserError: nothing to load there, or it does not fit the model.
    """
    place = epath.Path(config.init)
    if place.is_dir():
        found = workdir.load(place, average=config.init_average)
        old_grid = _grid(found.config)
        given, what = found.params, f"{found.kind} parameters of step {found.step}"
    elif place.exists():
        given, old_grid, what = google.load(place), None, "npz checkpoint"
    else:
        raise UserError(
            f"config.init={config.init!r} is neither a workdir nor a file: give the "
            "workdir of a finished run or a .npz checkpoint"
        )
    params, notes = surgery.fit(
        given,
        expected,
        grid=grid,
        old_grid=old_grid,
        head=config.init_head,
        head_bias=config.model.head_bias,
    )
    return params, [f"start: {what} from {config.init}", *notes]


def _grid(config: dict) -> tuple[int, int]:
    """Returns the patches down and across of a run's model."""
    _, patch = variants.parse(config["model"]["variant"])
    height, width = config["data"]["image_size"]
    return height // patch, width // patch
