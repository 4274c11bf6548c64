"""What tests share: a complete config, and a run as if it had been killed."""

import shutil

from vit_jax.training import config as configuration


def tiny_config(**sections):
    """Returns the config of a small model on made data; sections update theirs."""
    raw = {
        "name": "tiny",
        "seed": 3,
        "total_steps": 6,
        "batch_size": 8,
        "data": {
            "name": "synthetic",
            "num_classes": 5,
            "num_examples": 20,
            "image_size": (8, 12),
            "channels": 3,
        },
        "model": {
            "variant": "Ti/4",
            "width": 12,
            "depth": 1,
            "num_heads": 3,
            "mlp_dim": 20,
        },
        "optim": {"learning_rate": 0.01},
        "evals": {"val": "val"},
        "log_every_steps": 2,
        "checkpoint_every_steps": 3,
    }
    for name, value in sections.items():
        if isinstance(value, dict) and name != "evals":
            raw[name] = raw.get(name, {}) | value
        else:
            raw[name] = value
    return configuration.complete(raw)


def kill_after(step, workdir):
    """Leaves a finished run as if it had been killed after a step."""
    for path in (workdir / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    (workdir / "report.json").unlink()
