"""Image transforms: `data.ops` and `data.eval_ops`, see parse.py."""
