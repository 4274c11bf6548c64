"""Functions that configs of evaluations share: choosing a data set."""

import os

from ml_collections import ConfigDict

from configs.common import parse_arg

# A table of paths and labels; a folder with train/ and test/ (or val/), each with class
# folders; or a value of --config.data.name, followed by @DIR if the data set was not
# prepared in TFDS's default folder.
#
# For a folder with only class folders, set the parts to learn from and to test on:
# data=FOLDER,train=all[:50%],test=all[50%:]. A classifier is tested on all images.
#
# A folder with a comma in its name needs --config.data.name=folder and
# --config.data.data_dir=FOLDER.
DATA = dict(data="")


def evaluation(arg: str | None, **more: object) -> tuple[object, ConfigDict]:
    """Parses the argument of a recipe, and returns it with the beginning of a config.

    Args:
      arg: argument of the recipe, see `parse_arg`.
      **more: arguments that the recipe has besides DATA.

    Returns:
      The arguments, and a config with `batch_size` and `data`.
    """
    arg = parse_arg(arg, **DATA, **more)
    c = ConfigDict()
    c.batch_size = 64
    c.data = data_set(arg.data)
    c.data.num_threads = 2
    c.evals = {}
    return arg, c


def data_set(text: str) -> ConfigDict:
    """Returns `config.data` for a data set that a user names."""
    name, _, data_dir = text.partition("@")
    if os.path.isdir(os.path.expanduser(text)):
        name, data_dir = "folder", text
    elif os.path.isfile(os.path.expanduser(text)):
        name, data_dir = "table", text
    return ConfigDict(dict(name=name, data_dir=data_dir))
