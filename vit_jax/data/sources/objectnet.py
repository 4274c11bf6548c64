"""ObjectNet: photographs of everyday objects, for testing models of ImageNet-1k."""

from vit_jax.data.config import DataConfig
from vit_jax.data.imagenet import OBJECTNET_CLASSES
from vit_jax.data.sources.base import SourceType, default_split
from vit_jax.data.sources.folder import FolderSource, open_folder


def _of_config(data: DataConfig, split: str) -> FolderSource:
    return open_folder(data.data_dir, split, split, only=tuple(OBJECTNET_CLASSES))


OBJECTNET = SourceType(
    open=_of_config,
    help="ObjectNet's folders of the classes that overlap ImageNet-1k.",
    numbered=False,
    eval_splits=default_split(lambda name: "images"),
)
