"""What a published checkpoint holds, whatever format it came in."""

import dataclasses

# Where learned position embeddings are among our names.
POSITIONS = "Transformer/posembed_input/pos_embedding"


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """How images are prepared for a model.

    The image is resized until it just covers `image_size / crop_fraction`, with `squash`
    to exactly that, and the centre cropped to `image_size`.

    Attributes:
      image_size: height and width that reach the model, in pixels.
      mean: subtracted a channel, as a fraction of 255.
      std: divided by afterwards, a channel.
      interpolation: "nearest", "bilinear", "bicubic", "lanczos" or "area"; all of them
        antialiased when an image shrinks.
      crop_fraction: part of the resized side that the crop keeps.
      squash: whether the aspect ratio is given up instead of cropping.
      short_side: whether the image's short side is resized to
        `min(image_size) / crop_fraction`, whatever the shape of the crop. Stated only of
        crops that are not square; of square ones it would be the same.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bilinear"
    crop_fraction: float = 1.0
    squash: bool = False
    short_side: bool = False


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint in this project's terms.

    Attributes:
      params: nested dict of numpy arrays under our names, whatever their shapes.
      options: what `models.create(**options)` takes to build the network that the
        parameters are of: variant, classes, image_size, channels, head, gelu, ...
      format: "google", "big_vision", "bit", "timm", "hugging_face", "workdir" or
        "vit_jax".
      source: where it came from, for messages.
      preprocess: how its images were prepared, or None where nothing says so.
      class_names: in label order; empty where nothing says so.
      loss: "softmax", or "sigmoid" where every class has a probability of its own.
      notes: a line for each thing that was folded or dropped on reading.
    """

    params: dict
    options: dict
    format: str
    source: str
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    loss: str = "softmax"
    notes: tuple[str, ...] = ()
