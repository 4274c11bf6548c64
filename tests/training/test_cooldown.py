"""A cooldown that begins at an earlier checkpoint of a run is that of a shorter run."""

import shutil

import pytest
from helpers import tiny_config, train


def config(total_steps, **keys):
    schedule = {"name": "wsd", "cooldown_steps": 2}
    return tiny_config(
        total_steps=total_steps,
        optim={"schedule": schedule, "warmup_steps": 1},
        checkpoint={"max_to_keep": 9},
        evals={},
        **keys,
    )


@pytest.mark.slow
def test_a_branch_of_the_stable_part_ends_as_a_run_of_its_length(tmp_path):
    long, branch, short = (tmp_path / name for name in ("long", "branch", "short"))
    train(config(8), long)
    shutil.copytree(long / "checkpoints" / "3", branch / "checkpoints" / "3")
    resumed = train(config(5, extend_schedule="stretch"), branch)
    assert resumed["params_sha256"] == train(config(5), short)["params_sha256"]
    assert (branch / "checkpoints" / "5").is_dir()
    first = (branch / "metrics.jsonl").read_text().splitlines()[0]
    assert '"step": 4' in first  # Steps 1 to 3 were not taken again.
