"""Saves the tiny model that `engine.py` loads in a guest, where making it would take minutes more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_engine import make_engine_folder

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(make_engine_folder(folder))
