"""The search for the largest batch that fits."""

import jax
import pytest
from helpers import run_command, tiny_config, train

from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.tools.planning import analysis, batch_search
from vit_jax.training import config as configuration

LIMIT, STATE = 8_000, 900


def straight(batch):
    # Small batches are padded, so that memory is no straight line.
    return 1_000 + 7 * max(batch, 100) + batch % 3


def saving(batch):
    # As XLA, which computes values again once they do not fit, until nothing is left.
    needed = STATE + 10 * batch
    return needed if needed < 7_500 else max(7_500, STATE + 6 * batch)


@pytest.mark.parametrize(
    ("peak", "largest", "tries"),
    [
        (straight, 1_000, 5),
        (saving, (LIMIT - STATE) // 6, 9),
        (lambda batch: STATE + 70 * batch, 101, 5),
        (lambda batch: STATE + 3_000 * batch, 2, 5),
        (lambda batch: STATE + 8_000 * batch, 0, 3),
    ],
)
def test_the_largest_batch_is_between_one_that_fits_and_one_that_does_not(
    monkeypatch, peak, largest, tries
):
    def analyse(config, mesh, examples, limit):
        each, rest = divmod(config.batch_size, mesh.size * 2)
        assert not rest
        tried.append(each)
        return analysis.Analysis(
            settings={},
            fits=peak(each) <= limit,
            peak_bytes=peak(each),
            params_bytes=STATE // 3,
            moments_bytes=STATE - STATE // 3,
        )

    tried = []
    monkeypatch.setattr(analysis, "analyse", analyse)
    config = configuration.load(
        "digits", {"batch_size": 4_096, "optim.grad_accum_steps": 2}
    )
    mesh = meshes.create(config.mesh, jax.devices())
    config, result = batch_search.largest_batch(config, mesh, 20, LIMIT)
    found = config.batch_size // (mesh.size * 2)
    assert result.fits == (largest > 0)
    assert 0.95 * largest <= found <= max(1, largest)
    assert result.peak_bytes == peak(found)
    assert min(b for b in tried if peak(b) > LIMIT) <= max(1.05 * found, found + 1)
    assert len(tried) <= tries


def test_batches_hold_whole_groups_of_stochastic_depth(monkeypatch):
    def analyse(config, mesh, examples, limit):
        assert config.batch_size % (mesh.size * 6) == 0
        each = config.batch_size // mesh.size
        return analysis.Analysis({}, fits=each <= 60, peak_bytes=each)

    monkeypatch.setattr(analysis, "analyse", analyse)
    keys = {"model.drop_path_group": 6, "model.drop_path_schedule": "constant"}
    config = configuration.load("digits", {"batch_size": 96, **keys})
    mesh = meshes.create(config.mesh, jax.devices())
    found, _ = batch_search.largest_batch(config, mesh, 20, LIMIT)
    assert found.batch_size == 60 * mesh.size


def test_batches_hold_whole_groups_that_go_uphill_together(monkeypatch):
    def analyse(config, mesh, examples, limit):
        config.optim.microbatches(config.batch_size, mesh)
        each = config.batch_size // mesh.size
        return analysis.Analysis({}, fits=each <= 60, peak_bytes=each)

    monkeypatch.setattr(analysis, "analyse", analyse)
    mesh = meshes.create(configuration.load("digits").mesh, jax.devices())
    size = 12 * mesh.size
    keys = {"optim.sam_rho": 0.1, "optim.sam_batch_size": size, "batch_size": 2 * size}
    config = configuration.load("digits", keys)
    found, _ = batch_search.largest_batch(config, mesh, 20, LIMIT)
    assert found.batch_size == 60 * mesh.size


def test_without_a_limit_there_is_no_largest_batch():
    config = configuration.load("digits")
    with pytest.raises(UserError, match="--largest_batch"):
        batch_search.largest_batch(config, meshes.create(config.mesh), 20, None)


@pytest.mark.slow
def test_a_run_gets_the_largest_batch_and_keeps_it(tmp_path, monkeypatch):
    optim = {"learning_rate": 0.0, "base_learning_rate": 0.1}
    data = {"num_examples": 20_000}
    config = tiny_config(total_steps=2, data=data, optim=optim, evals={})
    limit, lines, peaks, analyse = 3_000_000, [], {}, analysis.analyse

    def noted(config, *args):
        found = analyse(config, *args)
        peaks[config.batch_size] = found.peak_bytes
        return found

    monkeypatch.setattr(analysis, "analyse", noted)
    monkeypatch.setattr(batch_search, "usable_memory", lambda device: limit)
    found = batch_search.of_run(config, tmp_path, lines.append)
    assert peaks[found.batch_size] <= limit
    too_large = min(size for size, peak in peaks.items() if peak > limit)
    assert found.batch_size < too_large <= 1.06 * found.batch_size
    train(found, tmp_path)
    limit = 1_000_000
    again = batch_search.of_run(config, tmp_path, lines.append)
    assert again == found
    assert again.optim.peak_learning_rate(found.batch_size) > 0.1 * 8 / 256
    assert [line.partition(",")[0] for line in lines] == 2 * [
        f"batch_size={found.batch_size}"
    ]


@pytest.mark.usefixtures("all_devices")
def test_it_is_no_larger_than_the_training_split(tmp_path):
    config, lines = tiny_config(), []
    found = batch_search.of_run(config, tmp_path, lines.append)
    assert found.batch_size == 16  # Of 20 images, on 8 devices.


@pytest.mark.usefixtures("all_devices")
def test_what_does_not_fit_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_search, "usable_memory", lambda device: 1_000)
    with pytest.raises(UserError, match="--largest_batch: 8 images need .* per device"):
        batch_search.of_run(tiny_config(), tmp_path, print)
    with pytest.raises(UserError, match="--largest_batch and --compiled=step"):
        words = ["--config=digits", "--largest_batch", "--compiled=step"]
        run_command("train", words)
