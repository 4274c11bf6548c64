"""The stream is the same however it is made, and made of no more than is needed."""

import dataclasses
import io
import itertools

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import order
from vit_jax.data.pipeline import eval_batches, train_batches
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source

STEP, BATCH, SEED = 10**6, 12, 3


@dataclasses.dataclass(frozen=True)
class Virtual(Source):
    """Records that are made when they are asked for; notes which were."""

    examples: int
    reads: list
    class_names, images, labels = (), None, None

    def __len__(self):
        return self.examples

    def __getitem__(self, i):
        self.reads.append(i)
        stream = io.BytesIO()
        Image.new("RGB", (19, 14), (i % 251, i % 13, i % 7)).save(stream, "BMP")
        return {"image": stream.getvalue(), "label": i % 3}

    def describe(self, i):
        return f"virtual train record {i}"

    def record_id(self, i):
        return f"train/{i}"

    def locate(self, record_ids):
        raise NotImplementedError


def make(data_config, examples, **keys):
    keys = {"train_transform": "random_resized_crop", "eval_transform": "resize"} | keys
    return data_config(**keys), Virtual(examples, [])


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def stream(source, data, start, count, hosts=1):
    parts = []
    for host in range(hosts):
        with train_batches(
            source,
            data,
            batch_size=BATCH,
            seed=SEED,
            start=start,
            stop=start + count,
            data_shard=host,
            num_data_shards=hosts,
        ) as batches:
            parts.append(list(batches))
    return [
        {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        for parts in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize(
    ("hosts", "keys"),
    [
        (2, {"num_threads": 1}),
        (4, {"num_threads": 3}),
        pytest.param(1, {"num_workers": 2, "num_threads": 2}, marks=pytest.mark.slow),
    ],
)
def test_workers_threads_and_hosts_change_no_bit_of_the_stream(
    data_config, hosts, keys
):
    # Over the end of an epoch, in both ways to shuffle; loader processes take seconds to
    # start, for one way.
    places = (31, 1), (order.SORTED + 5, order.SORTED // BATCH - 2)
    for examples, start in places["num_workers" in keys :]:
        data, source = make(data_config, examples, num_threads=1, prefetch=2)
        whole = stream(source, data, start, 5)
        other, _ = make(data_config, examples, **{"prefetch": 4, **keys})
        assert_equal(stream(source, other, start, 5, hosts), whole)
    # The same of images in memory.
    data = data_config(num_examples=19)
    source = open_source(data, "train")
    found = stream(source, data_config(num_examples=19, **keys), 0, 4, hosts)
    assert_equal(found, stream(source, data, 0, 4))


@pytest.mark.parametrize("start", [0, STEP])
def test_resuming_reads_nothing_of_the_steps_before(data_config, start):
    data, source = make(data_config, 14_197_122, num_threads=1, prefetch=1)
    order.permutation.cache_clear()
    batch = stream(source, data, start, 1)[0]
    positions = start * BATCH + np.arange(BATCH)
    records = order.records_at(positions, len(source), SEED)
    assert source.reads == records.tolist()  # Each row once, and nothing else.
    np.testing.assert_array_equal(batch["label"], records % 3)
    assert order.permutation.cache_info().misses == 0


@pytest.mark.parametrize("hosts", [2, 4])
def test_each_host_reads_its_own_rows_only(data_config, hosts):
    data, source = make(data_config, 10**6, prefetch=2)
    stream(source, data, 7, 3, hosts)
    expected = order.records_at(np.arange(7 * BATCH, 10 * BATCH), 10**6, SEED)
    assert sorted(source.reads) == sorted(expected.tolist())


@pytest.mark.parametrize(("examples", "hosts"), [(1, 4), (5, 2), (8, 4), (13, 4)])
@pytest.mark.parametrize("in_memory", [True, False])
def test_each_host_evaluates_its_part_and_only_once(
    data_config, examples, hosts, in_memory
):
    data, source = make(data_config, examples, prefetch=2)
    if in_memory:
        images = np.zeros((examples, 13, 17, 3), np.uint8) + 5
        data = data_config()
        source = ArraySource("memory", images, np.arange(examples) % 3)
    seen, lengths = [], set()
    for host in range(hosts):
        with eval_batches(
            source, data, batch_size=8, data_shard=host, num_data_shards=hosts
        ) as batches:
            parts = list(batches)
        lengths.add(len(parts))
        for part in parts:
            assert len(part["mask"]) == 8 // hosts
            assert not part["image"][~part["mask"]].any()
            seen += part["index"][part["mask"]].tolist()
    assert lengths == {-(-examples // 8)}  # As many collectives on every host.
    assert sorted(seen) == list(range(examples))
    if not in_memory:
        assert sorted(source.reads) == list(range(examples))


@pytest.mark.parametrize(
    ("hosts", "keys"),
    [(4, {}), pytest.param(1, {"num_workers": 2}, marks=pytest.mark.slow)],
)
def test_skipping_is_the_same_on_all_hosts_and_workers(
    data_config, folder, hosts, keys
):
    plain = {"name": "folder", "data_dir": str(folder), "on_error": "skip"}
    plain |= {"train_transform": "random_resized_crop", "prefetch": 2}
    data = data_config(**plain)
    source = open_source(data, "train")
    for i in (2, 3, 11):
        with open(source.describe(i), "r+b") as file:
            file.truncate(40)
    whole = stream(source, data, 0, 4)
    assert sum(batch["skipped"].sum() for batch in whole) >= 4
    assert_equal(stream(source, data_config(**plain, **keys), 0, 4, hosts), whole)


def test_a_readers_own_exception_names_the_record(data_config):
    data, _ = make(data_config, 40, num_threads=1)
    numbers = itertools.count()

    class Broken(Virtual):
        def __getitem__(self, i):
            if next(numbers) == 3:
                raise ZeroDivisionError("the reader is broken")
            return super().__getitem__(i)

    with pytest.raises(ZeroDivisionError, match="the reader is broken") as caught:
        stream(Broken(40, []), data, 0, 1)
    record = order.records_at(np.array([3]), 40, SEED)[0]
    wanted = f"while reading virtual train record {record}"
    assert wanted in " ".join(caught.value.__notes__)
