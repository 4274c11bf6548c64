"""`config.init`: the parameters that a run starts from."""

from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights import google, surgery, workdir


def load(
    path: str,
    expected: dict,
    *,
    grid: tuple[int, int],
    head: str = "replace",
    average: bool = True,
) -> tuple[dict, list[str]]:
    """Loads a workdir or an .npz file and fits it to a model.

    Args:
      path: workdir of one of our runs, or npz file of a published checkpoint.
      expected: the model's parameters, as arrays or shapes.
      grid: the model's patches down and across.
      head: "replace" or "keep".
      average: take a workdir's averaged parameters if it has them.

    Returns:
      The parameters and a line for each thing that was loaded or changed.

    Raises:
      UserError: nothing to load there, or it does not fit the model.
    """
    place = epath.Path(path)
    if place.is_dir():
        found = workdir.load(place, average=average)
        old_grid = _grid(found.config)
        given, what = found.params, f"{found.kind} parameters of step {found.step}"
    elif place.exists():
        given, old_grid, what = google.load(place), None, "npz checkpoint"
    else:
        raise UserError(
            f"config.init={path!r} is neither a workdir nor a file: give the workdir of "
            "a finished run or a .npz checkpoint"
        )
    params, notes = surgery.fit(
        given, expected, grid=grid, old_grid=old_grid, head=head
    )
    return params, [f"start: {what} from {path}", *notes]


def _grid(config: dict) -> tuple[int, int]:
    """Returns the patches down and across of a run's model."""
    patch = int(config["model"]["variant"].split("/")[1])
    height, width = config["data"]["image_size"]
    return height // patch, width // patch
