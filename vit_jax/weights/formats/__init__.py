"""Weight formats; an import line here registers one.

Messages list them in this order.
"""

# isort: off
from vit_jax.weights.formats import hugging_face
from vit_jax.weights.formats import timm
from vit_jax.weights.formats import dino
from vit_jax.weights.formats import hugging_face_dinov2
from vit_jax.weights.formats import hugging_face_clip
from vit_jax.weights.formats import open_clip
from vit_jax.weights.formats import hugging_face_dinov3
from vit_jax.weights.formats import hugging_face_beit
from vit_jax.weights.formats import hugging_face_ijepa
from vit_jax.weights.formats import mae
from vit_jax.weights.formats import bit
from vit_jax.weights.formats import google
from vit_jax.weights.formats import big_vision
from vit_jax.weights.formats import lit
from vit_jax.weights.formats import mixer
from vit_jax.weights.formats import timm_mixer
from vit_jax.weights.formats import swin
from vit_jax.weights.formats import hugging_face_swin
from vit_jax.weights.formats import native
from vit_jax.weights.formats import stablehlo
from vit_jax.weights.formats import onnx
# isort: on

__all__ = [
    "big_vision",
    "bit",
    "dino",
    "google",
    "hugging_face",
    "hugging_face_beit",
    "hugging_face_clip",
    "hugging_face_dinov2",
    "hugging_face_dinov3",
    "hugging_face_ijepa",
    "hugging_face_swin",
    "lit",
    "mae",
    "mixer",
    "native",
    "onnx",
    "open_clip",
    "stablehlo",
    "swin",
    "timm",
    "timm_mixer",
]
