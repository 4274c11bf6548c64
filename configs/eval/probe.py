"""A linear probe on frozen features of all training images, without random crops.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/probe.py:data=FOLDER_OR_TFDS_NAME [--json]
        FOLDER, train= and test=: see fewshot.py. blocks=4 concatenates the class tokens
        of the last four blocks, as in DINO's linear evaluation of ViT-S.
Result: digits.py's weights on digits: see docs/benchmarks/from_scratch.md

The probe is logistic regression by L-BFGS; the L2 strength is chosen on a tenth of
train, or by 5-fold cross-validation if that tenth has fewer than 500 images. It is
closest to log_regression.py of facebookresearch/dinov2 b8931f7, but features are
standardised here. Published "linear" accuracies belong to classifiers that are trained
on random crops: for MAE's use configs/mae.py:stage=linear. DINO's eval_linear.py (SGD,
100 epochs, class tokens of four blocks, or class token and mean patch of one block) and
DINOv2's linear.py (SGD, the best of 52 classifiers on the validation images) are not
included.
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(train="", test="", held_out=0.1, blocks=(1, 4))
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.probe = dict(kind="probe", train=arg.train, test=arg.test)
    c.evals.probe.update(held_out=arg.held_out, seed=0, iterations=1_000)
    if arg.blocks == 4:
        c.evals.probe.layers = (-4, -3, -2, -1)
    return c
