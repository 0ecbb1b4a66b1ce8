"""The garbage collector during imports: held, then back, with what was imported out of its way."""

import gc

from lightning_gnnscale.cli.main import hold_garbage_collection, resume_garbage_collection


def test_garbage_is_collected_again_once_work_begins():
    resume_garbage_collection()
    assert gc.get_freeze_count() == 0, "where nobody holds it, nothing changes"
    hold_garbage_collection()
    try:
        assert not gc.isenabled()
        resume_garbage_collection()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
