"""The garbage collector during imports: held, then back, with what was imported out of its way."""

import gc

from lightning_gnnscale.cli.collector import hold_collector, release_collector


def test_garbage_is_collected_again_once_work_begins():
    release_collector()
    assert gc.get_freeze_count() == 0, "where nobody holds it, nothing changes"
    hold_collector()
    try:
        assert not gc.isenabled()
        release_collector()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
