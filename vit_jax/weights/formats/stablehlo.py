"""StableHLO, as `jax.export` keeps it: runs in JAX on CPU, GPU and TPU, weights inside.

Source: docs.jax.dev/en/latest/export. A program can be read for half a year of JAX
releases at least.
"""

import pathlib

import jax

from vit_jax.weights.formats import program
from vit_jax.weights.formats.registry import WRITERS, Writer
from vit_jax.weights.pretrained import Pretrained

FILE = "model.stablehlo"
_PLATFORMS = ("cpu", "cuda", "tpu")


def write(pretrained: Pretrained, folder: pathlib.Path) -> list[str]:
    """Writes a checkpoint as a program."""
    built = program.build(pretrained)

    @jax.jit
    def images_to_outputs(images):
        return dict(
            zip(built.outputs, built.function(built.params, images), strict=True)
        )

    exported = jax.export.export(images_to_outputs, platforms=_PLATFORMS)(built.batch)
    (folder / FILE).write_bytes(exported.serialize())
    program.write_beside(pretrained, built, folder)
    return []


def usage(_pretrained: Pretrained, place: str, hub: bool) -> str:
    """Returns lines of Python that load what was written."""
    return (
        "import jax, pathlib\n"
        f'data = pathlib.Path("{place}/{FILE}").read_bytes()\n'
        "outputs = jax.export.deserialize(bytearray(data)).call(images)"
    )


WRITERS["stablehlo"] = Writer(
    write, usage=usage, program=True, files=(FILE, *program.BESIDE)
)
