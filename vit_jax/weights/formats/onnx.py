"""ONNX, written by jax2onnx (github.com/enpasos/jax2onnx), with the extra `onnx`."""

import contextlib
import io
import logging
import pathlib
from collections.abc import Iterator

import jax

from vit_jax.errors import UserError
from vit_jax.weights.formats import program
from vit_jax.weights.formats.registry import WRITERS, Writer
from vit_jax.weights.pretrained import Pretrained

FILE = "model.onnx"
_OPSET = 21  # ONNX Runtime has it since 1.20.


def write(pretrained: Pretrained, folder: pathlib.Path) -> list[str]:
    """Writes a checkpoint as a program.

    Raises:
      UserError: the extra is not installed.
    """
    for name in ("jax2onnx", "onnx_ir"):  # They warn of optional parts and each shape.
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _silenced():
            import jax2onnx
    except ImportError as error:
        raise UserError(
            f"--to=onnx needs jax2onnx ({error}): pip install -e '.[onnx]' in the clone"
        ) from error
    built = program.build(pretrained)
    # It prints what it traces, and adds vectors to images.
    with _silenced(), jax.numpy_rank_promotion("allow"):
        jax2onnx.to_onnx(
            lambda images: built.function(built.params, images),
            [built.batch],
            model_name=pretrained.options["variant"],
            opset=_OPSET,
            return_mode="file",
            output_path=folder / FILE,
            input_names=[program.INPUT],
            output_names=list(built.outputs),
        )
    program.write_beside(pretrained, built, folder)
    return []


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield


def usage(_pretrained: Pretrained, place: str, hub: bool) -> str:
    """Returns lines of Python that load what was written."""
    return (
        "import onnxruntime\n"
        f'session = onnxruntime.InferenceSession("{place}/{FILE}")\n'
        f'logits = session.run(["logits"], {{"{program.INPUT}": images}})[0]'
    )


WRITERS["onnx"] = Writer(
    write,
    usage=usage,
    library="onnx",
    program=True,
    files=(FILE, f"{FILE}.data", *program.BESIDE),
)
