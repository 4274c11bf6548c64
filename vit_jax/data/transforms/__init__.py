"""Names of image transforms; their modules are imported when needed (parse.py)."""

import collections

from vit_jax.config.fields import Registry

_HERE = "vit_jax.data.transforms"

# Transforms that run in the loader, image by image, by their name in
# `data.train_transform` and `data.eval_transform`.
HOST_TRANSFORMS = Registry(
    {
        "inception_crop": f"{_HERE}.host:InceptionCrop",
        "random_resized_crop": f"{_HERE}.host:RandomResizedCrop",
        "clipped_crop": f"{_HERE}.host:ClippedCrop",
        "resize": f"{_HERE}.host:Resize",
        "resize_small": f"{_HERE}.host:ResizeSmall",
        "central_crop": f"{_HERE}.host:CentralCrop",
        "random_crop": f"{_HERE}.host:RandomCrop",
        "resize_long": f"{_HERE}.borders:ResizeLong",
        "crop_or_pad": f"{_HERE}.borders:CropOrPad",
        "scale_crop": f"{_HERE}.scale_crop:ScaleCrop",
        "pad": f"{_HERE}.scale_crop:Pad",
        "multi_crop": f"{_HERE}.multi_crop:MultiCrop",
        "naflex": f"{_HERE}.naflex:NaFlex",
        "randaugment": f"{_HERE}.randaugment:RandAugment",
        "augreg": f"{_HERE}.randaugment:AugReg",
        "timm_randaugment": f"{_HERE}.timm_randaugment:TimmRandAugment",
        "photometric_distortion": f"{_HERE}.photometric_distortion:PhotometricDistortion",
    }
)
# Transforms that run in the training step, on the batch. Importing one imports JAX,
# which loader processes do not need.
DEVICE_TRANSFORMS = Registry(
    {
        "flip": f"{_HERE}.geometric:Flip",
        "pad_crop": f"{_HERE}.geometric:PadCrop",
        "affine": f"{_HERE}.geometric:Affine",
        "color_jitter": f"{_HERE}.photometric:ColorJitter",
        "grayscale": f"{_HERE}.photometric:Grayscale",
        "gaussian_blur": f"{_HERE}.photometric:GaussianBlur",
        "solarize": f"{_HERE}.photometric:Solarize",
        "three_augment": f"{_HERE}.photometric:ThreeAugment",
        "random_erasing": f"{_HERE}.erasing:RandomErasing",
        "upsample": f"{_HERE}.geometric:Upsample",
        "mixup": f"{_HERE}.mixing:Mixup",
        "cutmix": f"{_HERE}.mixing:Cutmix",
        "mixup_or_cutmix": f"{_HERE}.mixing:MixupOrCutmix",
    }
)
KNOWN = collections.ChainMap(DEVICE_TRANSFORMS, HOST_TRANSFORMS)


def where_of(transform: object, key: str) -> str:
    """Returns the key of a line and the name of a transform in it, for messages."""
    names = {cls: name for name, cls in KNOWN.items()}  # Imports all; for errors only.
    name = names.get(type(transform))
    return f"{key}: {name}" if name else transform.where
