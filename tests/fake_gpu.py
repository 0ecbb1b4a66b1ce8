"""A GPU without one: tensors that say they are on cuda:0, and refuse what would let the host wait for it.

Values are computed on the CPU. While `steady` is true an operation that a GPU must finish before the host goes on is
noted in `waits`: reading a value, a copy to the host or from memory that is not pinned, a result whose size is known on
the device alone. Collectives take tensors of the device alone, as NCCL does.
"""

import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _InfiniteBarrier
from lightning.pytorch.accelerators import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).parents[1]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
# Results whose size, or whose algorithm, needs a value on the host.
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount"}


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `held` has its values. To torch's own code it is on "meta", which has gradients."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device="meta",
        )  # fmt: skip

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"DeviceTensor{tuple(self.shape)}"

    def get_device(self):
        return 0

    def tolist(self):
        FakeGPU.current.note("tolist")
        return self.held.tolist()

    def record_stream(self, stream):
        stream.used.append(self)

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to host memory first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return FakeGPU.current.run(func, args, kwargs or {})


class FakeGPU(TorchDispatchMode):
    """The device while its with-block runs.

    Attributes:
        steady: Whether waits are noted.
        waits: Each wait: the operation, and the innermost line of the project that called it.
        waits_ahead: Those of other threads than the one that trains.
    """

    current = None

    def __init__(self):
        super().__init__()
        self.steady, self.waits, self.waits_ahead, self.collectives = False, [], [], []
        self.thread = threading.current_thread()

    def __enter__(self):
        FakeGPU.current = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def note(self, what):
        if self.steady:
            own = [frame for frame in traceback.extract_stack() if ROOT / "lightning_gnnscale" in
                   Path(frame.filename).parents or ROOT / "triton_kernels" in Path(frame.filename).parents]  # fmt: skip
            where = f"{Path(own[-1].filename).relative_to(ROOT)}, {own[-1].name}" if own else "elsewhere"
            waits = self.waits if threading.current_thread() is self.thread else self.waits_ahead
            waits.append(f"{what}: {where}")

    def run(self, func, args, kwargs):
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        here = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        to_device = wanted is not None and wanted.type in ("cuda", "meta")  # torch's own code asks for meta
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs, leaves)
        self._check(func, name, args, kwargs, leaves, here, wanted)
        if not here and not to_device:
            return func(*args, **kwargs)
        plain_args, plain = tree_map_only(DeviceTensor, lambda one: one.held, (args, kwargs))
        if to_device:
            plain["device"] = CPU
        if name == "_to_copy" and not here:
            plain.pop("non_blocking", None)
        out = func(*plain_args, **plain)
        if name == "copy_" and not isinstance(args[0], DeviceTensor):
            return args[0]
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], DeviceTensor):
            return args[0]
        if func is aten._to_copy.default and wanted is not None and not to_device:
            return out
        if func is aten._local_scalar_dense.default:
            return out
        given = {id(one.held): one for one in here}
        return tree_map_only(torch.Tensor, lambda one: given[id(one)] if id(one) in given else DeviceTensor(one), out)

    def _check(self, func, name, args, kwargs, leaves, here, wanted):
        if name == "_local_scalar_dense" and here:
            self.note("item")
        elif name in SIZED_BY_VALUES and here:
            self.note(name)
        elif name == "repeat_interleave" and here and kwargs.get("output_size") is None:
            self.note("repeat_interleave without output_size")
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and here:
            masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
            filled = name != "index" and args[2].numel() == 1
            if masks and not filled:
                self.note("a mask as an index")
        elif name == "_to_copy" and wanted is not None:
            if here and wanted.type == "cpu":
                self.note("copy to the host")
            elif not here and wanted.type == "cuda" and not kwargs.get("non_blocking"):
                self.note("copy from memory that is not pinned")
        elif name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
            blocking = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            if args[1].numel() and blocking:
                self.note("copy to the host" if here and here[0] is args[1] else "copy from memory that is not pinned")

    def _collective(self, func, name, args, kwargs, leaves):
        on_host = [one for one in leaves if isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor)]
        if name == "barrier":
            self.note(name)
        elif on_host:
            raise RuntimeError(f"{name}: No backend type associated with device type cpu")
        self.collectives.append(name)
        plain_args, plain = tree_map_only(DeviceTensor, lambda one: one.held, (args, kwargs))
        out = func(*plain_args, **plain)
        given = {id(one.held): one for one in leaves if isinstance(one, DeviceTensor)}
        return tree_map_only(torch.Tensor, lambda one: given.get(id(one), one), out)


class FakeEvent:
    """An event that has passed once it is recorded."""

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def query(self):
        return True

    def synchronize(self):
        FakeGPU.current.note("synchronize an event")

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


class FakeStream:
    """A stream on which all is done when it is begun.

    Attributes:
        waited: Events that it was told to wait for.
        used: Tensors that it was told to use.
    """

    running = threading.local()

    def __init__(self, device=None):
        self.waited, self.used = [], []

    def record_event(self):
        event = FakeEvent(enable_timing=True)
        event.record()
        return event

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        FakeGPU.current.note("synchronize a stream")

    @classmethod
    def current(cls, device=None):
        if not hasattr(cls.running, "stream"):
            cls.running.stream = cls()
        return cls.running.stream

    @classmethod
    @contextmanager
    def run(cls, stream):
        before, cls.running.stream = cls.current(), stream
        yield
        cls.running.stream = before


def _launched(kernel):
    """A kernel of Triton's interpreter that takes tensors of the device."""

    class Launch:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                own, named = tree_map_only(DeviceTensor, lambda one: one.held, (args, kwargs))
                with torch.utils._python_dispatch._disable_current_modes():
                    kernel[grid](*own, **named)

            return launch

    return Launch()


@contextmanager
def fake_pipeline(monkeypatch):
    """A device that samples by Triton's interpreter, and has streams; what runs in the pipeline's thread is its too."""
    from lightning_gnnscale.loader.device_batches import DeviceBatches
    from lightning_gnnscale.sampler import on_device
    from lightning_gnnscale.sampler.device_stream import CopyStream
    from lightning_gnnscale.triton_kernels.sample_neighbors import device, device_graph

    own = device.triton_kernels()
    kernels = {name: _launched(getattr(own, name)) for name in ("look_up_kernel", "sample_rows_kernel", "read_kernel")}
    kernels |= {name: getattr(own, name) for name in ("NO_POSITION", "IN_ROW")}
    for module in (device, device_graph):
        monkeypatch.setattr(module, "triton_kernels", lambda: SimpleNamespace(**kernels))
    monkeypatch.setattr(CopyStream, "pinned", lambda self, num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(on_device, "free_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(FakeStream, "running", threading.local())
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", FakeStream.run)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream.current)
    send = DeviceBatches._all_sent

    def in_thread(self, batches):
        with gpu:
            yield from send(self, batches)

    monkeypatch.setattr(DeviceBatches, "_all_sent", in_thread)
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


class FakeAccelerator(Accelerator):
    """What the Trainer takes for the device."""

    def setup_device(self, device):
        assert device == CUDA

    def get_device_stats(self, device):
        return {}

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices):
        return [CUDA] * devices

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return "cuda"


@contextmanager
def fake_gpu(monkeypatch, world_size=1):
    """A device, and of several ranks this one: collectives leave what they are given as it is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lightning_gnnscale.triton_kernels import aggregate, edge_attention

    for operation in (aggregate, edge_attention):  # by torch: there is nothing to launch
        monkeypatch.setattr(operation.device, "_triton_kernels", lambda: None)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: FakeGPU.current.note("synchronize"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    # Lightning's barrier around prepare_data makes a group of its own
    monkeypatch.setattr(_InfiniteBarrier, "__enter__", lambda self: lambda: None)
    monkeypatch.setattr(_InfiniteBarrier, "__exit__", lambda self, *_: None)

    def gather_objects(found, own, *_, **__):
        FakeGPU.current.note("an object of each rank")
        found[:] = [own] * len(found)

    monkeypatch.setattr(dist, "all_gather_object", gather_objects)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, *_, **__: FakeGPU.current.note("an object"))
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) copies under the mode
    try:
        with FakeGPU() as gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        if world_size > 1:
            dist.destroy_process_group()
