"""Errors and correlations of predicted numbers, with bootstrap intervals.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/regression.py:data=TABLE,split=test
        target= names the columns if they are not those of the weights. A table without
        a column of splits has one split, split=all.
Result: see docs/regression.md
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(target="", split="")
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.test = dict(kind="regression", split=arg.split, target_key=arg.target)
    return c
