"""Both schedulers on hand-made task times, ticked through in whole milliseconds: slow, and obvious.

Nothing is shared with the package. A batch is a list of (milliseconds, dependencies, cost). Free threads act at each
tick, lowest number first, the trainer before them. There are enough cores for all.
"""

import math


def two_level(batches, num_threads, sigma, train_ms, cap=None, batch_bytes=1):
    """Return (starts, deliveries): (tick, thread, batch, task) as tasks begin, and the tick at which each was taken."""
    world = _World(batches, num_threads, train_ms)

    def choose(world, thread):
        for batch in sorted(world.launched):
            free = [n for n, state in enumerate(world.state[batch]) if state == "new" and world.open(batch, n)]
            if free:
                return batch, min(free, key=lambda n: (world.batches[batch][n][2], n))
        if len(world.launch_ms) == len(batches):
            return None
        under_way, queue = len(world.launched), len(world.finished)
        if cap is not None and under_way + queue > 0:
            if world.sizes_known:
                if (queue + under_way + 1) * batch_bytes > cap:
                    return None
            else:
                return None
        takeable = 0
        while len(world.taken) + takeable in world.finished:
            takeable += 1
        if takeable:
            busy = 100 * sum(other is not None for other in world.busy) / num_threads
            idle = 101 - math.exp(busy / (100 / math.log(101)))
            begun = world.taken[-1] if world.taken else world.first_ms
            sample, train = mean(world.sample_ms), mean(world.train_times) if world.train_times else world.now - begun
            gap = (world.now - world.launch_ms[-1]) / train if train else 0
            if train and gap * idle * sample / (train * takeable) < sigma:
                return None
        world.launch()
        return choose(world, thread)

    return world.run(choose)


def fixed_prefetch(batches, num_threads, depth, train_ms):
    """Return (starts, deliveries) where each thread prepares whole batches, `depth` of them unfinished or untaken."""
    world = _World(batches, num_threads, train_ms)

    def choose(world, thread):
        own = world.own.get(thread)
        if own in world.launched:
            return own, world.state[own].index("new")
        if len(world.launch_ms) < len(batches) and len(world.launched) + len(world.finished) < depth:
            world.own[thread] = len(world.launch_ms)
            world.launch()
            return choose(world, thread)
        return None

    return world.run(choose)


def mean(values):
    """The mean of all up to sixteen values, then a sixteenth of the new one to fifteen of the old."""
    average = 0.0
    for number, value in enumerate(values, 1):
        average += (value - average) * max(1 / number, 1 / 16)
    return average


class _World:
    def __init__(self, batches, num_threads, train_ms):
        self.batches, self.train_ms, self.now = batches, train_ms, 0
        self.busy = [None] * num_threads  # (end, batch, task)
        self.state, self.launched, self.finished, self.own = {}, set(), set(), {}
        self.launch_ms, self.sample_ms, self.train_times = [], [], []
        self.starts, self.taken, self.training_until, self.sizes_known = [], [], None, False
        self.first_ms = None

    def launch(self):
        batch = len(self.launch_ms)
        self.launch_ms.append(self.now)
        self.state[batch] = ["new"] * len(self.batches[batch])
        self.launched.add(batch)

    def open(self, batch, number):
        return all(self.state[batch][other] == "done" for other in self.batches[batch][number][1])

    def run(self, choose):
        while len(self.taken) < len(self.batches):
            if self.training_until == self.now:
                self.train_times.append(self.train_ms)
                self.training_until = None
            for work in self.busy:
                if work and work[0] == self.now:
                    _, batch, number = work
                    self.state[batch][number] = "done"
                    if set(self.state[batch]) == {"done"}:
                        self.launched.discard(batch)
                        self.finished.add(batch)
                        self.first_ms = self.first_ms if self.sizes_known else self.now
                        self.sizes_known = True
                        self.sample_ms.append(self.now - self.launch_ms[batch])
            if self.training_until is None and len(self.taken) in self.finished:
                self.finished.discard(len(self.taken))
                self.taken.append(self.now)
                self.training_until = self.now + self.train_ms
            for thread, work in enumerate(self.busy):
                if work is None or work[0] == self.now:
                    self.busy[thread] = None
                    chosen = choose(self, thread)
                    if chosen:
                        batch, number = chosen
                        self.state[batch][number] = "running"
                        self.starts.append((self.now, thread, batch, number))
                        self.busy[thread] = (self.now + self.batches[batch][number][0], batch, number)
            self.now += 1
        return sorted(self.starts), self.taken
