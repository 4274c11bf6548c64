"""What configs of evaluations share: how a data set is named."""

import os

from ml_collections import ConfigDict

from configs.common import parse_arg

# A table of paths and labels; a folder of train/ and test/ (or val/) with class folders;
# or a name of --config.data.name, with @DIR behind it if it was not prepared in TFDS's
# own folder.
# Of a folder of class folders alone the parts to learn from and to test on are stated:
# data=FOLDER,train=all[:50%],test=all[50%:]. A classifier is tried on all of it.
# A folder with a comma in its name: --config.data.name=folder --config.data.data_dir=...
DATA = dict(data="")


def evaluation(arg: str | None, **more: object) -> tuple[object, ConfigDict]:
    """Starts a config from its argument.

    Args:
      arg: as of `parse_arg`.
      **more: arguments of the config besides DATA.

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
    """Returns `config.data` of what a user calls a data set."""
    name, _, data_dir = text.partition("@")
    if os.path.isdir(os.path.expanduser(text)):
        name, data_dir = "folder", text
    elif os.path.isfile(os.path.expanduser(text)):
        name, data_dir = "table", text
    return ConfigDict(dict(name=name, data_dir=data_dir))
