"""`python -m upcycle`: the command `upcycle`."""

from upcycle.cli.main import main as main
from upcycle.cli.main import script

if __name__ == "__main__":
    script()
