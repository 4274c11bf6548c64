"""Swin Transformers V1 and V2 on ImageNet, or on a folder of photographs (tf_flowers).

Run:    python -m vit_jax.train --config=configs/swin.py:model=T --workdir=gs://.../swin
        python -m vit_jax.train --config=configs/swin.py:data=flowers \\
            --config.data.data_dir=DIR --workdir=runs/swin
        with ,stage=finetune --config.init=WEIGHTS it goes on from weights, as timm's
Try:    the same with --config=configs/swin.py:quick (3 steps, any machine)
Result: on ImageNet-1k not run by us; the authors report 81.3, 83.0 and 83.5 % for T, S and
        B at 224 (arXiv:2103.14030), 81.8, 83.7 and 84.2 for V2 with windows of 8 at 256

The numbers are those of both papers and of microsoft/Swin-Transformer, whose warm-up
begins at a thousandth of the rate, not at 0, and whose RandAugment varies its magnitude.
"""

from ml_collections import ConfigDict

from configs.common import images_of, parse_arg, quick

ARGUMENTS = dict(
    model=("T", "S", "B", "L", "V2-T", "V2-S", "V2-B", "V2-L"),
    data=("imagenet", "imagenet21k", "flowers"),
    stage=("pretrain", "finetune"),
    quick=False,
)
QUICK = dict(width=16, stage_depths=(2, 2), num_heads=(2, 4), window_size=4)
WIDE_DROP_PATH = {"T": 0.1, "S": 0.2, "B": 0.2, "L": 0.2}
DROP_PATH = {"T": 0.2, "S": 0.3, "B": 0.5, "L": 0.2}
CROP = "inception_crop(area=(0.08, 1.0), interpolation='bicubic')"
# All but norms, biases, bias tables, and V2's bias network and scales.
DECAYED = r"(embedding|qkv|proj|Dense_\d|merge|head)/kernel$"


def get_config(arg: str | None = None) -> ConfigDict:
    arg = parse_arg(arg, **ARGUMENTS)
    v2, size = arg.model.startswith("V2"), arg.model[-1]
    tuned, wide = arg.stage == "finetune", arg.data == "imagenet21k"
    c = ConfigDict()
    c.seed, c.ema = 0, dict(decay=0.0)
    c.epochs, c.batch_size = (
        (30, 1024) if tuned else (90, 4096) if wide else (300, 1024)
    )
    c.model = dict(variant=f"Swin{arg.model}" if v2 else f"Swin-{size}")
    wide_rate = 0.1 if size == "T" else 0.2
    c.model.update(
        dtype="bfloat16", drop_path_rate=wide_rate if wide else DROP_PATH[size]
    )
    images_of("imagenet" if wide else arg.data, c, labelled=True)
    if wide:
        c.data.update(name="imagenet21k", split="full[51200:]", num_classes=21_843)
        c.data.num_examples, c.evals.val = 0, "full[:51200]"
    side = 256 if v2 else 224
    c.data.image_size = (side, side)
    c.data.train_transform = (
        f"{CROP} | randaugment(2, 9) | flip | random_erasing(0.25) "
        "| mixup_or_cutmix(0.8, 1.0)"
    )
    c.data.eval_transform = f"resize_small({side + 32}) | central_crop"
    c.task = dict(loss="softmax", label_smoothing=0.1)
    rate = 1e-5 if tuned else 6.25e-5 if wide else 2.5e-4  # For 256 images.
    end = c.batch_size / 256 * rate / 100
    c.optim = dict(name="adam", schedule=dict(name="cosine", end_learning_rate=end))
    c.optim.update(base_learning_rate=rate, warmup_epochs=5 if tuned or wide else 20)
    c.optim.update(grad_clip_norm=5.0, weight_decay_mask=(DECAYED,))
    c.optim.weight_decay = 1e-8 if tuned else 0.1 if wide and v2 else 0.05
    c.update(log_every_steps=50, checkpoint_every_epochs=1, eval_every_epochs=5)
    c.init = "?" if tuned else ""
    if arg.data == "flowers":  # A network that a CPU can train, in place of the size.
        c.epochs, c.batch_size = 10 if tuned else 30, 64
        c.model.update(dtype="float32", width=48, stage_depths=(2, 2, 4), window_size=4)
        c.model.update(num_heads=(2, 4, 8), drop_path_rate=0.0 if tuned else 0.1)
        c.data.update(name="folder", data_dir="", num_classes=5, image_size=(64, 64))
        c.data.train_transform = "inception_crop(area=(0.3, 1.0)) | flip | mixup(0.2)"
        c.data.eval_transform = "resize_small(72) | central_crop"
        c.optim.update(warmup_epochs=1 if tuned else 3, grad_clip_norm=1.0)
        c.optim.update(base_learning_rate=2e-3 if tuned else 4e-3)
        c.task.label_smoothing, c.optim.schedule.end_learning_rate = 0.0, 0.0
        c.evals = dict(val="")  # The folder val, or else validation or test.
    return quick(c, **QUICK) if arg.quick else c
