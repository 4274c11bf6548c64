"""Adapters: trains low-rank updates of a frozen network by a task without labels.

`task.of` is the section of the task that is wrapped, such as MAE or DINOv2. In its
state each copy of the network that starts from the run's weights (a student, a teacher)
is replaced by the factors of low_rank.py. Its loss gets the merged networks. Its update
gets the factors, so that a moving average of the student is an average of factors and
has low rank too. All other parameters of the network are frozen. The wrapped task's other
parameters (heads, decoder, mask token) are trained whole.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp

from vit_jax.config.fields import Registry, choice, key
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.tasks import TASKS
from vit_jax.tasks.low_rank import LowRankConfig, LowRankUpdates
from vit_jax.tasks.task import Task, TaskConfig, Tree, backbone_paths

# These do not keep the trained network in a separate dict, or learn from labels or texts.
_NOT_WRAPPED = {"adapters", "classification", "distillation", "linear_probe", "lora"}
_NOT_WRAPPED |= {"contrastive", "regression", "segmentation"}
# By their names, because this module is imported while TASKS is read.
_WRAPPED = Registry({k: v for k, v in TASKS.data.items() if k not in _NOT_WRAPPED})

# Dtype that marks copies of a network; no parameter has it.
_MARK = jnp.float16
_NETWORK, _KERNELS, _FACTORS = "network", "kernels", "lora"

_Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptersConfig(LowRankConfig):
    """Adapters: low-rank updates of a frozen network by the task in `task.of`."""

    name: str = key("adapters", "Task to train.")
    of: TaskConfig = choice(_WRAPPED, "mae", base=TaskConfig, listed=False)

    @property
    def has_classifier(self) -> bool:
        return self.of.has_classifier

    def num_logits(self, data: DataConfig) -> int:
        return self.of.num_logits(data)

    @property
    def needs_all_patches(self) -> bool:
        return self.of.needs_all_patches

    @property
    def pretrained_name(self) -> str:
        return self.of.pretrained_name

    def of_records(self, data: DataConfig, source: Source) -> "AdaptersConfig":
        return dataclasses.replace(self, of=self.of.of_records(data, source))

    def check_without_records(self) -> None:
        self.of.check_without_records()

    def build(self, model, data, run, saved=None) -> "Adapters":
        try:
            inner = self.of.build(model, data, run, saved)
        except UserError as error:
            raise UserError(_of_wrapped(str(error))) from error
        return Adapters(self, inner)


class Adapters(Task):
    """A task with low-rank updates in place of each copy of its network.

    To the wrapped task's `extra` it adds "network", the merged network; "kernels",
    frozen values of the kernels that are updated; and "lora", the factors of the
    network that is evaluated.

    Raises:
      UserError: a projection matches no kernel or is not a regular expression, the
        network has running means, or the wrapped task does not keep the network that it
        trains in a separate dict.
    """

    def __init__(self, config: AdaptersConfig, inner: Task):
        self.config, self.inner, self.model = config, inner, inner.model
        self.notes = inner.notes
        if self.model.stateful:
            raise UserError(
                f"model.variant={self.model.options['variant']!r} with task.name="
                "'adapters': the running means of a network cannot be frozen: choose a "
                "model with LayerNorm, such as B/16"
            )
        self._updates = LowRankUpdates(config, self.model)
        self._places = tuple(self._find_places())
        trained = [place for place in self._places if place[0] == "params"]
        if not trained or len(trained[0]) == 1:
            raise UserError(
                f"task.of.name={config.of.name!r} does not keep the network that it trains "
                f"in a separate dict: choose of {', '.join(_WRAPPED)}"
            )
        self.trained = "/".join(trained[0][1:])
        self.statistics = (*inner.statistics, _FACTORS)

    def _find_places(self) -> Iterator[_Path]:
        """Yields the paths at which `with_backbone` of the wrapped task puts a network."""
        state = jax.eval_shape(self.inner.init, jax.random.key(0))
        self._has_extra = state[1] is not None
        network = self.inner.backbone(*state)
        structure = jax.tree.structure(network)
        marked = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, _MARK), network)
        params, extra = jax.eval_shape(self.inner.with_backbone, *state, marked)

        def search(node, path):
            if not isinstance(node, Mapping):
                return
            same = jax.tree.structure(node) == structure
            if same and all(leaf.dtype == _MARK for leaf in jax.tree.leaves(node)):
                yield path
                return
            for name, value in node.items():
                yield from search(value, (*path, name))

        yield from search({"params": params, "extra": extra}, ())
        path = backbone_paths(self.inner, *state)["path"]
        self._evaluated = tuple(path.split("/"))

    def batch_spec(self, batch_size):
        return self.inner.batch_spec(batch_size)

    def prepare(self, batch, rng):
        return self.inner.prepare(batch, rng)

    @property
    def coupled(self):
        return self.inner.coupled

    def check_microbatch(self, size):
        try:
            return [_of_wrapped(line) for line in self.inner.check_microbatch(size)]
        except UserError as error:
            raise UserError(_of_wrapped(str(error))) from error

    def warning(self, metrics):
        return _of_wrapped(self.inner.warning(metrics))

    def load(self):
        return self.inner.load()

    def metadata(self):
        return self.inner.metadata()

    def init(self, rng):
        inner_key, factors_key = jax.random.split(rng)
        state = self.inner.init(inner_key)
        network = self.inner.backbone(*state)
        factors = self._updates.init(factors_key, network)
        params, extra = self._replaced(state, lambda place: _copy(factors))
        kernels = self._updates.kernels(network)
        return params, self._extra(extra, network, kernels, factors)

    def loss(self, params, extra, batch, rng):
        state = self._merged(params, jax.lax.stop_gradient(extra))
        return self.inner.loss(*state, batch, rng)

    def update(self, extra, params, stats, step):
        kernels = extra[_KERNELS]
        inner = self.inner.update(self._of_inner(extra), params, stats, step)
        factors = _at({"params": params, "extra": inner}, self._evaluated)
        network = self._updates.merge(factors, extra[_NETWORK], kernels)
        return self._extra(inner, network, kernels, factors)

    def backbone(self, params, extra):
        return extra[_NETWORK]

    def with_backbone(self, params, extra, network):
        state = self.inner.with_backbone(*self._merged(params, extra), network)
        return self._with_factors(state, params, extra, network)

    def with_task_params(self, params, extra, task_params):
        """Returns the state of `init` with the wrapped task's parameters in it.

        Student and teacher begin as the network of `with_backbone`.
        """
        given = self._given(task_params, extra[_NETWORK])
        state = self._merged(params, extra)
        state = self.inner.with_task_params(*state, given)
        return self._with_factors(state, params, extra, extra[_NETWORK])

    def left_out(self, params, extra, task_params):
        state = jax.eval_shape(self._merged, params, extra)
        given = self._given(task_params, extra[_NETWORK])
        left = self.inner.left_out(*state, given)
        left = {name: why for name, why in left.items() if name not in self._networks}
        why = "adapters begin anew, from the network that is evaluated"
        begun = {_FACTORS, *self._networks} & task_params.keys()
        return left | dict.fromkeys(begun, why)

    def held_out_metrics(self, params, extra, batch, rng):
        return self.inner.held_out_metrics(*self._merged(params, extra), batch, rng)

    def pictures(self, params, extra, batch, rng):
        return self.inner.pictures(*self._merged(params, extra), batch, rng)

    def training_flops(self):
        """Returns the operations per image: two thirds of the wrapped task's.

        The backward pass of the network skips kernel gradients. This is an estimate:
        the gradients of the wrapped task's other parameters are not skipped, and a
        teacher has no backward pass. The low-rank products are not counted.
        """
        flops = self.inner.training_flops()
        return flops and 2 * flops // 3

    def tower_flops(self):
        return self.inner.tower_flops()

    @property
    def _networks(self) -> set[str]:
        """Names of networks of the wrapped task that `task_params` may have."""
        return {
            path[1] for path in self._places if path[0] == "params" and len(path) == 2
        }

    def _given(self, task_params: dict, network: dict) -> dict:
        """Returns pretrained parameters with the frozen network for each trained one."""
        given = {name: x for name, x in task_params.items() if name != _FACTORS}
        return given | dict.fromkeys(self._networks, network)

    def _of_inner(self, extra: dict) -> Tree:
        """Returns the wrapped task's `extra`, with factors in place of networks."""
        if not self._has_extra:
            return None
        added = (_NETWORK, _KERNELS, _FACTORS)
        return {name: value for name, value in extra.items() if name not in added}

    def _extra(self, inner: Tree, network: dict, kernels: dict, factors: dict) -> dict:
        return {
            **(inner or {}),
            _NETWORK: network,
            _KERNELS: kernels,
            _FACTORS: factors,
        }

    def _merged(self, params: dict, extra: dict) -> tuple[dict, Tree]:
        """Returns the wrapped task's state, with whole networks."""

        def network(place):
            # That of the last step; parameters may have changed since.
            if place == self._evaluated and place[0] == "extra":
                return extra[_NETWORK]
            factors = _at({"params": params, "extra": extra}, place)
            return self._updates.merge(factors, extra[_NETWORK], extra[_KERNELS])

        return self._replaced((params, self._of_inner(extra)), network)

    def _with_factors(
        self, state: tuple[dict, Tree], params: dict, extra: dict, network: dict
    ) -> tuple[dict, dict]:
        """Returns the state of this task.

        Args:
          state: the wrapped task's state.
          params, extra: state of `init`, whose factors are kept.
          network: the network that all updates begin with.
        """
        old = {"params": params, "extra": extra}
        params, inner = self._replaced(state, lambda place: _copy(_at(old, place)))
        kernels = self._updates.kernels(network)
        return params, self._extra(inner, network, kernels, extra[_FACTORS])

    def _replaced(
        self, state: tuple[dict, Tree], value: Callable[[_Path], dict]
    ) -> tuple[dict, Tree]:
        """Returns a state with `value(path)` at the path of each network."""
        tree = dict(zip(("params", "extra"), state, strict=True))
        for place in self._places:
            tree = _replace(tree, place, value(place))
        return tree["params"], tree["extra"]


def _copy(tree: dict) -> dict:
    """Copies arrays, so that no two arrays of a state share memory."""
    return jax.tree.map(jnp.copy, tree)


def _at(tree: dict, path: _Path) -> Tree:
    return functools.reduce(operator.getitem, path, tree)


def _replace(tree: dict, path: _Path, value: Tree) -> dict:
    first, rest = path[0], path[1:]
    return {**tree, first: _replace(tree[first], rest, value) if rest else value}


def _of_wrapped(text: str) -> str:
    """Returns a message of the wrapped task with its keys below `task.of`."""
    return re.sub(r"\btask\.(?!of\b)(?=[a-z])", "task.of.", text)
