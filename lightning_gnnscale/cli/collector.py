"""The garbage collector, held while the program imports.

Nearly all that imports make lives as long as the process: searching it for garbage takes a second of every command,
and writes to pages that forked ranks could share.
"""

import atexit
import gc


def hold_collector() -> None:
    """Collect no garbage until `release_collector`."""
    gc.disable()
    atexit.register(gc.unfreeze)  # bindings count what the last collection leaves, and report it as leaked


def release_collector() -> None:
    """Collect garbage again, of what is made from here on; nothing happens where it was not held."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
