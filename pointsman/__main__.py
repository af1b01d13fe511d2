"""Where the command `pointsman` starts, and `python -m pointsman`."""

import sys


def main() -> int:
    """Run the command. Imports take a moment, in which Ctrl-C is no reason for a traceback, either."""
    try:
        from pointsman.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
