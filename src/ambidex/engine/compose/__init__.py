"""How an engine is put together; only this package sees both planes.

`choices.py`: what settings, model and machine make of each other. `weights.py`: the model, loaded. `parts.py`: parts of
the data plane. `report.py`: what became of it all. `root.py`: every object, by hand and in order.
"""

from ambidex.engine.compose.choices import choose_num_threads, default_num_threads
from ambidex.engine.compose.root import build_engine

__all__ = ["build_engine", "choose_num_threads", "default_num_threads"]
