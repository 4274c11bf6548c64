"""Errors that end a run early, other than bugs of this project."""

import sys
import warnings

# Exit codes; docs/resume.md says what each asks of whoever starts a command.
EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: preempted, or a host was lost.
EXIT_INTERRUPTED = 130  # As shells say it of SIGINT.
EXIT_UNREAD = 141  # As shells say it of SIGPIPE.


class UserError(ValueError):
    """Bad input: one line that names the thing, its value and the remedy.

    Verbs print the line and exit with code 2; `--debug` shows the traceback.
    """


class NoSplit(UserError):
    """A data set has no split of that name."""


class NoLabels(UserError):
    """A data set has no labels, but they are to be read."""


class Diverged(UserError):
    """Training came to numbers that are not finite; the line names the step."""


class Preempted(Exception):
    """The run was asked to end (SIGTERM, SIGHUP) or cannot continue; its state is saved."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came, and the run has saved its state."""


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP came, which the message names."""


class LostHost(Exception):
    """Another process of the job did not come: exit code 75, try again."""


def keep_warnings_from_raising() -> None:
    """Resets the filters of this process where Python runs with -W error.

    A deprecation in another library must not end a run of days. Processes that are
    spawned get the option again, so each calls this for itself.
    """
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.simplefilter("default")
