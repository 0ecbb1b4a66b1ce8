"""The protocol between a loader, which requests batches, and their source."""

from typing import NamedTuple, Protocol

from ..sampler.minibatch import MiniBatch


class BatchKey(NamedTuple):
    """The key that determines a batch, bit for bit; `rng.batch_key(*key)` is its random key.

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
    come and go may have `batches_ahead`: the least number requested ahead; and `parts_further`: how many more parts
    than the walk needs may be open at a time, where each is prepared on one of several machines.
    """

    def begin(self) -> None:
        """Start what does not run yet, before the first request of an iteration.

        Every rank calls it, even without batches: where ranks share a source, the others wait for it.
        """

    def request(self, key: BatchKey) -> None:
        """Request a batch, in the order in which batches are wanted; never blocks."""

    def ready(self) -> tuple[BatchKey, MiniBatch]:
        """Return the next requested batch, in request order; waits for it.

        Raises:
            GNNScaleError: what preparing it raised, with part, batch and epoch.
            ValueError: nothing is requested.
        """

    def expect_part(self, part: int) -> None:
        """Announce what is wanted next, see `BatchOrder.unit`, so that it can be loaded in time; may do nothing."""

    def forget(self) -> None:
        """Drop what was requested and not taken, at the end of an iteration; requests may follow."""

    def close(self) -> None:
        """Forget, and release everything: no thread, process or shared memory outlives it."""
