"""SimMIM: ViT or Swin without labels on ImageNet-1k, then fine-tuned (arXiv:2111.09886).

Run:    python -m vit_jax.train --config=configs/simmim.py --workdir=gs://.../simmim
Then:   python -m vit_jax.train --config=configs/simmim.py:stage=finetune \\
            --config.init.checkpoint=gs://.../simmim --workdir=gs://...
Try:    the same with --config=configs/simmim.py:quick (3 steps, any machine)
Result: not run by us; the authors report 83.8 % for B/16, 84.0 % for Swin-B, fine-tuned

Their B/16 has a shared relative bias and LayerScale, here learned positions.
"""

from ml_collections import ConfigDict

from configs import mae, swin
from configs.common import images_of, parse_arg, quick

ARGUMENTS = dict(
    model=("B/16", "L/16", "Swin-B", "Swin-L"),
    data=("imagenet", "cifar10"),
    stage=("pretrain", "finetune"),
    epochs=(800, 100),  # Of pretraining.
    quick=False,
)
LAYER_DECAY = {800: 0.8, 100: 0.9}  # Of Swin-B.
CROP = "inception_crop(area=(0.67, 1.0), interpolation='bicubic') | flip"


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    is_swin = arg.model.startswith("Swin")
    c = pretrain(arg) if arg.stage == "pretrain" else finetune(arg)
    if arg.quick:
        quick(c, **(swin.QUICK if is_swin else {}))
        if arg.stage == "pretrain":
            c.task.mask_unit = c.data.image_size[0] // 2
    return c


def pretrain(arg) -> ConfigDict:
    c = ConfigDict()
    c.seed, c.ema = 0, dict(decay=0.0)
    c.epochs, c.batch_size = arg.epochs, 2048
    # Pooled in fine-tuning, so that no norm stands before the decoder.
    c.model = dict(variant=arg.model, activation="gelu", dtype="bfloat16", scan=True)
    c.model.update(pool="gap", class_token=True, fc_norm=True)
    c.task = dict(name="simmim", mask_ratio=0.6, mask_unit=32)
    c.optim = dict(name="adam", b1=0.9, b2=0.999, warmup_epochs=10, weight_decay=0.05)
    c.optim.weight_decay_mask = (r"/kernel$", r"mask_token$")
    images_of(arg.data, c)
    if arg.model.startswith("Swin"):
        c.model = dict(variant=arg.model, window_size=6, dtype="bfloat16")
        c.data.image_size, c.optim.weight_decay_mask = (192, 192), (swin.DECAYED,)
    c.data.train_transform = CROP
    if arg.epochs == 800:  # A tenth of the rate after 700 epochs.
        boundary = round(700 * c.data.num_examples / c.batch_size)
        c.optim.schedule = dict(name="step", boundaries=(boundary,), decay_rate=0.1)
        c.optim.base_learning_rate = 1e-4 / 2  # The paper's are for 512 images.
    else:
        c.optim.schedule = "cosine"
        c.optim.base_learning_rate = 2e-4 / 2
    if arg.data == "cifar10":
        c.task.mask_unit = 8
    c.update(log_every_steps=50, checkpoint_every_epochs=1, eval_every_epochs=5)
    return c


def finetune(arg) -> ConfigDict:
    if arg.model.startswith("Swin"):
        c = swin.get_config(f"model={arg.model[-1]},stage=finetune")
        c.model.window_size, c.data.image_size = 6, (192, 192)
        c.optim.layer_decay = 0.7 if arg.model == "Swin-L" else LAYER_DECAY[arg.epochs]
    else:
        c = mae.get_config(f"model={arg.model},data={arg.data},stage=finetune")
        c.optim.layer_decay = 0.65
    c.epochs, c.batch_size = 100, 2048 if arg.data == "imagenet" else 256
    c.init = "?" if "Swin" in arg.model else dict(checkpoint="?")
    c.model.drop_path_rate = 0.2 if arg.model == "Swin-L" else 0.1
    c.optim.update(base_learning_rate=1.25e-3 / 2, warmup_epochs=20)
    return c
