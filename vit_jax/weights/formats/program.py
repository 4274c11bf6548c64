"""What programs have in common: a network and its weights that run without this project.

A program takes images that are resized and cropped, of any number, and normalises them
itself. Its folder holds how to prepare them, `preprocess.json`, and `labels.txt`.
Letters: B images, H, W pixels, C channels.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.data.transforms import device as transforms
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.pretrained import Preprocess, Pretrained

INPUT = "images"
BESIDE = ("preprocess.json", "labels.txt")  # The program, in a folder.


@dataclasses.dataclass(frozen=True)
class Program:
    """A network as a function.

    Attributes:
      function: takes parameters and images, uint8 (B, H, W, C), and returns the outputs,
        float32 each.
      params: on the host.
      shape: of an image, (H, W, C).
      outputs: names of what is returned: "logits" (B, classes) if there is a classifier,
        "pre_logits" (B, D), the features of the image, if the network has them.
    """

    function: Callable[[dict, jax.Array], tuple[jax.Array, ...]]
    params: dict
    shape: tuple[int, int, int]
    outputs: tuple[str, ...]

    @property
    def batch(self) -> jax.ShapeDtypeStruct:
        """Images of any number, B."""
        sides = ", ".join(map(str, self.shape))
        return jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"B, {sides}"), jnp.uint8)


def build(pretrained: Pretrained) -> Program:
    """Builds the function of a checkpoint, in float32.

    Args:
      pretrained: with the preprocessing of its images, whose size may be another than
        that of the checkpoint.

    Raises:
      UserError: there is no preprocessing, or it does not fit.
    """
    how = pretrained.preprocess
    if how is None:
        raise UserError(
            f"{pretrained.source}: nothing says how images are prepared, which a program "
            "contains: state --mean, --std and --crop_pct"
        )
    options = {**pretrained.options, "dtype": "float32"}
    model, params = surgery.fit_network(
        dataclasses.replace(pretrained, options=options), how
    )

    def run(params, images):
        images = transforms.normalize(images, how.mean, how.std)
        found = model.apply(params, images)
        return tuple(found[name].astype(jnp.float32) for name in names)

    shape = model.image_shape
    example = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    found = jax.eval_shape(model.apply, params, example)
    names = tuple(name for name in ("logits", "pre_logits") if name in found)
    if not options["num_classes"]:
        names = tuple(name for name in names if name != "logits")
    return Program(run, params, shape, names)


def write_beside(
    pretrained: Pretrained, program: Program, folder: pathlib.Path
) -> None:
    """Writes how images are prepared, and the names of the classes if there are any."""
    how: Preprocess = pretrained.preprocess
    content = dataclasses.asdict(how) | {
        "channels": program.shape[-1],
        "input": f"{INPUT}: uint8 (any number, {', '.join(map(str, program.shape))}), "
        "normalised by the program",
        "outputs": list(program.outputs),
        "probabilities": "sigmoid" if pretrained.loss == "sigmoid" else "softmax",
        "multi_label": pretrained.multi_label,
    }
    (folder / BESIDE[0]).write_text(json.dumps(content, indent=2) + "\n")
    if pretrained.class_names:
        lines = "".join(f"{name}\n" for name in pretrained.class_names)
        (folder / BESIDE[1]).write_text(lines)
