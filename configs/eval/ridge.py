"""Ridge regression from frozen features to a number, for any weights.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/ridge.py:data=TABLE,target=age,train=train,test=test
        A table without a column of splits is cut by train=all[:80%],test=all[80%:].
        blocks=4 concatenates the class tokens of the last four blocks.
Result: see docs/regression.md

The strength of the regularisation is chosen by the leave-one-out error of the training
images.
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(target="", train="", test="", blocks=(1, 4))
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    c.evals.ridge = dict(kind="ridge", train=arg.train, test=arg.test)
    c.evals.ridge.target_key = arg.target
    if arg.blocks == 4:
        c.evals.ridge.layers = (-4, -3, -2, -1)
    return c
