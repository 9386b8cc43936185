"""python -m training.prepare: text to token shards; the work is done in training/data/prepare.py."""

import sys

from training.data.prepare import main

if __name__ == "__main__":
    sys.exit(main())
