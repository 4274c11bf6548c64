"""Mean IoU of a segmentation head.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT --out=DIR \\
            --config=configs/eval/segmentation.py:data=FOLDER,masks=FOLDER_OF_MASKS,split=val
        data= may also be the name of a data set, and masks= its feature. With
        resize=none images keep their size, as in mmsegmentation for Cityscapes
        (1,024x2,048 pixels).
Result: see docs/dense.md
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(masks="masks", split="", resize="cover", overlap=1 / 3)
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    if c.data.name == "folder":
        c.data.name = "masks"
    c.data.mask_key = arg.masks
    c.evals.test = dict(
        kind="segmentation", split=arg.split, resize=arg.resize, overlap=arg.overlap
    )
    return c
