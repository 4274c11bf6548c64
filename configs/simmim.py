"""SimMIM: ViT or Swin without labels on ImageNet-1k, then fine-tuned (arXiv:2111.09886).

Run:    python -m vit_jax.train --config=configs/simmim.py --workdir=gs://.../simmim
Then:   python -m vit_jax.train --config=configs/simmim.py:stage=finetune \\
            --config.init.checkpoint=gs://.../simmim --workdir=gs://...
Try:    the same with --config=configs/simmim.py:quick (3 steps, any machine)
Result: not run by us; the authors report 83.8 % for B/16, 84.0 % for Swin-B, fine-tuned

The authors' B/16 has a shared relative bias and LayerScale, as with `:relative_bias`;
here it has learned positions by default. The authors' rates lag by one step, and begin
and end at 1e-6 in all layers in fine-tuning; here the layer decay multiplies this rate.
`:data=FOLDER` reads photographs without labels, and holds out 5 % of them.
"""

from ml_collections import ConfigDict

from configs.common import bicubic_crop, cifar10, parse_arg, quick, use_folder

ARGUMENTS = dict(
    model=("B/16", "L/16", "Swin-B", "Swin-L"),
    data=("imagenet", "cifar10", "FOLDER"),
    stage=("pretrain", "finetune"),
    epochs=(800, 100),  # For pretraining.
    relative_bias=False,
    quick=False,
)
CROP = "random_resized_crop(area={}, interpolation='{}')"


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    is_swin, tuned = arg.model.startswith("Swin"), arg.stage == "finetune"
    side = 192 if is_swin and not tuned else 224
    c = ConfigDict(dict(seed=0))
    c.batch_size = 2048
    c.mesh = dict(data=-1)

    c.data = dict(
        name="imagenet2012",
        split="train",
        num_examples=1_281_167,
        num_classes=0 if arg.stage == "pretrain" else 1_000,
        image_size=(side, side),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        eval_transform=bicubic_crop(256 * side // 224),
    )
    if is_swin:
        window = (7 if tuned else 6) * (2 if arg.model == "Swin-L" else 1)
        c.model = dict(variant=arg.model, window_size=window, dtype="bfloat16")
        c.model.update(bias_resize="geometric", init="timm")
    else:
        c.model = dict(
            variant=arg.model,
            activation="gelu",
            init="simmim",
            pool="gap",
            class_token=True,
            fc_norm=tuned,
            drop_path_rate=0.1,
            dtype="bfloat16",
            scan=None,
        )
        if arg.relative_bias:
            c.model.update(posemb="none", relative_bias="shared", layer_scale_init=0.1)
    c.optim = dict(
        name="adam",
        schedule=dict(name="cosine", includes_warmup=True),
        weight_decay=0.05,
        grad_clip_norm=5.0,
    )
    c.ema = dict(decay=0.0)
    {"pretrain": pretrain, "finetune": finetune}[arg.stage](c, arg, is_swin)
    use_folder(arg.data, c)

    c.update(log_every_steps=50, eval_every_epochs=5, checkpoint_every_epochs=1)
    if arg.quick and is_swin:
        quick(c, width=16, stage_depths=(2, 2), num_heads=(2, 4), window_size=4)
    elif arg.quick:
        quick(c)
    if arg.quick and arg.stage == "pretrain":
        c.task.mask_unit = c.data.image_size[0] // 2
    return c


def pretrain(c: ConfigDict, arg, is_swin: bool) -> None:
    c.epochs = arg.epochs
    c.data.train_transform = CROP.format((0.67, 1.0), "bilinear") + " | flip"
    c.evals = dict(knn=dict(kind="knn", test="validation", every_epochs=20))
    c.evals.val = dict(kind="task", split="validation")
    c.task = dict(name="simmim", mask_ratio=0.6, mask_unit=32)
    if arg.data == "cifar10":
        cifar10(c, **(dict(window_size=6) if is_swin else {}))
        c.data.image_size = (192, 192) if is_swin else (32, 32)
        c.task.mask_unit = 8
    rate = 1e-4 if arg.epochs == 800 else 2e-4  # For 512 images.
    c.optim.update(
        base_learning_rate=rate / 2,
        warmup_epochs=10,
        warmup_learning_rate=rate / 200 * c.batch_size / 512,
        # The authors' list of exceptions misspells Swin's bias tables, so they decay.
        weight_decay_mask=(r"/kernel$", r"bias_table$" if is_swin else r"mask_token$"),
    )
    if arg.epochs == 800:  # A tenth of the rate after 700 epochs.
        c.optim.schedule = dict(name="step", boundary_epochs=(700,), decay_rate=0.1)
    else:
        c.optim.schedule.end_learning_rate = 4e-5 * c.batch_size / 2048


def finetune(c: ConfigDict, arg, is_swin: bool) -> None:
    c.epochs = 100
    # The last norm is new, because it comes after the pooling.
    last = (r"encoder_norm/", r"fc_norm/")
    c.init = dict(checkpoint="?", allow_mismatch=() if is_swin else last)
    c.data.train_transform = (
        f"{CROP.format((0.08, 1.0), 'bicubic')} | timm_randaugment | flip "
        "| random_erasing(0.25, fill='normal') | mixup_or_cutmix(0.8, 1.0, group=128)"
    )
    c.evals = dict(val="validation")
    c.task = dict(loss="softmax", label_smoothing=0.1)
    c.optim.update(base_learning_rate=1.25e-3 / 2, warmup_epochs=20)
    c.model.drop_path_rate = 0.2 if arg.model == "Swin-L" else 0.1
    c.optim.warmup_learning_rate = c.optim.schedule.end_learning_rate = 1e-6
    c.optim.layer_decay = {"B/16": 0.65, "L/16": 0.65, "Swin-L": 0.7}.get(
        arg.model, 0.9 if arg.epochs == 100 else 0.8
    )
    if arg.data == "cifar10":
        c.batch_size = 256
        if not is_swin:
            cifar10(c)
