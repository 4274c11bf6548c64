"""Masked patch prediction: ViT without labels (arXiv:2010.11929, 4.6 and B.1.2).

Run:    python -m vit_jax.train --config=configs/masked_patch.py --workdir=gs://.../mpp \\
            --config.data.name=YOURS
        python -m vit_jax.train --config=configs/masked_patch.py:data=imagenet2012 ...
Then:   python -m vit_jax.train --config=configs/transfer.py:model=B/16,dataset=imagenet2012 \\
            --config.init=gs://.../mpp --workdir=gs://...
Try:    the same with --config=configs/masked_patch.py:quick (3 steps, any machine)
Result: not run by us; the paper reports 79.9 % on ImageNet-1k at 384 px after JFT, against
        77.9 % from scratch

JFT-300M is not public: give the name of your data set. The paper adds that gains shrink
after 100k steps, and that ImageNet gives similar gains: with ImageNet the run has 100k
steps. The paper mentions no weight decay. `:data=FOLDER` reads photographs without
labels, and holds out 5 % of them; `:data=cifar10` trains a network that fits a CPU.
"""

from ml_collections import ConfigDict

from configs.common import big_vision_crop, cifar10, parse_arg, quick, use_folder

ARGUMENTS = dict(
    model=("B/16", "B/32", "L/16"),
    data=("jft", "imagenet21k", "imagenet2012", "cifar10", "FOLDER"),
    target=("mean_color", "colors_4x4", "pixels"),
    mask_ratio=(0.5, 0.15),
    quick=False,
)


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.seed = 0
    c.total_steps = 1_000_000 if arg.data == "jft" else 100_000
    c.batch_size = 4096
    c.mesh = dict(data=-1)

    c.data = dict(
        name="jft300m" if arg.data == "jft" else str(arg.data),
        split="train",
        num_classes=0,
        image_size=(224, 224),
        mean=(0.5,),  # As in the paper's other runs.
        std=(0.5,),
        train_transform="inception_crop | flip",
        eval_transform=big_vision_crop(256),
    )
    c.evals = dict(val=dict(kind="task", split="validation"))
    if arg.data == "imagenet21k":
        c.data.split, c.evals.val.split = "full[51200:]", "full[25600:51200]"
    elif arg.data != "jft":
        c.evals = dict(knn=dict(kind="knn", test="validation", every_epochs=20))
        c.evals.val = dict(kind="task", split="validation")
    if arg.data == "imagenet2012":
        c.data.num_examples = 1_281_167

    c.model = dict(
        variant=arg.model,
        pool="token",
        dtype="bfloat16",
        scan=None,
    )
    c.task = dict(
        name="masked_patch",
        target=arg.target,
        mask_ratio=arg.mask_ratio,
        mask_share=0.8,
        swap_share=0.1,
    )
    c.optim = dict(
        name="adam",
        b1=0.9,
        b2=0.999,
        learning_rate=2e-4,
        warmup_steps=10_000,
        schedule="cosine",
    )
    c.ema = dict(decay=0.0)

    c.log_every_steps = 50
    c.eval_every_steps = 10_000
    c.checkpoint_every_steps = 1_000

    use_folder(arg.data, c)
    if arg.data == "cifar10":
        cifar10(c)
    return quick(c) if arg.quick else c
