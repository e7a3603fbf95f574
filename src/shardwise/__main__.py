"""``python -m shardwise``, also as ``torchrun -m shardwise``."""

import sys

from shardwise.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
