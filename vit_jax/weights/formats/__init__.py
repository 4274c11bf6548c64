"""Weight formats, which register themselves when imported, in any order."""

from vit_jax.weights.formats import (  # noqa: F401
    big_vision,
    bit,
    dino,
    google,
    hugging_face_beit,
    hugging_face_clip,
    hugging_face_dino,
    hugging_face_swin,
    hugging_face_vit,
    lit,
    mae,
    mixer,
    native,
    onnx_int8,
    open_clip,
    programs,
    swin,
    timm,
    timm_naflex,
)
