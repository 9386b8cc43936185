"""python -m training.plots: pictures of runs; they are drawn in training/observe/plots.py."""

import sys

from training.observe.plots import main

if __name__ == "__main__":
    sys.exit(main())
