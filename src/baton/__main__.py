"""`python -m baton` and the script `baton`: the command line, and what Ctrl-C prints."""

import sys
from collections.abc import Sequence

EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    try:
        # Imported here, so that Ctrl-C prints one line during the import too.
        from baton.command_line import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("baton: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
