"""ONNX programs whose weights are int8, by ONNX Runtime's own quantiser.

Weights of dense layers are rounded per output channel; their inputs are rounded to uint8
when the program runs, by the range of each batch, so no calibration is needed.
"""

import dataclasses
import os
import pathlib
import tempfile

from vit_jax.errors import UserError
from vit_jax.weights.formats import programs
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.pretrained import Pretrained


def write(pretrained: Pretrained, folder: pathlib.Path) -> list[str]:
    """Writes a folder with an ONNX program; see `registry.Writer`.

    Raises:
      UserError: the extra is not installed.
    """
    notes = programs.write_onnx(pretrained, folder)
    try:
        from onnxruntime import quantization
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError as error:
        raise UserError(
            f"--int8 needs onnxruntime ({error}): pip install -e '.[onnx]' in the clone"
        ) from error
    program, data = (folder / name for name in WRITERS["onnx"].files[:2])
    sizes = [file.stat().st_size for file in (program, data) if file.exists()]
    how = {"per_channel": True, "weight_type": quantization.QuantType.QInt8}
    with programs.silenced(), tempfile.TemporaryDirectory(dir=folder.parent) as made:
        folded, rounded = (f"{made}/{name}.onnx" for name in ("folded", "rounded"))
        # Weights in a separate file are over 2 GB, the limit of one file.
        quant_pre_process(
            program,
            folded,
            skip_symbolic_shape=True,
            save_as_external_data=data.exists(),
        )
        quantization.quantize_dynamic(folded, rounded, **how)
        os.replace(rounded, program)
    data.unlink(missing_ok=True)
    part = program.stat().st_size / sum(sizes)
    return [*notes, f"weights: int8 per channel, {part:.2f} of the size in float32"]


WRITERS["onnx_int8"] = dataclasses.replace(WRITERS["onnx"], write=write)
