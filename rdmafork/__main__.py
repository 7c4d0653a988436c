"""python -m rdmafork: the rdmafork command."""

import sys

from rdmafork.cli import main

if __name__ == "__main__":
    sys.exit(main())
