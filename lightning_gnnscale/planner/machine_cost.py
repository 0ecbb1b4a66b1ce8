"""Seconds and money of an epoch on some machines: a model of what bounds a step, from measured seconds a batch."""

from dataclasses import dataclass

from ..errors import check_count, check_integer, check_number, short

_BITS = 8e-9  # gigabits of a byte


@dataclass(frozen=True)
class MachineRates:
    """What machines cost, and how fast they are. All that train are alike, and all that prepare.

    Args:
        price_per_hour: Price of a machine that trains, any currency; None: not known.
        preparing_price_per_hour: Of one that prepares batches; None: the same.
        link_gbit: Rate at which a machine sends, and at which it receives at the same time, gigabits a second.
        latency_ms: From a request to another machine until its answer begins, milliseconds.
        disk_gb_per_s: Rate at which a machine reads its disk, gigabytes a second; None: reads are not counted.
        cores: Cores of a machine.

    Raises:
        ValueError: an argument outside its range.
    """

    price_per_hour: float | None = None
    preparing_price_per_hour: float | None = None
    link_gbit: float = 1.0
    latency_ms: float = 1.0
    disk_gb_per_s: float | None = None
    cores: int = 1

    def __post_init__(self):
        for name in ("price_per_hour", "preparing_price_per_hour", "latency_ms"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, 0)
        for name in ("link_gbit", "disk_gb_per_s"):
            value = getattr(self, name)
            if value is not None or name == "link_gbit":
                check_number(name, value, 0)
                if value == 0:
                    raise ValueError(f"{name} must be a number > 0, got {short(value)}")
        check_count("cores", self.cores)

    def price(self, training: int, preparing: int) -> float | None:
        """Return what so many machines cost an hour; None: not known."""
        if self.price_per_hour is None:
            return None
        of_preparing = self.price_per_hour if self.preparing_price_per_hour is None else self.preparing_price_per_hour
        return training * self.price_per_hour + preparing * of_preparing


@dataclass(frozen=True)
class BatchSeconds:
    """What a batch takes, measured on one machine.

    Attributes:
        train_s: Seconds of the training thread: transfer, layers, update; without waiting, averaging and validation.
        prepare_s: Seconds of a thread that samples the batch and reads its rows, from memory and disk here.
        disk_bytes: Bytes that are read from disk for it.
        on_gpu: Whether the layers run on a GPU, and take no core.
    """

    train_s: float
    prepare_s: float
    disk_bytes: float = 0.0
    on_gpu: bool = False


@dataclass(frozen=True)
class SetUp:
    """Some machines, and what they send each other.

    Attributes:
        training, preparing: Machines that train, and that prepare batches; with preparing 0 those that train do so.
        devices: Ranks of a machine that trains.
        makers: Threads or workers that prepare batches on a machine that does.
        steps: Steps of a rank in an epoch.
        requests: Times that a maker asks other machines for a batch, and waits for the answer.
        received_bytes, sent_bytes: Of the machine that prepares and has most of each, in an epoch.
        trained_bytes: Bytes of batches that a machine that trains receives in an epoch from those that prepare.
        total_bytes: Bytes that all machines send in an epoch, without averages.
        averaged_bytes: Bytes of the model or its gradients that are averaged in an epoch.
        averages: Times that they are.
    """

    training: int
    steps: int
    preparing: int = 0
    devices: int = 1
    makers: int = 1
    requests: int = 0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    trained_bytes: float = 0.0
    total_bytes: float = 0.0
    averaged_bytes: float = 0.0
    averages: int = 0

    def __post_init__(self):
        for name in ("training", "devices", "makers", "steps"):
            check_count(name, getattr(self, name))
        check_integer("preparing", self.preparing, 0)


@dataclass(frozen=True)
class EpochCost:
    """What an epoch takes on some machines.

    Attributes:
        seconds: Predicted seconds, without validation.
        bound_by: What bounds a step: "layers", "preparation", "processors", "links" or "disks".
        sent_bytes: Bytes that all machines send each other, without averages.
        averaged_bytes: Bytes that all machines send for averages.
        price: Of all machines for these seconds; None: not known.
    """

    training: int
    preparing: int
    seconds: float
    bound_by: str
    sent_bytes: float
    averaged_bytes: float
    price: float | None


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends, and receives, while so many average this many: a ring's, or a tree's."""
    return 2 * num_bytes * (ranks - 1) / ranks


def fetch_seconds(setup: SetUp, rates: MachineRates) -> float:
    """Return the seconds that a maker of a batch waits for what it asks of other machines."""
    makers = setup.preparing or setup.training
    batches = setup.steps * setup.training * setup.devices / makers
    return setup.received_bytes * _BITS / rates.link_gbit / batches + setup.requests * rates.latency_ms / 1e3


def epoch_cost(setup: SetUp, batch: BatchSeconds, rates: MachineRates) -> EpochCost:
    """Predict the seconds, bytes and money of an epoch.

    A step of all ranks takes as long as what is busiest: the training thread, with averaging after it; those who
    prepare its batches, who wait for rows of other machines; the cores; the links; the disks. The rest happens beside
    it. The first batch is waited for.
    """
    ranks, makers = setup.training * setup.devices, setup.preparing or setup.training
    of_maker = setup.steps * ranks / makers  # batches that a machine prepares in an epoch
    make_s = batch.prepare_s + fetch_seconds(setup, rates)
    averaged = ring_bytes(setup.averaged_bytes, setup.training)
    average_s = averaged * _BITS / rates.link_gbit
    average_s += 2 * (setup.training - 1) * setup.averages * rates.latency_ms / 1e3
    at_trainer = 0 if setup.preparing else setup.devices
    busy = setup.devices * (0.0 if batch.on_gpu else batch.train_s) + at_trainer * batch.prepare_s
    if setup.preparing:
        of_links = max(setup.sent_bytes, setup.received_bytes, setup.trained_bytes + averaged)
    else:
        of_links = max(setup.sent_bytes, setup.received_bytes) + averaged
    steps = {
        "layers": batch.train_s + average_s / setup.steps,
        "preparation": make_s * of_maker / setup.makers / setup.steps,
        "processors": busy / rates.cores,
        "links": of_links * _BITS / rates.link_gbit / setup.steps,
    }
    if setup.preparing:
        steps["processors"] = max(steps["processors"], batch.prepare_s * of_maker / setup.steps / rates.cores)
    if rates.disk_gb_per_s is not None:
        steps["disks"] = batch.disk_bytes * of_maker / setup.steps / rates.disk_gb_per_s / 1e9
    bound_by = max(steps, key=steps.get)
    seconds = setup.steps * steps[bound_by] + make_s
    hourly = rates.price(setup.training, setup.preparing)
    price = None if hourly is None else hourly * seconds / 3600
    sent = setup.total_bytes, averaged * setup.training
    return EpochCost(setup.training, setup.preparing, seconds, bound_by, *sent, price)


def cheapest(costs: list[EpochCost]) -> EpochCost | None:
    """Return the first of the least price; None: prices are not known."""
    priced = [cost for cost in costs if cost.price is not None]
    return min(priced, key=lambda cost: cost.price, default=None)
