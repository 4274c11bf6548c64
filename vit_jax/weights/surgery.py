"""Fitting given parameters to a model: head, position embeddings, patches, channels."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.weights import resample
from vit_jax.weights.pretrained import POSITIONS
from vit_jax.weights.settle import Row, settle

HEADS = ("keep", "replace", "drop")

_CLASSIFIERS = ("head", "head_dist")
_PRE_LOGITS = ("pre_logits/kernel", "pre_logits/bias")
_TOKENS = ("cls", "dist")  # In the order of their rows.
_TABLES = ("/row_embedding", "/column_embedding")
_FIRST_KERNELS = ("root_block/conv_root/kernel", "conv_root/kernel", "embedding/kernel")


def fit(
    params: Mapping,
    expected: Mapping,
    *,
    grid: tuple[int, int],
    old_grid: tuple[int, int] | None = None,
    head: str = "keep",
    head_bias: float = 0.0,
    posemb_resize: str = "linear",
    init_allow: Sequence[str] | None = (),
    init: Callable[[], Mapping] | None = None,
) -> tuple[dict, list[Row]]:
    """Makes loaded parameters those of a model.

    Args:
      params: loaded, nested dict of arrays.
      expected: the model's, nested dict of arrays or of their shapes.
      grid: the model's patches down and across.
      old_grid: those of the loaded position embeddings; a square if None.
      head: "keep"; "replace": the classifier and the layer before it give way to new
        ones, the classifier of zeros; or "drop", for a model without classes.
      head_bias: initial bias of a replaced classifier.
      posemb_resize: "linear" (corners aligned, as Google's code does it) or "bicubic"
        (antialiased, as timm does).
      init_allow: regular expressions: what may be missing, and then stays as
        initialised, or be left over; None where a command has no such flag.
      init: gives the model's initial parameters; needed if any of them stays.

    Returns:
      The fitted parameters, and what was done: a row for all that was loaded as it
      is, then one for each exception.

    Raises:
      UserError: parameters that are missing, left over or of another shape, or a
        pattern that matches none.
    """
    loaded = {k: np.asarray(v) for k, v in flatten_dict(params, sep="/").items()}
    given, wanted = dict(loaded), flatten_dict(expected, sep="/")
    rows = [
        *_swap_head(given, wanted, head, head_bias),
        *_resize_positions(given, wanted, grid, old_grid, posemb_resize),
        *_resize_input(given, wanted),
    ]
    fresh, more = settle(
        given, wanted, init_allow, new=_PRE_LOGITS if head == "replace" else ()
    )
    rows += more
    if fresh:
        given |= _draw(init, fresh)
    for name, value in given.items():
        given[name] = value.astype(wanted[name].dtype, copy=False)

    same = sum(value is loaded.get(name) for name, value in given.items())
    rounded = sum(
        name in loaded and value.dtype.itemsize < loaded[name].dtype.itemsize
        for name, value in given.items()
    )
    first = [Row(f"{same} parameters", "loaded")]
    if rounded:
        first.append(Row(f"{rounded} parameters", "rounded to the model's precision"))
    return unflatten_dict(given, sep="/"), first + rows


def _draw(init: Callable[[], Mapping], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns some of the initial parameters."""

    def some():
        initial = flatten_dict(init(), sep="/")
        return {name: initial[name] for name in names}

    # Compiled, so that no device draws the others, which it might not hold.
    return jax.device_get(jax.jit(some)())


def _swap_head(given: dict, wanted: dict, head: str, bias: float) -> list[Row]:
    """Takes the head out of `given`, and puts a new one there for "replace"."""
    if head not in HEADS:
        raise UserError(f"head={head!r} is not one of {', '.join(HEADS)}")
    if head == "keep":
        return []
    if head == "drop" and "head/kernel" in wanted:
        raise UserError(
            "head=drop is for a model without classes, but this one has "
            f"{wanted['head/kernel'].shape[-1]}: replace or keep the head"
        )
    rows = []
    for name in _CLASSIFIERS:
        before, after = (
            tree[f"{name}/kernel"].shape if f"{name}/kernel" in tree else None
            for tree in (given, wanted)
        )
        for leaf in ("kernel", "bias"):
            given.pop(f"{name}/{leaf}", None)
            if after:
                shape = wanted[f"{name}/{leaf}"]
                fill = bias if leaf == "bias" else 0.0
                given[f"{name}/{leaf}"] = np.full(shape.shape, fill, shape.dtype)
        if after:
            rows.append(Row(name, "replaced by a linear layer of zeros", before, after))
        elif before:
            rows.append(Row(name, "dropped", before))
    # The layer before a replaced classifier belongs to the old classes.
    if head == "replace" or "pre_logits/kernel" not in wanted:
        kernel, _ = (given.pop(leaf, None) for leaf in _PRE_LOGITS)
        if kernel is not None and "pre_logits/kernel" not in wanted:
            rows.append(Row("pre_logits", "dropped with the head", kernel.shape))
    return rows


def _resize_positions(
    given: dict,
    wanted: dict,
    grid: tuple[int, int],
    old_grid: tuple[int, int] | None,
    method: str,
) -> list[Row]:
    """Resizes what has a place in the grid, and fits the rows of the extra tokens."""
    if method not in resample.MATRICES:
        raise UserError(
            f"posemb_resize={method!r} is not one of {', '.join(resample.MATRICES)}"
        )
    how = "" if method == "linear" else f", {method}"
    rows = []
    for name in sorted(given.keys() & wanted.keys()):
        old, shape = given[name], wanted[name].shape
        if old.ndim != len(shape) or old.shape[-1] != shape[-1]:
            continue  # `settle` tells.
        if name.endswith("/pos_embedding"):
            label = "position embeddings" if name == POSITIONS else name
            has, needs = ([t for t in _TOKENS if t in tree] for tree in (given, wanted))
            cells = old_grid or _square_grid(old.shape[1] - len(has))
            if cells != grid:
                given[name] = resample.positions(
                    old, cells, grid, tokens=len(has), method=method
                )
                action = f"resized from {cells} to {grid}{how}"
                rows.append(Row(label, action, old.shape, given[name].shape))
            if has != needs:
                before = given[name]
                given[name] = _fit_tokens(before, has, needs)
                action = f"rows of {_names(has)} made rows of {_names(needs)}"
                rows.append(Row(label, action, before.shape, given[name].shape))
        elif name.endswith(_TABLES) and old.shape != shape:
            given[name] = resample.table(old, shape[0], method=method)
            rows.append(Row(name, f"resized{how}", old.shape, shape))
    return rows


def _fit_tokens(embedding: np.ndarray, has: list, needs: list) -> np.ndarray:
    """Drops the rows of tokens that the model lacks, and adds rows of zeros."""
    zero = np.zeros_like(embedding[:, :1])
    tokens = [
        embedding[:, [has.index(name)]] if name in has else zero for name in needs
    ]
    return np.concatenate([*tokens, embedding[:, len(has) :]], axis=1)


def _names(tokens: list[str]) -> str:
    return " and ".join(tokens) or "no extra token"


def _square_grid(patches: int) -> tuple[int, int]:
    side = math.isqrt(patches)
    if side * side != patches:
        raise UserError(
            f"position embeddings of {patches} patches are not a square grid: start "
            "from a workdir or an exported file, which know their grid"
        )
    return side, side


def _resize_input(given: dict, wanted: dict) -> list[Row]:
    """Fits the first kernel to the model's channels and patch size."""
    name = next((n for n in _FIRST_KERNELS if n in wanted), None)
    kernel = given.get(name)
    if np.ndim(kernel) != 4 or kernel.shape[0] != kernel.shape[1]:
        return []  # `settle` tells.
    rows, shape = [], wanted[name].shape
    if kernel.shape[2] != shape[2]:
        given[name] = resample.input_channels(kernel, shape[2])
        action = f"input channels made {shape[2]} of {kernel.shape[2]}"
        rows.append(Row(name, action, kernel.shape, given[name].shape))
        kernel = given[name]
    # Only patches of pixels are resized: a stem's kernels see no smooth images.
    if name == "embedding/kernel" and kernel.shape[:2] != shape[:2]:
        given[name] = resample.patch_kernel(kernel, shape[0])
        action = f"patches resized from {len(kernel)} to {shape[0]} (FlexiViT)"
        rows.append(Row(name, action, kernel.shape, given[name].shape))
    return rows
