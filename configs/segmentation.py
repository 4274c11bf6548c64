"""Semantic segmentation: ViT fine-tuned on ADE20K and others, or with a linear head.

Run:    python -m vit_jax.train --config=configs/segmentation.py --workdir=DIR \\
            --config.init=CHECKPOINT --config.data.data_dir=ADEChallengeData2016
        :head=linear trains only a BatchNorm and a linear layer, as in DINOv2's probes;
        :data=voc, cityscapes or pets (TFDS's oxford_iiit_pet) uses another data set.
Try:    the same with --config=configs/segmentation.py:quick (3 steps, any machine)
Result: not run by us

Batch size, steps, rates, crops and windows are those of mmsegmentation's MAE on ADE20K
(configs/mae/mae-base_upernet_8xb2-amp-160k_ade20k-512x512.py; here the pyramid of
ViTDet replaces UperNet). For the linear head they are those of facebookresearch/dinov2,
whose patches of 14 pixels need model=S/14, B/14 or L/14, at 518 pixels. Windows overlap
by half, or by a third for the linear head. The short side of images is resized to 256
to 1,024 pixels in training and to 512 in evaluation (configs/_base_/datasets/ade20k.py
and pascal_voc12.py). For Cityscapes it is resized to 512 to 2,048 pixels, with crops of
512x1,024, and stays 1,024 in evaluation (cityscapes.py).

In mmsegmentation, images are flipped before they are padded; here afterwards, so that
half of the padding is on the left of an image. It concerns a sixth of the crops of 4:3
photographs, and no crop of Cityscapes. Images that shrink are antialiased here, while
OpenCV's bilinear filter in mmsegmentation does not antialias.
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
    scale = (1.0, 4.0) if street else (0.5, 2.0)  # Short side / side of a crop.
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
