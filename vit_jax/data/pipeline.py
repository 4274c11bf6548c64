"""Batches: step number -> rows -> records -> arrays, equal on any machine.

Every batch is a pure function of (config, seed, step). So a run resumes from only its
step number, and threads, loader processes and hosts change only the speed. Letters: b
rows of this process, B records.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from vit_jax.data import decode, fields, order, workers
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.image import Image
from vit_jax.data.loader import Batch, Loader
from vit_jax.data.sources.base import Source, inspected, read_labels
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError


def train_batches(
    source: Source,
    data: DataConfig,
    *,
    batch_size: int,
    seed: int,
    start: int,
    stop: int,
    data_shard: int = 0,
    num_data_shards: int = 1,
) -> "Batches":
    """Iterates over this process's rows of the batches of steps start..stop-1.

    Args:
      source: training split.
      data: `config.data`.
      batch_size: images per step, over all shards.
      seed: seed of the run.
      start: first step.
      stop: step after the last.
      data_shard: this process loads the rows of this shard; shards are equal blocks of
        neighbouring rows.
      num_data_shards: number of shards.

    Returns:
      An iterator, to be closed, over dicts of arrays: image (b, h, w, c) of type
      `data.pixels`, or the arrays of the last host transform, each (b, ...), with fewer
      rows if images share them; an array for each field that the config enables
      (data/fields), such as label int32 (b,); index uint32 (b,), the position in the
      run modulo 2**32; skipped int32 (b,), the number of damaged records that were
      skipped to fill the row.

    Raises:
      UserError: a record is damaged or contradicts the config; raised by `next`.
    """
    first, rows = _rows(batch_size, data_shard, num_data_shards)
    balance = None
    if data.class_balance:
        balance = order.Balance.of(data.class_balance, read_labels(source))
    if views := data.transforms.views:
        views.check_rows(rows, batch_size)
    loader = _train_loader(source, data, seed)
    load = _TrainBatch(loader, batch_size, first, rows, balance)
    return Batches(load, range(start, stop), data)


def _train_loader(source: Source, data: DataConfig, seed: int) -> Loader:
    transforms = data.transforms
    in_memory = None if source.images is None else source.images.shape[1:3]
    specs = parse.loaded(transforms, data, in_memory)
    key, made = "data.train_transform", fields.of(data, source)
    loader = Loader(source, data, key, transforms.host, specs, seed, made)
    return transforms.views.loader(loader) if transforms.views else loader


def try_training(source: Source, data: DataConfig) -> None:
    """Loads one row of a training batch, to raise errors of the data early."""
    for field in (Image(data), *fields.of(data, source)):
        field.inspect(source, inspected(source))
    rows = data.transforms.packs
    _TrainBatch(_train_loader(source, data, seed=0), rows, 0, rows, None)(0)


def eval_batches(
    source: Source,
    data: DataConfig,
    *,
    batch_size: int,
    data_shard: int = 0,
    num_data_shards: int = 1,
    host: tuple | None = None,
) -> "Batches":
    """Iterates once over the records, in their order; the last batch is padded.

    All shards get the same number of batches.

    Args:
      source: evaluation split.
      data: `config.data`.
      batch_size, data_shard, num_data_shards: arguments of `train_batches`.
      host: host transforms of each image; if None, those of `data.eval_transform`.

    Returns:
      An iterator, to be closed, over dicts of arrays: image, or the arrays of the last
      host transform, and label, as in `train_batches`; skipped int32 (b,), 1 for a
      damaged record that is skipped; index uint32 (b,), the record's number; mask bool
      (b,), False for padding and skipped records.

    Raises:
      UserError: a record is damaged or contradicts the config; raised by `next`.
    """
    first, rows = _rows(batch_size, data_shard, num_data_shards)
    if host is None:
        host = parse.parse_eval(data.eval_transform, data.image_size)
    specs = parse.loaded(parse.Transforms(tuple(host), ()), data)
    made = fields.of(data, source, train=False)
    loader = Loader(source, data, "data.eval_transform", host, specs, fields=made)
    load = _EvalBatch(loader, batch_size, first, rows)
    return Batches(load, range(-(-len(source) // batch_size)), data)


def _rows(batch_size: int, shard: int, num_data_shards: int) -> tuple[int, int]:
    """Returns the first row of a shard in a batch, and its number of rows."""
    if batch_size % num_data_shards:
        raise UserError(
            f"batch_size={batch_size} does not divide over {num_data_shards} processes: "
            f"use a multiple of {num_data_shards}"
        )
    rows = batch_size // num_data_shards
    return shard * rows, rows


@dataclasses.dataclass(frozen=True)
class _TrainBatch:
    """Loads rows first..first+rows-1 of a step's batch."""

    loader: Loader
    batch_size: int
    first: int
    rows: int
    balance: order.Balance | None

    def __call__(self, step: int) -> Batch:
        loader = self.loader.of_step(step)
        positions = step * self.batch_size + self.first + np.arange(self.rows)
        seed, repeats = loader.seed, loader.data.repeats
        if self.balance:
            records = self.balance.records_at(positions, seed, repeats)
        else:
            examples = len(loader.source)
            records = order.records_at(positions, examples, seed, repeats)
        if loader.gathers:
            batch = loader.gather(records)
        else:
            batch = loader.empty(self.rows)
            pairs = zip(records.tolist(), positions.tolist(), strict=True)
            for row, pair in enumerate(pairs):
                loader.fill(batch, row, *pair)
        return {**batch, "index": positions.astype(np.uint32)}


@dataclasses.dataclass(frozen=True)
class _EvalBatch:
    """Loads rows first..first+rows-1 of an evaluation batch."""

    loader: Loader
    batch_size: int
    first: int
    rows: int

    def __call__(self, number: int) -> Batch:
        records = number * self.batch_size + self.first + np.arange(self.rows)
        exists = records < len(self.loader.source)
        batch = self.loader.empty(self.rows) | {
            "index": records.astype(np.uint32),
            "mask": exists.copy(),
        }
        if self.loader.gathers:
            for key, values in self.loader.gather(records[exists]).items():
                batch[key][exists] = values
            return batch
        for row in np.flatnonzero(exists):
            record = int(records[row])
            try:
                loaded = self.loader.load(record, 0)
            except decode.DamagedImage as error:
                self.loader.refuse(record, error)
                batch["skipped"][row], batch["mask"][row] = 1, False
                continue
            for name, values in loaded.items():
                batch[name][row] = values
        return batch


class Batches:
    """Iterator over batches; close it, or use it in a `with` block.

    When a loader process is killed, the listeners of `workers.listening` are called,
    and this process loads the remaining batches, which do not change.

    Args:
      load: picklable function from a number to a batch.
      numbers: numbers of the batches, in order.
      data: `config.data`, for the numbers of threads, processes and prefetched batches.

    Attributes:
      read_ahead: whether threads or processes load batches ahead of the caller.
    """

    def __init__(self, load, numbers: range, data: DataConfig):
        workers.remove_leftovers()
        self._load, self._numbers, self._data = _Guarded(load), numbers, data
        self._done, self._workers = 0, 0
        self.read_ahead = not load.loader.gathers
        if self.read_ahead:
            self._workers = data.num_workers
            self._batches = self._read_ahead()
        else:  # Faster than in a thread.
            self._batches = map(load, numbers)

    def __len__(self) -> int:
        """Returns the number of batches from the first to the last."""
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._next()
        self._done += 1
        if isinstance(batch, UserError):
            self.close()
            raise batch
        # Grain reuses the shared memory of arrays from another process; copies stay
        # valid.
        return {k: v if v.flags.owndata else np.array(v) for k, v in batch.items()}

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stops threads and processes; a second call does nothing."""
        batches, self._batches = self._batches, (batch for batch in ())
        if self.read_ahead:
            batches.close()

    def _next(self) -> Batch | UserError:
        try:
            if self._workers and not self._done:
                return workers.first_batch(self._batches)
            return next(self._batches)
        except RuntimeError as error:
            killed_by = workers.signal_that_killed(error)
            if not killed_by:
                raise
        self.close()
        workers.tell_killed(killed_by, self._workers)
        self._workers = 0
        self._batches = self._read_ahead()
        return next(self._batches)

    def _read_ahead(self) -> Iterator:
        """Loads the remaining batches in threads, or in loader processes."""
        import grain

        # One thread makes one batch, so more threads than batches would be idle.
        options = grain.ReadOptions(
            num_threads=min(self._data.num_threads, self._data.prefetch),
            prefetch_buffer_size=self._data.prefetch,
        )
        rest = self._numbers[self._done :]
        load = workers.Shipped(self._load) if self._workers else self._load
        batches = grain.MapDataset.range(rest.start, rest.stop).map(load)
        batches = batches.to_iter_dataset(options)
        if self._workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():  # Grain reads flags; a notebook has none.
                flags.FLAGS.mark_as_parsed()
            batches = batches.mp_prefetch(
                grain.MultiprocessingOptions(self._workers), workers.initializer()
            )
        return iter(batches)


@dataclasses.dataclass(frozen=True)
class _Guarded:
    """Returns a UserError instead of raising it, so that it leaves Grain unwrapped."""

    load: _TrainBatch | _EvalBatch

    def __call__(self, number: int) -> Batch | UserError:
        try:
            return self.load(number)
        except UserError as error:
            return error
