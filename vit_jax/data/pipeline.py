"""Batches: step number -> rows -> records -> arrays, the same on any machine.

Every batch is a pure function of (config, seed, step), so a run resumes from its step
number alone, and threads, loader processes and hosts change only the speed.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.data import decode, order, workers
from vit_jax.data.captions import TEXT, Captions
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source, check_label, read_labels, warn
from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.base import Transform
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Keeps augmentation's random bits apart from those of other uses of the same seed.
_STREAM = 0x617567
_LOOKED_AT = 1_000  # Images of a split whose orientation tags are looked at.


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
      seed: of the run.
      start: first step.
      stop: step after the last.
      data_shard: this process loads the rows of shard `data_shard` of
        `num_data_shards`: the shards are equal blocks of neighbouring rows.
      num_data_shards: number of shards.

    Returns:
      An iterator to be closed, of dicts: image uint8 (b, h, w, c), or the arrays that
      the last host transform returns, each (b, ...); label int32 (b,), with
      `data.multi_label` 0 or 1 for each class, (b, classes), unless `data.num_classes`
      is 0; text int32 (b, tokens) if there is `data.tokenizer`; index uint32 (b,), the row's position in the run modulo
      2**32; skipped int32 (b,), how many damaged records were passed over to fill the
      row.

    Raises:
      UserError: a record is damaged or does not fit the config; raised by `next`.
    """
    local = _local(batch_size, num_data_shards)
    parsed = parse.parse_train(data.train_transform, data.image_size)
    in_memory = None if source.images is None else source.images.shape[1:3]
    shapes = parse.loaded_shapes(parsed, data.image_size, data.channels, in_memory)
    captions = Captions.of(data, source.class_names)
    loader = Loader(
        source, data, "data.train_transform", parsed.host, shapes, seed, captions
    )
    balance = None
    if data.class_balance:
        balance = order.Balance.of(data.class_balance, read_labels(source))
    load = _TrainBatch(loader, batch_size, data_shard * local, local, balance)
    return Batches(load, range(start, stop), data)


def try_training(source: Source, data: DataConfig) -> None:
    """Prepares one training image, so that what does not fit is found before a step.

    Raises:
      UserError: as the batches of `train_batches`.
    """
    data = dataclasses.replace(data, num_workers=0, class_balance="")
    with train_batches(source, data, batch_size=1, seed=0, start=0, stop=1) as batches:
        next(batches)


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

    Args:
      source: split to evaluate.
      data: `config.data`.
      batch_size: images per batch, over all shards.
      data_shard: this process loads shard `data_shard` of `num_data_shards`, as for
        training.
      num_data_shards: number of shards; all of them get the same number of batches.
      host: transforms of each image, as those of transforms/host.py; `data.eval_transform`
        if None.

    Returns:
      An iterator to be closed, of dicts: image, label and skipped as for training
      (a damaged record that is skipped counts 1 and is masked); index uint32 (b,), the
      record's number; mask bool (b,), false where a row is padding.

    Raises:
      UserError: a record is damaged or does not fit the config; raised by `next`.
    """
    local = _local(batch_size, num_data_shards)
    if host is None:
        host = parse.parse_eval(data.eval_transform, data.image_size)
    shapes = {"image": (*data.image_size, data.channels)}
    loader = Loader(source, data, "data.eval_transform", host, shapes)
    load = _EvalBatch(loader, batch_size, data_shard * local, local)
    return Batches(load, range(-(-len(source) // batch_size)), data)


def _local(batch_size: int, num_data_shards: int) -> int:
    if batch_size % num_data_shards:
        raise UserError(
            f"batch_size={batch_size} does not divide over {num_data_shards} processes: "
            f"use a multiple of {num_data_shards}"
        )
    return batch_size // num_data_shards


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads records of a source as the config says; travels to loader processes.

    Attributes:
      source: the data set.
      data: `config.data`.
      key: config key of the operations, for messages.
      ops: host operations in order.
      shapes: of each array that it makes of an image, by its name.
      seed: of the run.
      captions: makes the tokens of captions; None where they are not read.
      damaged: records that were skipped.
    """

    source: Source
    data: DataConfig
    key: str
    ops: Sequence[Transform]
    shapes: dict[str, tuple[int, ...]]
    seed: int = 0
    captions: Captions | None = None
    damaged: set[int] = dataclasses.field(default_factory=set)

    @property
    def gathers(self) -> bool:
        """Whether a batch is one gather from memory."""
        return self.source.images is not None and not self.ops and not self.captions

    def gather(self, records: Integer[np.ndarray, " B"]) -> Batch:
        """Returns image, label and skipped of records that lie in memory."""
        images = self.source.images
        self._check_shapes({"image": images.shape[1:]}, "images")
        batch = {"image": images[records], "skipped": np.zeros(len(records), np.int32)}
        if self.data.num_classes:
            batch["label"] = self.source.labels[records].astype(np.int32)
        return batch

    def load(self, record: int, position: int) -> Batch:
        """Reads and transforms one record.

        Args:
          record: its number.
          position: of the row in the run; with the seed it fixes the random choices.

        Returns:
          Arrays of `shapes`, label, and text.

        Raises:
          DamagedImage: the record cannot be read.
          UserError: the label or an array's shape is not as the config says.
        """
        try:
            item = self.source[record]
        except OSError as error:
            raise decode.DamagedImage(f"cannot be read ({error})") from error
        except Exception as error:  # The reader's own fault: it goes on as it is.
            error.add_note(f"while reading {self._name(record)}")
            raise
        name = self._name(record)
        label = {}
        if self.data.num_classes:
            label["label"] = self._label(item["label"], name)
        bits = np.random.Philox(
            key=np.array([self.seed % 2**64, _STREAM], np.uint64),
            counter=np.array([0, 0, 0, position], np.uint64),
        )
        rng = np.random.Generator(bits)
        try:
            image, ops = self._open(record, item["image"], rng)
            for op in ops:
                image = op(image, rng)
        except host_transforms.TooLong as error:
            raise decode.DamagedImage(str(error)) from error
        except host_transforms.TooSmall as error:
            raise UserError(f"{self.key}: {name}: {error}") from error
        except UserError as error:  # Of a transform of the user's.
            raise UserError(f"{name}: {error}") from error
        arrays = image if isinstance(image, dict) else {"image": image}
        self._check_shapes({key: a.shape for key, a in arrays.items()}, name)
        if self.captions:
            arrays[TEXT] = self.captions(item, rng)
        return arrays | label

    def _label(
        self, label: int | Sequence[int], name: str
    ) -> int | Integer[np.ndarray, " K"]:
        """Returns the class, or 0 or 1 for each of them."""
        if not self.data.multi_label:
            check_label(label, self.data.num_classes, name)
            return label
        found = np.zeros(self.data.num_classes, np.int32)
        for each in label:
            check_label(each, self.data.num_classes, name)
            found[each] = 1
        return found

    def _open(
        self, record: int, data: bytes | np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray | dict[str, np.ndarray], tuple]:
        """Returns pixels, and the operations that are still to be done on them."""
        looked_at = self.data.exif or not record % -(-len(self.source) // _LOOKED_AT)
        tagged = looked_at and isinstance(data, bytes) and decode.orientation(data) != 1
        turned = tagged and self.data.exif
        if tagged and not turned:
            warn(
                f"{self._name(record)} is upright only by its orientation tag, which is "
                "not read: --config.data.exif=True turns such images",
                about="data.exif",
            )
        if (
            self.ops
            and self.ops[0].from_file
            and isinstance(data, bytes)
            and not turned
        ):
            return self.ops[0].from_file(data, self.data.channels, rng), self.ops[1:]
        return decode.decode(data, self.data.channels, exif=self.data.exif), self.ops

    def refuse(self, record: int, error: decode.DamagedImage) -> None:
        """Raises UserError for a damaged record, unless the config says to skip it."""
        if self.data.on_error == "raise":
            raise UserError(
                f"{self._name(record)} {error}: mend or remove it, or go on "
                "without with --config.data.on_error=skip"
            ) from error
        if self.data.on_error == "skip":
            return
        self.damaged.add(record)
        found, most = len(self.damaged), max(1, len(self.source) // 100)
        if found > most:
            raise UserError(
                f"{self._name(record)} {error}, as {found - 1} others: more than 1 % of "
                f"{len(self.source):,} images; mend or remove them, or go on without with "
                "--config.data.on_error=skip"
            ) from error
        warn(
            f"{self._name(record)} {error}: left out, {found} of at most {most} "
            "(--config.data.on_error=raise ends the run instead)",
            about=f"damaged {self.source.describe(record)}",
        )

    def empty(self, rows: int) -> Batch:
        """Returns a batch of blank rows."""
        arrays = {
            name: np.zeros((rows, *shape), np.uint8)
            for name, shape in self.shapes.items()
        }
        if self.captions:
            shape = rows, self.captions.num_tokens
            arrays[TEXT] = np.zeros(shape, np.int32)
        arrays["skipped"] = np.zeros(rows, np.int32)
        if self.data.num_classes:
            classes = (self.data.num_classes,) if self.data.multi_label else ()
            arrays["label"] = np.zeros((rows, *classes), np.int32)
        return arrays

    def _name(self, record: int) -> str:
        """Returns the data set, split and number of a record, for a message."""
        name = self.source.describe(record)  # Of a file its path, which has no number.
        return name if str(record) in name.split() else f"{name} (record {record})"

    def _check_shapes(self, shapes: dict[str, tuple[int, ...]], name: str) -> None:
        if shapes == self.shapes:
            return
        found, wanted = map(parse.in_words, (shapes, self.shapes))
        says = "data.image_size and data.channels say"
        remedy = "end the operations with resize or a crop, or change data.image_size"
        if self.ops and self.ops[-1].output_shapes:
            says, remedy = "its `output_shapes` says", "make them equal"
        raise UserError(
            f"{self.key} gives {name} of {found} (height, width, channels), but {says} "
            f"{wanted}: {remedy}"
        )


@dataclasses.dataclass(frozen=True)
class _TrainBatch:
    """Loads rows first..first+rows-1 of a step's batch."""

    loader: Loader
    batch_size: int
    first: int
    rows: int
    balance: order.Balance | None

    def __call__(self, step: int) -> Batch:
        positions = step * self.batch_size + self.first + np.arange(self.rows)
        seed, repeats = self.loader.seed, self.loader.data.repeats
        if self.balance:
            records = self.balance.records_at(positions, seed, repeats)
        else:
            examples = len(self.loader.source)
            records = order.records_at(positions, examples, seed, repeats)
        if self.loader.gathers:
            batch = self.loader.gather(records)
        else:
            batch = self._load(records, positions)
        return {**batch, "index": positions.astype(np.uint32)}

    def _load(
        self,
        records: Integer[np.ndarray, " b"],
        positions: Integer[np.ndarray, " b"],
    ) -> Batch:
        batch = self.loader.empty(self.rows)
        for row in range(self.rows):
            record, position = int(records[row]), int(positions[row])
            for name, values in self._load_readable(record, position).items():
                batch[name][row] = values
        return batch

    def _load_readable(self, record: int, position: int) -> Batch:
        """Loads a record or, if skipping is on, the next one that is readable."""
        examples = len(self.loader.source)
        for skipped in range(examples):
            try:
                here = (record + skipped) % examples
                return self.loader.load(here, position) | {"skipped": skipped}
            except decode.DamagedImage as error:
                self.loader.refuse(here, error)
        raise UserError(f"none of the {examples} records can be read")


@dataclasses.dataclass(frozen=True)
class _EvalBatch:
    """Loads rows first..first+rows-1 of an evaluation batch."""

    loader: Loader
    batch_size: int
    first: int
    rows: int

    def __call__(self, number: int) -> Batch:
        records = number * self.batch_size + self.first + np.arange(self.rows)
        there = records < len(self.loader.source)
        batch = self.loader.empty(self.rows) | {
            "index": records.astype(np.uint32),
            "mask": there.copy(),
        }
        if self.loader.gathers:
            for key, values in self.loader.gather(records[there]).items():
                batch[key][there] = values
            return batch
        for row in np.flatnonzero(there):
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

    When a loader process is killed, this process loads the batches that are left, which
    are the same; `workers.listening` learns of it.

    Args:
      load: number -> batch; picklable.
      numbers: which batches, in order.
      data: `config.data`, for the numbers of threads, processes and prefetched batches.

    Attributes:
      read_ahead: whether threads or processes make them, before they are asked for.
    """

    def __init__(self, load, numbers: range, data: DataConfig):
        workers.remove_leftovers()
        self._load, self._numbers, self._data = _Guarded(load), numbers, data
        self._done, self._workers = 0, 0
        self.read_ahead = not load.loader.gathers
        if self.read_ahead:
            self._workers = data.num_workers
            self._batches = self._read_ahead()
        else:  # Faster than handing it to a thread.
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
        # From another process they lie in shared memory that Grain takes back; as
        # arrays of their own they may live as long as anyone wants.
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
        """Loads what is left in threads of this process, or in loader processes."""
        import grain

        # One thread makes one batch, so more threads than batches would idle.
        options = grain.ReadOptions(
            num_threads=min(self._data.num_threads, self._data.prefetch),
            prefetch_buffer_size=self._data.prefetch,
        )
        left = self._numbers[self._done :]
        load = workers.Shipped(self._load) if self._workers else self._load
        batches = grain.MapDataset.range(left.start, left.stop).map(load)
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
