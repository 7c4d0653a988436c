"""python -m rdmafork.benchmarks FILE ... DIRECTORY: draw files of --json again."""

import json
import sys
from pathlib import Path

from ._harness import draw


def main() -> None:
    *files, directory = map(Path, sys.argv[1:])
    for file in files:
        found = json.loads(file.read_text())
        for document in found if isinstance(found, list) else [found]:
            print(*draw(document, directory), sep="\n")


main()
