"""Which process holds which part of the state, and the parts as bytes."""

import math
from collections.abc import Iterable

import jax
import numpy as np

from vit_jax.training.state import TrainState

Held = dict[int, list[int]]  # Process whose parts they are, to hosts that have them.


class Layout:
    """The parts of a state that is spread over the devices of several processes.

    A part is what one device holds of one array; its name is the number of the array
    and where the part begins and ends, as "12:0-8,4-8".

    Args:
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with the sharding of each.
    """

    def __init__(self, shapes: TrainState, shardings: TrainState):
        self._key = shapes.key.dtype
        self._shapes = shapes.replace(
            key=jax.eval_shape(jax.random.key_data, shapes.key)
        )
        self._shardings = shardings
        self._held = {process: {} for process in range(jax.process_count())}
        leaves = zip(
            jax.tree.leaves(self._shapes), jax.tree.leaves(shardings), strict=True
        )
        for number, (leaf, sharding) in enumerate(leaves):
            for device, index in sharding.devices_indices_map(leaf.shape).items():
                name = _name(number, index, leaf.shape)
                size = math.prod(
                    len(range(*s.indices(n))) for s, n in _zip(index, leaf)
                )
                self._held[device.process_index][name] = size * leaf.dtype.itemsize

    def describe(self) -> list:
        """Returns what must be the same for parts to fit, for JSON."""
        leaves = jax.tree_util.tree_leaves_with_path(self._shapes)
        return [
            [[jax.tree_util.keystr(k), list(x.shape), str(x.dtype)] for k, x in leaves],
            [sorted(names) for names in self._held.values()],
        ]

    def of_process(self, process: int) -> set[str]:
        """Returns the names of the parts that a process holds."""
        return set(self._held[process])

    def bytes_of(self, name: str) -> int:
        """Returns the size of a part."""
        return next(held[name] for held in self._held.values() if name in held)

    def lacking(self, held: Held) -> list[int]:
        """Returns the processes whose parts nobody has."""
        there = set().union(*(self._held[process] for process in held))
        return [p for p, names in self._held.items() if not there.issuperset(names)]

    def transfers(self, held: Held) -> list[tuple[int, list[str]]]:
        """Plans who sends what: the same plan in every process.

        Args:
          held: what the hosts have; nothing is lacking.

        Returns:
          Sending process and the names of the parts, for those that somebody lacks.
        """
        has = {host: set() for host in self._held}
        for process, hosts in held.items():
            for host in hosts:
                has[host] |= set(self._held[process])
        wanted = set().union(*(set(self._held[host]) - has[host] for host in has))
        plan = {}
        for name in sorted(wanted):
            provider = min(host for host in has if name in has[host])
            plan.setdefault(provider, []).append(name)
        return sorted(plan.items())

    def parts_of(self, state: TrainState) -> dict[str, np.ndarray]:
        """Copies the parts that this process holds: name to bytes."""
        leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
        shards = {
            _name(number, shard.index, leaf.shape): shard.data
            for number, leaf in enumerate(leaves)
            for shard in leaf.addressable_shards
        }
        for data in shards.values():
            data.copy_to_host_async()
        # Copied: on CPU this is the device's memory, which the next step takes over.
        return {name: _bytes(jax.device_get(x)).copy() for name, x in shards.items()}

    def assemble(self, arrays: dict[str, np.ndarray]) -> TrainState:
        """Builds the state of all processes from the parts that this one holds."""
        leaves, tree = jax.tree.flatten(self._shapes)
        made = [
            jax.make_array_from_callback(
                leaf.shape,
                sharding,
                lambda index, number=number, leaf=leaf: _array(
                    arrays[_name(number, index, leaf.shape)], index, leaf
                ),
            )
            for number, (leaf, sharding) in enumerate(
                zip(leaves, jax.tree.leaves(self._shardings), strict=True)
            )
        ]
        state = jax.tree.unflatten(tree, made)
        wrap = jax.jit(jax.random.wrap_key_data, out_shardings=self._shardings.key)
        return state.replace(key=wrap(state.key))


def _name(number: int, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ends = [s.indices(n)[:2] for s, n in zip(index, shape, strict=False)]
    return f"{number}:" + ",".join(f"{begin}-{end}" for begin, end in ends)


def _array(data: np.ndarray, index: tuple[slice, ...], leaf) -> np.ndarray:
    shape = [len(range(*s.indices(n))) for s, n in _zip(index, leaf)]
    return data.view(leaf.dtype).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _zip(index: tuple[slice, ...], leaf) -> Iterable[tuple[slice, int]]:
    return zip(index, leaf.shape, strict=True)
