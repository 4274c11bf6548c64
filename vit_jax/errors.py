"""Expected errors that end a run early, such as bad input; not bugs of this project."""

import sys
import warnings

# Exit codes; docs/resume.md says how a script that starts commands should react.
EXIT_CRASH = 1
EXIT_USER_ERROR = 2
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: preempted, or a host was lost.
EXIT_INTERRUPTED = 130  # The exit code that shells give for SIGINT.
EXIT_UNREAD = 141  # The exit code that shells give for SIGPIPE.


class UserError(ValueError):
    """Bad input: one line that names the thing, its value and the remedy.

    Commands print the line and exit with code 2; `--debug` shows the traceback.
    """


class NoSplit(UserError):
    """The data set has no split of the requested name."""


class NoLabels(UserError):
    """The data set has no labels, but labels were requested."""


class Diverged(UserError):
    """Training reached values that are not finite; the line names the step."""


class Preempted(Exception):
    """The run received SIGTERM or SIGHUP or cannot continue; its state is saved."""


class Interrupted(KeyboardInterrupt):
    """The run received Ctrl-C and has saved its state."""


class Stopped(KeyboardInterrupt):
    """The run received SIGTERM or SIGHUP, which the message names."""


class LostHost(Exception):
    """Another process of the job did not respond: exit code 75, try again."""


def keep_warnings_from_raising() -> None:
    """Resets this process's warning filters, which may raise under Python's -W error.

    A deprecation in another library must not end a run of days. Spawned processes
    inherit the option, so each of them calls this function.
    """
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.simplefilter("default")
