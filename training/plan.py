"""`python -m training.plan [CONFIG] [key=value ...]`: the command `upcycle estimate`."""

from upcycle.cli.main import script

if __name__ == "__main__":
    script("estimate")
