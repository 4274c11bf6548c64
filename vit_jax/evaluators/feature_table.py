"""Features of photographs as a Parquet file, for search and clustering.

Letters: B images, D features.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath
from jaxtyping import Array, Float

from vit_jax.command_line.files import replacing, writing_out
from vit_jax.data import image_files, splits
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators import prediction
from vit_jax.evaluators.local_devices import LocalDevices
from vit_jax.models import Model, Params, layer_features
from vit_jax.models.patches import PatchSequences
from vit_jax.weights import surgery
from vit_jax.weights.network_images import network_input, prepare_image
from vit_jax.weights.pretrained import Pretrained

NAME, LABEL, FEATURE = "name", "label", "feature"  # Names of columns.

_GROUP = 1_024  # Rows per row group.
_SPLITS = (*splits.TRAIN, *splits.VALIDATION, *splits.TEST)


class Extractor:
    """Weights that turn photographs into vectors, on all devices of this process.

    Args:
      pretrained: the weights.
      preprocess: preprocessing of the images; the network is resized to their size.
      layers: layers that get a vector each, see `Model.layer_features`; None for no
        layer, empty for all.

    Attributes:
      widths: length of each vector by its name: "feature" is the input of the
        classifier and of k-NN, "layer_2" is the pooled output of layer 2.

    Raises:
      UserError: a layer does not exist, or the network has no vectors of whole images.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        preprocess: Preprocess,
        layers: Sequence[int] | None = None,
    ):
        model, self._params = surgery.fit_network(pretrained, preprocess)
        self._preprocess, self._channels = preprocess, model.image_shape[-1]
        if not model.representations or getattr(model.config, "pool", "") == "none":
            raise UserError(f"{pretrained.source} has no features of whole images")
        chosen = []
        if layers is not None:
            chosen = layers or range(model.num_layers)
            chosen = sorted(layer_features.check_all(model, chosen))

        def function(params, pixels):
            images = network_input(pixels, preprocess, model.options["dtype"])
            return _vectors(model, params, images, chosen)

        self._devices, self._function = LocalDevices(model), function
        pixels = jax.ShapeDtypeStruct((1, *model.image_shape), preprocess.pixels)
        shapes = jax.eval_shape(function, model.shapes, pixels)
        # JAX sorts the keys of a dict alphabetically.
        names = [FEATURE, *map(_column, chosen)]
        self.widths = {name: shapes[name].shape[1] for name in names}

    def vectors(
        self, images: Iterable[image_files.Named], batch_size: int
    ) -> Iterator[tuple[str, Mapping[str, Float[np.ndarray, " D"]] | str]]:
        """Yields an image's name, and its vectors or the reason why it cannot be read.

        Raises:
          UserError: a vector is not finite.
        """

        def prepare(data, name):
            return prepare_image(data, self._preprocess, self._channels, name)

        for name, result in prediction.stream(
            images,
            prepare,
            lambda *batch: self._devices.run("", self._function, self._params, *batch),
            batch_size=batch_size,
        ):
            if not isinstance(result, str):
                for values in result.values():
                    prediction.check_finite(values, name)
            yield name, result

    def features(
        self, images: Iterable[image_files.Named], batch_size: int = 32
    ) -> Iterator[tuple[str, Float[np.ndarray, " D"] | str]]:
        """Yields an image's name, and its "feature" or why it cannot be read.

        Raises:
          UserError: a vector is not finite.
        """
        for name, result in self.vectors(images, batch_size):
            yield name, result if isinstance(result, str) else result[FEATURE]


def _vectors(
    model: Model,
    params: Params,
    images: Float[Array, "B Y X C"] | PatchSequences,
    layers: Sequence[int],
) -> dict[str, Float[Array, "B D"]]:
    vectors = {FEATURE: model.apply(params, images)["pre_logits"]}
    if layers:
        pooled = model.layer_features(params, images, layers, tokens="pooled")
        for layer, values in zip(layers, pooled, strict=True):
            vectors[_column(layer)] = values
    return vectors


def _column(layer: int) -> str:
    return f"layer_{layer}"


def labels_of(
    words: Sequence[str], images: Iterable[image_files.Named]
) -> dict[str, str] | None:
    """Returns the class of each image: its folder below the given folder.

    The folder of a split, such as "train", does not count as a class.

    Args:
      words: files and folders of the command line.
      images: output of `image_files.find_some` for them.

    Returns:
      Classes by the names of the images; None if an image has no class.
    """
    if image_files.STDIN in words:
        return None
    roots, labels = sorted(filter(os.path.isdir, words), key=len), {}
    for name, path in images:
        for root in roots:
            parts = os.path.relpath(path, root).split(os.sep)[:-1]
            if not parts or parts[0] == os.pardir:
                continue
            parts = parts[len(parts) > 1 and parts[0] in _SPLITS :]
            labels[name] = parts[0]
        if name not in labels:
            return None
    return labels


@contextlib.contextmanager
def writing(
    out: str, widths: Mapping[str, int], labels: Mapping[str, str] | None
) -> Iterator[Callable[[str, Mapping[str, np.ndarray]], None]]:
    """Yields a function that adds an image's name and vectors to a Parquet file.

    The columns are `name`, `label` if there are labels, and each vector as a list of
    float32 of fixed size. The file appears when all rows are written.

    Args:
      out: path of the file; its folder is created.
      widths: attribute of `Extractor`.
      labels: output of `labels_of`.

    Raises:
      UserError: the file cannot be written.
    """
    path = epath.Path(out)
    with writing_out(out):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as file,
            contextlib.closing(_Table(file, widths, labels)) as table,
        ):
            yield table.add
            table.flush()


class _Table:
    def __init__(self, file: IO[bytes], widths, labels):
        lists = {name: pa.list_(pa.float32(), width) for name, width in widths.items()}
        texts = {NAME: pa.string()} | ({LABEL: pa.string()} if labels else {})
        self._schema = pa.schema(texts | lists)
        coded = [LABEL] if labels else False  # Feature values hardly ever repeat.
        self._writer = pq.ParquetWriter(file, self._schema, use_dictionary=coded)
        self._labels, self._rows = labels, []

    def add(self, name: str, vectors: Mapping[str, np.ndarray]) -> None:
        row = {NAME: _text(name), **vectors}
        if self._labels:
            row[LABEL] = _text(self._labels[name])
        self._rows.append(row)
        if len(self._rows) == _GROUP:
            self.flush()

    def close(self) -> None:
        self._writer.close()

    def flush(self) -> None:
        if not self._rows:
            return
        arrays = []
        for field in self._schema:
            values = [row[field.name] for row in self._rows]
            if field.type == pa.string():
                arrays.append(pa.array(values, field.type))
            else:
                flat = pa.array(np.concatenate(values))
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type))
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []


def _text(name: str) -> str:
    """Returns a file name as text, even if its bytes are not valid text."""
    return name.encode(errors="backslashreplace").decode()
