"""`python deploy/load_test.py URL`: the same as `octavo load-test`, from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.load_test.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="deploy/load_test.py"))
