import pathlib
import subprocess
import sys

import pytest

QUIET = """
import multiprocessing
import pathlib
import sys
from vit_jax.training import config
from vit_jax.data import pipeline, workers
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import multihost

if __name__ == "__main__":
    raw = {"batch_size": 4, "optim": {"learning_rate": 0.1}}
    raw["data"] = dict(name="synthetic", num_classes=3, image_size=(5, 7), num_workers=1)
    raw["data"]["train_transform"] = "inception_crop"
    data = config.complete(raw).data
    source = open_source(data, "train")
    options = dict(batch_size=4, seed=0, start=0, stop=10**6)
    with pipeline.train_batches(source, data, **options) as batches:
        kept = [next(batches) for _ in range(5)]
    batches.close()
    # As a loader process leaves one that is killed in the wrong moment.
    if pathlib.Path("/dev/shm").exists():
        pathlib.Path(f"/dev/shm/{workers._prefix()}left").touch()
    assert list(batches) == []
    print(len(kept), multiprocessing.active_children(), workers._prefix())
    if sys.argv[1] == "exit_process":
        multihost.exit_process(0)
"""


@pytest.mark.parametrize(
    "end", ["return", pytest.param("exit_process", marks=pytest.mark.slow)]
)
def test_closing_leaves_no_process_no_shared_memory_and_no_noise(tmp_path, end):
    script = tmp_path / "quiet.py"
    script.write_text(QUIET)
    run = subprocess.run(
        [sys.executable, "-W", "error", script, end],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PATH": ""},
        timeout=60,
    )
    said, _, prefix = run.stdout.rpartition(" ")
    assert (said, run.stderr) == ("5 []", "")
    assert prefix.startswith("vit_jax-")
    assert list(pathlib.Path("/dev/shm").glob(f"{prefix.strip()}*")) == []
