"""Fitting given parameters to a model: head, position embeddings, patches, channels."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.models import vit
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


def prepend_zero_rows(embedding: np.ndarray, rows: int) -> np.ndarray:
    """Prepends rows of zeros to position embeddings of shape (1, N, D)."""
    zeros = np.zeros((1, rows, embedding.shape[2]), embedding.dtype)
    return np.concatenate([zeros, embedding], axis=1)


def norm_every_token(
    flat: dict[str, np.ndarray], options: Mapping
) -> tuple[dict[str, np.ndarray], dict, list[str]]:
    """Applies the final LayerNorm before selecting the token, which is equivalent.

    Args:
      flat: our arrays by name.
      options: all options of `models.Model`.

    Returns:
      Both, changed if the model classifies single tokens and normalises them after the
      selection, and a note.
    """
    if not options.get("pooled_norm") or options["head"] not in ("token", "none"):
        return flat, dict(options), []
    moved = {
        k.replace("fc_norm/", "Transformer/encoder_norm/"): v for k, v in flat.items()
    }
    note = "final LayerNorm: moved before the choice of the token"
    return moved, {**options, "pooled_norm": False}, [note]


def learn_positions(
    flat: dict[str, np.ndarray], options: Mapping, grid: tuple[int, int]
) -> tuple[dict[str, np.ndarray], dict, list[str]]:
    """Converts position embeddings to one learned vector per token.

    Args:
      flat: our arrays by name.
      options: all options of `models.Model`.
      grid: patches down and across.

    Returns:
      Both with posemb "learned" or "none", and a note.

    Raises:
      UserError: the embeddings are not added at the stem.
    """
    kind, options = options.get("posemb", "none"), dict(options)
    if kind == "relative" or options.get("posemb_at", "stem") != "stem":
        raise UserError(
            f"posemb={kind} at posemb_at={options['posemb_at']} exists in neither timm "
            "nor Hugging Face: write it with --to=safetensors"
        )
    if kind not in ("sincos2d", "learned2d"):
        return flat, options, []
    flat, extra = dict(flat), sum(name in flat for name in ("cls", "dist"))
    if kind == "sincos2d":
        vectors = np.asarray(vit.sincos2d(grid, options["width"]))
    else:
        rows, columns = (
            np.asarray(flat.pop(POSITIONS.replace("pos_emb", f"{name}_emb")))
            for name in ("row", "column")
        )
        shape = len(rows), len(columns), rows.shape[1]
        halves = columns[None], rows[:, None]
        halves = [np.broadcast_to(half, shape) for half in halves]
        vectors = np.concatenate(halves, axis=-1).reshape(-1, options["width"])
    flat[POSITIONS] = prepend_zero_rows(vectors[None], extra)
    options["posemb"] = "learned"
    return flat, options, [f"position embeddings: {kind} written out as values"]
