"""`python -m ambidex` is the command `ambidex`."""

from ambidex.cli.main import run

if __name__ == "__main__":
    run()
