"""Semantic segmentation: a ViT fine-tuned on ADE20K and others, or a linear head on it.

Run:    python -m vit_jax.train --config=configs/segmentation.py --workdir=DIR \\
            --config.init=CHECKPOINT --config.data.data_dir=ADEChallengeData2016
        :head=linear trains a BatchNorm and a linear layer alone, as DINOv2's probes;
        :data=voc, cityscapes or pets (TFDS's oxford_iiit_pet) reads another set.
Try:    the same with --config=configs/segmentation.py:quick (3 steps, any machine)
Result: not run by us

Batch, steps, rates, crops and windows are those of mmsegmentation's MAE on ADE20K
(configs/mae/mae-base_upernet_8xb2-amp-160k_ade20k-512x512.py, with UperNet, for which the
pyramid of ViTDet stands here), and for the linear head those of its training in
facebookresearch/dinov2, whose patches of 14 pixels need model=S/14 or another, at 518
pixels; windows overlap by half, and for the linear head by a third. The short side is
resized to 256 to 1,024 pixels in training and to 512 in evaluation
(configs/_base_/datasets/ade20k.py and pascal_voc12.py); that of Cityscapes to 512 to 2,048,
in crops of 512x1,024, and to its own 1,024 (cityscapes.py).

There, images are flipped before they are padded; here after it, so half of the padding beside
an image is on its left: a sixth of the crops of 4:3 photographs has some, of Cityscapes none.
Images that shrink are antialiased here, and not by OpenCV's bilinear filter there.
"""

from ml_collections import ConfigDict

from configs.common import parse_arg, quick

ARGUMENTS = dict(
    model=("B/16", "L/16", "S/14", "B/14", "L/14"),
    data=("ade20k", "voc", "cityscapes", "pets"),
    head=("pyramid", "linear"),
    quick=False,
)
DATA = {
    "ade20k": dict(
        name="masks",
        mask_key="annotations",
        num_classes=150,
        reduce_zero_label=True,
        num_examples=20_210,
    ),
    "voc": dict(
        name="masks", mask_key="SegmentationClass", num_classes=21, num_examples=1_464
    ),
    "cityscapes": dict(
        name="masks", mask_key="gtFine", num_classes=19, num_examples=2_975
    ),
    "pets": dict(
        name="oxford_iiit_pet",
        mask_key="segmentation_mask",
        num_classes=3,
        reduce_zero_label=True,
        num_examples=3_680,
    ),
}
LAYERS = {12: (3, 5, 7, 11), 24: (7, 11, 15, 23)}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed = 0
    c.batch_size = 16
    c.mesh = dict(data=-1)
    c.init = "?"

    side = 512 if arg.model.endswith("/16") else 518
    street = arg.data == "cityscapes"
    scale = (1.0, 4.0) if street else (0.5, 2.0)  # Of the short side by that of a crop.
    c.data = dict(
        split="train",
        ignore_label=255,
        image_size=(side, 2 * side if street else side),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        train_transform=(
            f"scale_crop(scale={scale}, most_of_one=0.75, pad=False) | "
            "photometric_distortion | pad | flip"
        ),
        **DATA[arg.data],
    )
    split = "test" if arg.data == "pets" else "val"
    c.evals = dict(
        val=dict(
            kind="segmentation",
            split=split,
            resize="none" if street else "cover",
            overlap=0.5 if arg.head == "pyramid" else 1 / 3,
        )
    )

    depth = 24 if arg.model.startswith("L") else 12
    c.model = dict(variant=arg.model, activation="gelu", dtype="bfloat16", scan=None)
    c.optim = dict(name="adam", warmup_steps=1_500, schedule=dict(name="linear"))
    c.ema = dict(decay=0.0)
    if arg.head == "linear":
        c.total_steps = 40_000
        c.task = dict(name="segmentation", head="linear", frozen=True)
        c.optim.update(learning_rate=1e-3, weight_decay=1e-4)
    else:
        c.total_steps = 160_000
        c.task = dict(name="segmentation", head="pyramid", layers=LAYERS[depth])
        c.model.drop_path_rate = 0.1
        c.optim.update(learning_rate=1e-4, weight_decay=0.05, layer_decay=0.65)

    c.log_every_steps = 50
    c.eval_every_steps = 8_000
    c.checkpoint_every_steps = 8_000
    c.checkpoint = dict(best_metric="val/miou")
    if arg.quick:
        quick(c)
        c.task.update(layers=(-1,), width=16)
    return c
