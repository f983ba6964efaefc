"""Exit codes of the command line, and a failure that a command can put in a sentence."""

OK, UNEXPECTED, USAGE, LOAD_REFUSED, NO_MATCH, REQUEST_REFUSED = range(6)
ENGINE_FAILED = 70  # the device failed while serving, and once too often to start again
SIGNALLED = 128  # + the signal's number
INTERRUPTED = SIGNALLED + 2


class CommandFailed(Exception):
    """What was asked could not be done; the text is one sentence. Exit code `UNEXPECTED`."""
