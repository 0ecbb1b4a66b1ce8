"""The protocol between a loader, which says what batches it wants, and whatever prepares them."""

from typing import NamedTuple, Protocol

from ..sampler.minibatch import MiniBatch


class BatchKey(NamedTuple):
    """What decides a batch, bit for bit; `rng.batch_key(*key)` is its random key.

    Attributes:
        seed: Seed of the run.
        epoch: The key's epoch: Lightning's epoch times passes, plus the pass.
        part: Part id.
        batch: Number of the batch in the pass over the part.
    """

    seed: int
    epoch: int
    part: int
    batch: int


class BatchSource(Protocol):
    """Prepare batches ahead of their use; used by one thread.

    A batch is a pure function of its key, so that a source may prepare it anywhere, again, or twice. One whose workers
    come and go may have `batches_ahead`: as many are asked for ahead, at least; and `parts_further`: so many more parts
    may be open at a time than the walk needs, where each is prepared on one of several machines.
    """

    def begin(self) -> None:
        """Start what is not there, before the first request of an iteration.

        Every rank calls it, one without any batch too: where ranks share what prepares, the others wait for it.
        """

    def request(self, key: BatchKey) -> None:
        """Ask for a batch, in the order in which batches are wanted; never blocks."""

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next requested batch, in request order; waits for it.

        Raises:
            GNNScaleError: what preparing it raised, with part, batch and epoch.
            ValueError: nothing is requested.
        """

    def expect_part(self, part: int) -> None:
        """Hear which part is wanted next, so that it can be loaded by then; may do nothing."""

    def forget(self) -> None:
        """Drop what was requested and not taken, at the end of an iteration; requests may follow."""

    def close(self) -> None:
        """Forget, and let go of everything: no thread, process or shared memory outlives it."""
