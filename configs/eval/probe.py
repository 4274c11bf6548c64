"""A linear probe on frozen features, full data, as DINO and MAE are compared.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/probe.py:data=FOLDER_OR_TFDS_NAME [--json]
        FOLDER, train= and test= are as of fewshot.py.
Result: digits.py's weights on digits: see docs/benchmarks.md

Logistic regression by L-BFGS; the L2 strength is chosen on a tenth of train, or by 5-fold
cross-validation where that tenth has fewer than 500 images.
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(train="", test="", held_out=0.1)
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.probe = dict(kind="probe", train=arg.train, test=arg.test)
    c.evals.probe.held_out = arg.held_out
    return c
