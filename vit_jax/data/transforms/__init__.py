"""Image transforms: `data.train_transform` and `data.eval_transform`, see parse.py."""
