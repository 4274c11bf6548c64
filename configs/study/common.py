"""What studies share: how a point is pretrained and fine-tuned."""

from ml_collections import ConfigDict

PARTS = ("pretrain", "finetune")


def pretrain(c: ConfigDict, *, steps: int, batch_size: int, rate: float) -> None:
    """Completes a config of pretraining: Adam, and no evaluation before the end.

    Args:
      c: with `data`; test is scored once, and so cannot choose anything.
      steps, batch_size, rate: of the run.
    """
    c.total_steps, c.batch_size = steps, batch_size
    c.optim = dict(
        name="adam", learning_rate=rate, schedule="cosine", warmup_fraction=0.05
    )
    c.optim.weight_decay, c.optim.grad_clip_norm = 0.1, 1.0
    _common(c, steps)


def finetune(c: ConfigDict, *, steps: int, batch_size: int, rate: float) -> None:
    """Completes a config of fine-tuning: SGD with one rate for all models."""
    c.total_steps, c.batch_size = steps, batch_size
    c.init = "?"  # The study states the pretraining.
    c.optim = dict(
        name="sgd",
        momentum=0.9,
        learning_rate=rate,
        schedule="cosine",
        grad_clip_norm=1.0,
    )
    _common(c, steps)


def _common(c: ConfigDict, steps: int) -> None:
    c.ema = dict(decay=0.0)
    c.evals = dict(test="test")
    # Steps; a run that is killed loses a tenth at most.
    c.log_every_steps = max(1, steps // 50)
    c.checkpoint_every_steps = max(1, steps // 10)
    c.checkpoint = dict(max_to_keep=1)


def fewshot(train: str, *, shots: tuple[int, ...], seeds: int) -> dict:
    """Returns an evaluation that draws examples of a split and is scored on test."""
    return dict(kind="fewshot", train=train, test="test", shots=shots, seeds=seeds)
