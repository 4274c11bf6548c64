"""Recall at 1, 5 and 10 of weights with a text tower, from images to captions and back.

Run:    python -m vit_jax.evaluate --model=hf://openai/clip-vit-base-patch32 \\
            --config=configs/eval/retrieval.py:data=FOLDER,captions=txt [--json]
        FOLDER holds val/*.jpg and val/*.txt, or a metadata.jsonl whose field captions=
        names; of a TFDS or Parquet set captions= is the feature or the column.
Result: not run by us: no data set of captions is on our machines
"""

from ml_collections import ConfigDict

from configs.eval.common import DATA, evaluation

MORE = dict(split="", captions="txt")
ARGUMENTS = DATA | MORE


def get_config(arg: str | None = None) -> ConfigDict:
    arg, c = evaluation(arg, **MORE)
    retrieval = dict(kind="retrieval", split=arg.split, caption_key=arg.captions)
    c.evals.test = retrieval
    return c
