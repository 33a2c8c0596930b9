"""Watches every memory access of interpreted kernels: bounds, races, double writes, bytes.

    with Tracer() as trace:
        launcher(tensors)
    trace.launches  # what each launch loaded and stored, per argument

Programs of a launch may run in any order and interleave on a GPU. So within one launch an element
that one program writes must not be read or written by another (even an equal value), and no element
may be written twice. `order` runs the programs in a permuted order, `interleave` lets a random
other program go on before each access: results must not change.
"""

import dataclasses
import inspect
import random
import threading
from collections import Counter

import numpy as np
import torch
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    _implicit_cvt,
    _patch_lang,
    interpreter_builder,
)

NOBODY, MANY = -1, -2
_PATCHED = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


class MemoryFault(AssertionError):
    """An access that would be wrong on a GPU."""


@dataclasses.dataclass
class Launch:
    """One kernel launch: bytes loaded and stored by argument name."""

    name: str
    grid: tuple[int, ...]
    loaded: Counter = dataclasses.field(default_factory=Counter)
    stored: Counter = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class _Region:
    name: str
    start: int
    end: int
    storage: int


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Tracer:
    """Context manager; see the module's text. `shadow=False` checks bounds only (huge tensors)."""

    def __init__(self, *, order=None, interleave=None, shadow=True, only_last=None):
        self.launches: list[Launch] = []
        self.order, self.interleave, self.shadow = order, interleave, shadow
        self.only_last = only_last
        self._extra: list[tuple[str, torch.Tensor]] = []
        self._random = random.Random(interleave if order is None else order)
        self._hand_over = None

    def register(self, name: str, tensor: torch.Tensor) -> None:
        """Allow access to a tensor that a kernel reaches through a table of addresses."""
        self._extra.append((name, tensor))

    def moved(self, *names: str) -> int:
        """Bytes loaded and stored over all launches (by the named arguments, or by all)."""
        total = 0
        for launch in self.launches:
            for counter in (launch.loaded, launch.stored):
                total += sum(n for name, n in counter.items() if not names or name in names)
        return total

    def __enter__(self):
        self._plain = {name: getattr(InterpreterBuilder, name) for name in _PATCHED}
        self._plain_call = GridExecutor.__call__
        tracer = self

        def load(builder, ptrs, mask, *rest, **kwargs):
            tracer._turn()
            tracer._see(ptrs, mask.data, "load")
            return tracer._plain["create_masked_load"](builder, ptrs, mask, *rest, **kwargs)

        def store(builder, ptrs, value, mask, *rest, **kwargs):
            tracer._turn()
            tracer._see(ptrs, mask.data, "store")
            return tracer._plain["create_masked_store"](builder, ptrs, value, mask, *rest, **kwargs)

        def atomic(*args, **kwargs):
            raise MemoryFault("an atomic operation: its order, so its rounding, is not fixed")

        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
        InterpreterBuilder.create_atomic_rmw = atomic
        InterpreterBuilder.create_atomic_cas = atomic
        GridExecutor.__call__ = lambda executor, *a, **k: tracer._launch(executor, a, k)
        return self

    def __exit__(self, *exc):
        for name, function in self._plain.items():
            setattr(InterpreterBuilder, name, function)
        GridExecutor.__call__ = self._plain_call

    def _launch(self, executor, args, kwargs):
        names = inspect.getfullargspec(executor.fn).args
        kwargs = {k: v for k, v in kwargs.items() if k in names}
        bound = inspect.getcallargs(executor.fn, *args, **kwargs)
        tensors = [
            (name, tensor)
            for name, value in bound.items()
            for tensor in (value if isinstance(value, tuple) else (value,))
            if isinstance(tensor, torch.Tensor)
        ]
        self._map(tensors + self._extra)
        scope = _patch_lang(executor.fn)
        try:
            values = {
                k: v if k in executor.constexprs else _implicit_cvt(v) for k, v in bound.items()
            }
            grid = executor.grid(values) if callable(executor.grid) else executor.grid
            grid = tuple(grid) + (1,) * (3 - len(grid))
            self.launches.append(Launch(executor.fn.__name__, grid))
            interpreter_builder.set_grid_dim(*grid)
            self._run(executor.fn, values, grid)
        finally:
            if scope is not None:
                scope.restore()

    def _programs(self, grid):
        if self.only_last is not None:
            x, y, z = grid
            count = x * y * z
            picked = range(max(0, count - self.only_last), count)
            return [(i // (y * z), i // z % y, i % z) for i in picked]
        programs = [
            (x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])
        ]
        if self.order is not None or self.interleave is not None:
            self._random.shuffle(programs)
        return programs

    def _run(self, function, values, grid):
        programs = self._programs(grid)
        self._index = {p: i for i, p in enumerate(sorted(programs))}
        if self.interleave is None:
            for program in programs:
                interpreter_builder.set_grid_idx(*program)
                function(**values)
            return
        for first in range(0, len(programs), 6):
            _Interleaved(self, function, values, programs[first : first + 6]).run()

    def _turn(self):
        if self._hand_over is not None:
            self._hand_over()

    def _map(self, tensors):
        self._regions, self._shadows = [], {}
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            start = tensor.data_ptr()
            region = _Region(name, start, start + _span(tensor), storage.data_ptr())
            self._regions.append(region)
            if self.shadow and region.storage not in self._shadows:
                cells = max(1, storage.nbytes() // tensor.element_size())
                shadow = np.full((2, cells), NOBODY, dtype=np.int32)
                self._shadows[region.storage] = (tensor.element_size(), shadow)
        self._regions.sort(key=lambda region: (region.start, region.end))
        self._starts = np.array([region.start for region in self._regions], dtype=np.uint64)

    def _see(self, ptrs, mask, kind):
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.shape))
        addresses = addresses[np.broadcast_to(mask, addresses.shape)]
        if not addresses.size:
            return
        unique = np.unique(addresses)
        if kind == "store" and unique.size != addresses.size:
            raise MemoryFault(f"{self.launches[-1].name}: two lanes store to one element")
        owner = np.searchsorted(self._starts, unique, side="right") - 1
        for index in np.unique(owner):
            region = self._regions[index] if index >= 0 else None
            inside = unique[owner == index]
            if region is None or int(inside[-1]) + size > region.end:
                near = region.name if region else "any argument"
                raise MemoryFault(f"{self.launches[-1].name}: {kind} out of bounds of {near}")
            counter = self.launches[-1].loaded if kind == "load" else self.launches[-1].stored
            counter[region.name] += inside.size * size
            if self.shadow:
                self._mark(region, inside, kind)

    def _mark(self, region, addresses, kind):
        me = self._index[interpreter_builder.grid_idx]
        size, (writer, reader) = self._shadows[region.storage]
        cells = ((addresses - np.uint64(region.storage)) // np.uint64(size)).astype(np.int64)
        last_writer, last_reader = writer[cells], reader[cells]
        where = f"{self.launches[-1].name}: {region.name}"
        if np.any((last_writer != NOBODY) & (last_writer != me)):
            raise MemoryFault(f"{where}: a {kind} races with another program's store")
        if kind == "load":
            reader[cells] = np.where((last_reader == NOBODY) | (last_reader == me), me, MANY)
            return
        if np.any(last_writer == me):
            raise MemoryFault(f"{where}: an element is stored twice")
        if np.any((last_reader != NOBODY) & (last_reader != me)):
            raise MemoryFault(f"{where}: a store races with another program's load")
        writer[cells] = me


class _Interleaved:
    """Runs a few programs as threads of which one at a time goes on, changed at each access."""

    def __init__(self, tracer, function, values, programs):
        self.tracer, self.function, self.values, self.programs = tracer, function, values, programs
        self.locks = [threading.Semaphore(0) for _ in programs]
        self.alive = list(range(len(programs)))
        self.current, self.error = 0, None
        self.done = threading.Semaphore(0)

    def run(self):
        threads = [threading.Thread(target=self._body, args=(i,)) for i in self.alive]
        self.tracer._hand_over = self._pass_on
        try:
            for thread in threads:
                thread.start()
            self._resume(self.tracer._random.choice(self.alive))
            self.done.acquire()
            for thread in threads:
                thread.join()
        finally:
            self.tracer._hand_over = None
        if self.error is not None:
            raise self.error

    def _resume(self, index):
        self.current = index
        interpreter_builder.set_grid_idx(*self.programs[index])
        self.locks[index].release()

    def _pass_on(self):
        me = self.current
        chosen = self.tracer._random.choice(self.alive)
        if chosen != me:
            self._resume(chosen)
            self.locks[me].acquire()

    def _body(self, index):
        self.locks[index].acquire()
        try:
            if self.error is None:
                self.function(**self.values)
        except BaseException as error:
            self.error = self.error or error
        self.alive.remove(index)
        if self.alive:
            self._resume(self.tracer._random.choice(self.alive))
        else:
            self.done.release()
