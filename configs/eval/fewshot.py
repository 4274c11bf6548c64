"""Few-shot linear accuracy (arXiv:2010.11929, section 4.1) and k-NN for any weights.

Run:    python -m vit_jax.evaluate --model=CHECKPOINT \
            --config=configs/eval/fewshot.py:data=FOLDER_OR_TFDS_NAME [--json]
        FOLDER has train/<class>/... and test/ or val/<class>/...; if it has only
        <class>/..., slice it: data=FOLDER,train=all[:50%],test=all[50%:]. A TFDS data
        set that was prepared in DIR is NAME@DIR. seeds=5 is faster; train= and test=
        choose splits.
Result: digits.py's weights on digits: see docs/benchmarks/from_scratch.md
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(train="", test="", seeds=20, l2=1024.0)
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    splits = dict(train=arg.train, test=arg.test)
    c.evals.fewshot = dict(kind="fewshot", shots=(1, 5, 10, 25), **splits)
    c.evals.fewshot.update(seeds=arg.seeds, l2=(arg.l2,))
    c.evals.knn = dict(kind="knn", k=20, temperature=0.07, **splits)  # As in DINO.
    return c
