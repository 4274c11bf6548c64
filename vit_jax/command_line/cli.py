"""What all commands share: flags, config overrides, and how errors are shown."""

import argparse
import difflib
import errno
import gc
import logging
import math
import os
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Mapping, Sequence

from vit_jax.command_line import files, signals
from vit_jax.command_line.printing import masked, print_error
from vit_jax.errors import (
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_UNREAD,
    EXIT_USER_ERROR,
    LostHost,
    UserError,
    keep_warnings_from_raising,
)

# Flags whose values are files and folders, except those of weights and images.
_PLACES = ("workdir", "out", "export", "html", "sheet", "data_dir", "compiled")
SQUASH = "squash"  # A value of --crop_pct.
# New objects between two garbage collections. Python's default of 700 costs a tenth of
# the time to start, since tracing makes many small objects and keeps them all.
_COLLECTED_AFTER = 10_000
# Errors of a disk that is full or read-only.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_WNID = re.compile(r"n\d{8}\s+(\S.*)")  # A WordNet synset, then its name.
_UNSTATED = "?"  # `init` in a recipe that cannot start from scratch.


class Parser(argparse.ArgumentParser):
    """Flags of a command; `--config.key=value` overrides are added by `parse`.

    Args:
      doc: description that --help shows.
      config: name of the dataclass in training/config.py whose keys the command takes;
        "" for none.
      recipes: regular expression that matches the recipes to list in --help; "" for
        none.
      keys: config key to the flag that sets it in this command.
      local: names of flags whose files are written on local disks only.
    """

    def __init__(
        self,
        doc: str,
        config: str = "",
        recipes: str = "",
        keys: Mapping[str, str] = types.MappingProxyType({}),
        local: Sequence[str] = (),
    ):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=form, add_help=False)
        # `parse` prints the help, because it knows the recipe.
        about = "show this help; KEYS lists config keys: a section, or all"
        how = {"nargs": "?", "metavar": "KEYS", "help": about}
        if not config:
            how = {"action": "store_true", "help": "show this help"}
        self.add_argument("-h", "--help", **how)
        self.add_argument("--debug", action="store_true", help="show tracebacks")
        self._config, self._recipes, self._keys = config, recipes, keys
        self._local = local

    def help_text(self, topic: str = "", recipe: str = "") -> str:
        """Returns the text of --help: the flags, the recipes, and keys of the config.

        Args:
          topic: "all" for all keys, the name of a section for its keys, or "" for the
            keys that the recipe sets.
          recipe: value of --config; "" if it is not given.

        Raises:
          UserError: the config has no such section, or the recipe cannot be read.
        """
        flags = self.format_help()
        if not self._config:
            return flags
        from vit_jax.config import loading, reference
        from vit_jax.training import config

        cls = getattr(config, self._config)
        if topic:
            return reference.text(cls, "" if topic == "all" else topic)
        titles = {
            name: title
            for name, title in loading.recipes().items()
            if self._recipes and re.fullmatch(self._recipes, name)
        }
        parts = [flags]
        if titles:
            lines = [
                f"  {name:20} {textwrap.shorten(title, 77, placeholder=' ...')}"
                for name, title in titles.items()
            ]
            heading = "recipes, for --config=NAME or --config=NAME:ARGUMENT:"
            parts.append("\n".join([heading, *lines, ""]))
        if recipe:
            parts.append(reference.text_of(cls, recipe))
        names = ", ".join(reference.sections(cls))
        more = (
            "Each key of the config is a flag, such as --config.seed=1. --help=SECTION "
            f"lists the keys of a section ({names}); --help=all lists all keys"
        )
        if titles and not recipe:
            more += "; --config=RECIPE --help lists the keys that a recipe sets"
        return "\n".join([*parts, textwrap.fill(f"{more}.", 88), ""])

    def check_places(self, flags: argparse.Namespace) -> None:
        """Raises UserError if a flag names a place that cannot be read or written."""
        for name in _PLACES:
            place, local = getattr(flags, name, None) or "", name in self._local
            files.refuse_scheme(f"--{name}", place, local=local)

    def refuse(self, words: Sequence[str]) -> None:
        """Exits with a line that suggests a flag or config key for an unknown flag."""
        names = [word.partition("=")[0] for word in words if word.startswith("-")]
        name, hint = (names or words)[0], ""
        if self._config:
            from vit_jax.config import loading
            from vit_jax.training import config

            known = getattr(config, self._config)
            meant = [loading.key_called(known, each.strip("-")) for each in names]
            keys = [self._keys.get(key, f"--config.{key}") for key in meant if key]
            hint = f"; set {' '.join(keys)}" if keys else ""
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not hint and (near := difflib.get_close_matches(name, flags, 1)):
            hint = f"; did you mean {near[0]}?"
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    def error(self, message: str) -> None:
        """Exits with one line, as for every other bad input."""
        print_error(f"error: {message}; --help lists the flags")
        sys.exit(EXIT_USER_ERROR)


def parse(parser: Parser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parses a command line.

    Args:
      parser: flags of the command.
      argv: words of the command line; `sys.argv[1:]` if None.

    Returns:
      The flags, and `overrides`: dotted config key to value.
    """
    # Imported here, so that signals are caught as early as possible.
    from vit_jax.config import loading

    words, overrides = [], {}
    rest = list(sys.argv[1:] if argv is None else argv)
    for word in rest:
        name, _, topic = word.partition("=")
        if name in ("-h", "--help"):
            print(parser.help_text(topic, _recipe(rest)), end="")
            sys.exit(0)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--config."):
            if word.endswith("=--"):  # argparse would read an empty list.
                parser.error(f"{word} has no value")
            words.append(word)
            continue
        key, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            if not rest:
                parser.error(f"--config.{key} has no value")
            value = rest.pop(0)
        overrides[key] = loading.parse_override(value)
    flags, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(unknown)
    flags.overrides = overrides
    parser.check_places(flags)
    if getattr(flags, "step", None) is not None:
        from vit_jax.weights import checkpoint_folders

        flags.model = checkpoint_folders.at_step(flags.model, flags.step)
    return flags


def _recipe(words: Sequence[str]) -> str:
    """Returns the value of --config on a command line; "" if it is not given."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", nargs="?")
    return parser.parse_known_args(words)[0].config or ""


def load_config(flags: argparse.Namespace):
    """Returns the config that the flags name.

    Raises:
      UserError: it is not a config, or needs `init` and has none.
    """
    from vit_jax.training import config as configuration

    config = configuration.load(flags.config, flags.overrides)
    tell_unread(config)
    if config.init.checkpoint == _UNSTATED:
        raise UserError(
            f"init={_UNSTATED!r}: {flags.config} starts from a checkpoint that is "
            "yours to choose: set --config.init to the workdir of a run, a file or folder "
            "with weights, or a name such as paper:B/16-i21k"
        )
    return config


def tell_unread(config) -> None:
    """Warns if `data.data_dir` is set but not read, as in `:quick` recipes."""
    from vit_jax.data.sources.open import source_type  # Late: signals come first.

    data = config.data
    if data.data_dir and not source_type(data.name).needs_files:
        print_error(
            f"data.data_dir={data.data_dir!r} is not read: data.name={data.name!r} (as "
            "with :quick) needs no files"
        )


def refuse_overrides(flags: argparse.Namespace, doing: str) -> None:
    """Raises UserError if a config key is set; `doing` is an activity, "predicting"."""
    if flags.overrides:
        raise UserError(
            f"--config.{next(iter(flags.overrides))}: {doing} takes no config; "
            "--help lists the flags"
        )


def add_weights_flags(parser: Parser) -> None:
    """Adds flags that choose weights and the image size."""
    add = parser.add_argument
    add("--model", required=True, help="weights: run, file, folder or name")
    add_step_flag(parser)
    help = "use the last parameters of a run or training checkpoint, not their average"
    add("--no_ema", action="store_true", help=help)
    add("--resolution", type=size, help="image size, pixels or HEIGHTxWIDTH")
    _add_preparation(parser)


def add_step_flag(parser: Parser) -> None:
    """Adds the flag that chooses a checkpoint of a run; `parse` applies it to --model."""
    help = "use the run's checkpoint of this step, not its best or last"
    parser.add_argument("--step", type=positive, help=help)


def add_tta_flag(parser: Parser) -> None:
    """Adds the flag of test-time augmentation."""
    parser.add_argument(
        "--tta",
        choices=("flip", "five_crops", "ten_crops"),
        default="",
        help="average probabilities over 2, 5 or 10 views of each image",
    )


def add_patch_flags(parser: Parser) -> None:
    """Adds the flags of the patches of images, which `image_flags` reads."""
    add = parser.add_argument
    add(
        "--max_tokens",
        type=natural,
        metavar="N",
        help="keep the aspect ratio of images, with at most N patches each (NaFlex), "
        "for example 256",
    )
    add(
        "--patch",
        type=positive,
        metavar="PIXELS",
        help="side of patches; the network's patch embedding is resized (FlexiViT)",
    )
    add(
        "--patch_resize",
        metavar="HOW",
        help="how --patch resizes the patch embedding: bilinear_plain (big_vision) or "
        "bicubic (timm)",
    )


def add_max_megapixels_flag(parser: Parser) -> None:
    """Adds the flag of the largest image to read, as `data.max_megapixels`."""
    parser.add_argument(
        "--max_megapixels",
        type=_above_0,
        metavar="N",
        help="largest image to decode, in millions of pixels; default: 100",
    )


def add_token_merging_flag(parser: Parser) -> None:
    """Adds the flag of token merging, which `open_weights` reads."""
    parser.add_argument(
        "--token_merging",
        type=natural,
        default=0,
        metavar="R",
        help="merge R similar patches in each block (ToMe), for example 8; faster, but "
        "less accurate",
    )


def add_layers_flag(parser: Parser, help: str) -> None:
    """Adds the flag that chooses layers: None without it, () for all of them."""
    parser.add_argument(
        "--layers",
        nargs="?",
        type=_layers,
        const=(),
        metavar="2,5,-1",
        help=f"{help}; -1 is the last layer; no numbers mean all layers",
    )


def add_image_flags(parser: Parser) -> None:
    """Adds flags for class names and preprocessing, which some weights do not record."""
    parser.add_argument(
        "--labels", default="", help="file of class names, one per line"
    )
    _add_preparation(parser)


def _add_preparation(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--mean",
        type=_floats,
        help="mean of pixels that are scaled to [0, 1], such as 0.485,0.456,0.406",
    )
    add(
        "--std",
        type=_floats,
        help="standard deviation of pixels scaled to [0, 1], such as 0.229,0.224,0.225",
    )
    add(
        "--interpolation",
        help="resize filter: nearest, bilinear, bicubic, lanczos, box, hamming; or as "
        "in Google's code, area or bilinear_plain (not antialiased)",
    )
    add(
        "--crop_pct",
        type=_crop,
        help="central crop as a fraction of the short side, or squash: resize the "
        "image without keeping its aspect ratio",
    )
    add(
        "--exif",
        action="store_true",
        default=None,
        help="rotate images by the orientation tags of cameras, as data.exif does; the "
        "default of predict and explore, unless a run was trained without it",
    )
    off = {"dest": "exif", "action": "store_false", "default": None}
    add("--no_exif", **off, help="ignore the orientation tags of cameras")
    add_network_flags(parser)


def add_network_flags(parser: Parser) -> None:
    """Adds flags for options of the network that some files do not record."""
    add = parser.add_argument
    add(
        "--num_heads",
        type=positive,
        default=0,
        help="number of attention heads, if the weights do not record it",
    )
    add(
        "--architecture",
        default="",
        help="timm's name of the model, for files without config.json",
    )


def image_flags(flags: argparse.Namespace) -> dict:
    """Returns the fields of `weights.Preprocess` that flags set."""
    given = {
        "mean": flags.mean,
        "std": flags.std,
        "interpolation": flags.interpolation,
        "crop_fraction": 1.0 if flags.crop_pct == SQUASH else flags.crop_pct,
        "squash": flags.crop_pct and flags.crop_pct == SQUASH,
        "short_side": False if flags.crop_pct == SQUASH else None,
        "fill": () if flags.crop_pct == SQUASH else None,
        "image_size": getattr(flags, "resolution", None),
        "cut": (0, 0) if getattr(flags, "resolution", None) else None,
        "exif": flags.exif,
        "max_tokens": getattr(flags, "max_tokens", None),
        "patch": getattr(flags, "patch", None),
        "max_megapixels": getattr(flags, "max_megapixels", None),
        "patch_resize": getattr(flags, "patch_resize", None),
    }
    return {name: value for name, value in given.items() if value is not None}


def open_weights(
    flags: argparse.Namespace,
    checkpoint: str = "",
    *,
    with_task: bool = False,
    texts: bool = False,
):
    """Opens the weights that the flags of a command choose, and reads its --labels.

    Args:
      flags: flags of `add_weights_flags`, parsed.
      checkpoint: weights to open instead of --model; --architecture, --labels and the
        preprocessing flags then do not apply.
      with_task: whether to read the parameters that the training task adds.
      texts: whether --labels may be texts, for weights without a classifier; implies
        `with_task`.

    Returns:
      The checkpoint, its preprocessing, and the class names of --labels, empty if not
      set. Guesses about the weights are printed on stderr.

    Raises:
      UserError: the weights or the class names cannot be read.
    """
    from vit_jax import weights

    checkpoint = checkpoint or flags.model
    is_model = checkpoint == flags.model
    names, labels = (), getattr(flags, "labels", "") if is_model else ""
    are_texts = texts and not is_file(labels)
    if labels and not are_texts:
        names = read_labels(labels)
    pretrained, preprocess = weights.open_weights(
        checkpoint,
        image_flags(flags) if is_model else {},
        use_ema=not flags.no_ema,
        num_heads=flags.num_heads,
        architecture=flags.architecture if is_model else "",
        with_task=with_task or texts,
        token_merging=getattr(flags, "token_merging", 0),
        tell=print_error,
    )
    if labels and are_texts:
        has_classes = bool(pretrained.options["num_classes"])
        read = read_labels if has_classes else read_texts
        names = read(labels, "--labels")
    return pretrained, preprocess, names


def read_texts(value: str, flag: str) -> tuple[str, ...]:
    """Reads texts to compare images with.

    Args:
      value: texts separated by commas, or a file with one per line.
      flag: name of the flag, for messages.

    Raises:
      UserError: a text is empty, or the file cannot be read.
    """
    if is_file(value):
        return read_labels(value, flag)
    texts = tuple(one.strip() for one in value.split(","))
    if not all(texts):
        raise UserError(
            f"{flag}={value!r} has an empty text: give texts separated by commas, or a "
            "file with one per line"
        )
    return texts


def is_file(value: str) -> bool:
    """Returns whether a flag's value is the path of a file rather than texts.

    The file need not exist. A single word is a path, since images are compared with at
    least two texts.
    """
    several = "," in value or " " in value
    path = os.sep in value or value.endswith(".txt")
    return os.path.exists(value) or path or not several


def read_labels(path: str | os.PathLike, flag: str = "--labels") -> tuple[str, ...]:
    """Reads class names, one per line in label order.

    Args:
      path: text file. If every line begins with a synset such as n01440764, the synsets
        are dropped.
      flag: name of the flag, for messages.

    Raises:
      UserError: the file cannot be read, or a line has no name.
    """
    from vit_jax.data import class_names

    files.check(flag, path)
    names = class_names.read(path, f"{flag}={path}")
    matches = [_WNID.fullmatch(name) for name in names]
    return tuple(m[1] for m in matches) if all(matches) else names


def minutes(text: str) -> float:
    """Parses a number of minutes from 0 on, for `type=` of a flag."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def positive(text: str, least: int = 1) -> int:
    """Parses the value of a flag as a whole number of at least `least`."""
    number = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not least <= number < 2**63:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {least} on"
        )
    return number


def natural(text: str) -> int:
    """Parses the value of a flag as a whole number of at least 0."""
    return positive(text, 0)


def fraction(text: str) -> float:
    """Parses the value of a flag as a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def coverage(text: str) -> float:
    """Parses the value of a flag as a number between 0 and 1."""
    number = fraction(text)
    if number in (0, 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return number


def _above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def size(text: str) -> tuple[int, int]:
    """Parses a flag's height and width: one number of pixels, or HEIGHTxWIDTH."""
    height, _, width = text.partition("x")
    height, width = positive(height), positive(width or height)
    from vit_jax.data.config import MAX_PIXELS  # Late: signals come first.

    if height * width > MAX_PIXELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than {MAX_PIXELS:,} pixels; choose a smaller size"
        )
    return height, width


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of layers with commas between them, such as 2,5,-1"
        ) from error


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers with commas between them"
        ) from error


def _crop(text: str) -> float | str:
    try:
        return text if text == SQUASH else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor {SQUASH}"
        ) from error


def run(
    main: Callable[[argparse.Namespace], int | None],
    parser: Parser,
    *,
    trains: bool = False,
) -> None:
    """Runs a command and exits.

    The exit code is what `main` returns, or 0 for None; 2 after a line about bad input,
    full memory or a full disk; 75 after a line about a host that did not connect; 130
    after Ctrl-C; 141, without a line, when nobody reads the output any more. With
    `trains`, SIGTERM and SIGHUP end the command with 75, and unread output does not end
    it.
    """
    signals.catch(trains=trains)
    gc.set_threshold(_COLLECTED_AFTER)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # File names may hold bytes that are not text, and terminals may lack
        # characters.
        stream.reconfigure(errors="backslashreplace")
    keep_warnings_from_raising()
    # Otherwise absl's first line makes all later ones begin with "WARNING:" and a
    # module.
    logging.basicConfig(format="%(message)s", handlers=[logging.lastResort])
    # It has a handler; the root logger would print each of its lines a second time.
    logging.getLogger("huggingface_hub").propagate = False
    debug = "--debug" in sys.argv
    try:
        code = _exit_code(main, parser, debug=debug)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        if not signals.unread():
            raise
        signals.drop_output()
        code = EXIT_UNREAD
    except BaseException as error:
        # A library may have turned KeyboardInterrupt into another error.
        if not (signals.interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
        if debug:
            traceback.print_exception(error)
        print_error("interrupted")
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _exit_code(main: Callable, parser: Parser, *, debug: bool) -> int:
    """Runs a command and returns its exit code; prints a user's errors as one line."""
    try:
        return main(parse(parser)) or 0
    except (UserError, LostHost) as error:
        show(error, debug=debug)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_TRY_AGAIN
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        what = " ".join(str(error).split())[:200]
        less = "ask for less, by a smaller batch, image size or model"
        show(UserError(f"out of memory ({what}): {less}"), debug=debug)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        what = f"{error.filename or 'a file'} cannot be written ({error.strerror})"
        show(UserError(f"{what}: make room, then repeat the command"), debug=debug)
    except SystemExit as end:  # --help, or a bad flag.
        return end.code
    return EXIT_USER_ERROR


def _is_memory(error: Exception) -> bool:
    """Returns whether an error means that memory of the host or a device was full."""
    # By its text, since the error may be of JAX, which need not be imported here.
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def show(error: UserError | LostHost, *, debug: bool) -> None:
    """Prints an error as one line on stderr; with `debug`, its traceback first."""
    if debug:
        print(masked("".join(traceback.format_exception(error))), file=sys.stderr)
    # Messages of other libraries may have several lines.
    print_error(f"error: {' '.join(str(error).splitlines())}")
