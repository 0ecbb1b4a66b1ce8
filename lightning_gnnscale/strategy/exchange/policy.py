"""What an exchange policy is: how the layers of a model read rows that other processes own."""

import lightning.pytorch as pl


class ExchangePolicy:
    """Base of the exchange policies.

    Attributes:
        live: whether layers talk to other processes while they train. Replicas must then be equal at every step, so
            that weights may only be averaged by their gradients.
    """

    live = False

    def setup(self, trainer: "pl.Trainer") -> None:
        """Prepare for a run; called on every rank when the model stands on its device, before the first batch."""
