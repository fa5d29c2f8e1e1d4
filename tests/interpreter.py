"""Triton's interpreter as a measuring instrument: bfloat16 made right, memory watched, programs run in any order.

    with watch(k=k_cache, weights=w) as memory:     every access checked, counted and compared across programs
        kernels.linear(x, w, impl="triton")
    memory.loaded["weights"]                        bytes; memory.violations, memory.conflicts, memory.launches
    with shuffled(seed):                            the programs of each launch in a random order

conftest.py imports the kernels as interpreted functions; a test's own kernels are made with @interpreted.
"""

import contextlib
import inspect
import itertools
import random
from collections import Counter, defaultdict
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton", reason="the kernels need Triton")

import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpretedFunction as interpreted  # noqa: F401
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# ----------------------------------------------------------------------------------------------------------------------
# bfloat16: the interpreter keeps it as uint16 and computes with those integers. Here: widen, compute in float32, round to
# nearest even, which is what torch does, and for + - * / what a GPU does.


def to_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> the bits of its nearest bfloat16, ties to even, NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(x))


def _is_bfloat16(x) -> bool:
    return x.dtype.scalar == tl.bfloat16


def _wide(handle: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_bits(handle.data), tl.bfloat16)


def _in_float32(method):
    """method(self, *handles, ...) on widened operands; a float32 result of bfloat16 operands becomes bfloat16 again."""

    def repaired(self, *args):
        handles = [x for x in args if isinstance(x, TensorHandle)]
        out = method(self, *(_wide(x) if isinstance(x, TensorHandle) else x for x in args))
        narrow = any(map(_is_bfloat16, handles)) and out.data.dtype == np.float32  # a comparison is not
        return _narrow(out) if narrow else out

    return repaired


def _dot(method):
    """A row's sum in the same order wherever it stands in its tile, as in a tensor core; NumPy's library has no such rule."""

    def repaired(self, a, b, accumulator, *options):
        if any(x.dtype.scalar.is_fp8() for x in (a, b)):
            return method(self, a, b, accumulator, *options)
        dtype = accumulator.data.dtype
        a, b = _wide(a).data.astype(dtype), _wide(b).data.astype(dtype)
        products = a[..., :, :, None] * b[..., None, :, :]
        return TensorHandle(products.sum(-2, dtype=dtype) + accumulator.data, accumulator.dtype.scalar)

    return repaired


def _cast(method):
    def repaired(self, source, to, *rounding):
        if tl.bfloat16 not in (source.dtype.scalar, to.scalar) or source.dtype.scalar == to.scalar:
            return method(self, source, to, *rounding)
        source = _wide(source)
        if to.scalar == tl.bfloat16:  # from integers as from floats: by way of float32
            return _narrow(source if source.dtype.scalar == tl.float32 else method(self, source, tl.float32, *rounding))
        return source if to.scalar == tl.float32 else method(self, source, to, *rounding)

    return repaired


def _cast_of_floats(method):
    """What Triton calls for float8, which has tables of its own, and between 16-bit formats, which need none."""

    def repaired(self, source, to, rounding):
        eight_bits = 8 in (source.dtype.scalar.primitive_bitwidth, to.scalar.primitive_bitwidth)
        return _cast(method)(self, source, to, rounding) if eight_bits else self.cast_impl(source, to)

    return repaired


def _over_axis(method):
    """Reductions and scans: float32 throughout, one rounding at the end."""

    def as_type(x, convert, dtype):
        type_ = tl.block_type(dtype, list(x.shape)) if x.type.is_block() else dtype
        return tl.tensor(convert(x.handle), type_)

    def repaired(self, inputs):
        narrow = [_is_bfloat16(x) for x in inputs]
        out = method(self, tuple(as_type(x, _wide, tl.float32) if b else x for x, b in zip(inputs, narrow)))
        out = out if isinstance(out, (list, tuple)) else (out,)
        return tuple(as_type(x, _narrow, tl.bfloat16) if b else x for x, b in zip(out, narrow + [False]))

    return repaired


def repair_bfloat16() -> None:
    """Repair bfloat16 and tl.dot in the interpreter of this process; a second call changes nothing."""
    if getattr(InterpreterBuilder, "repaired", False):
        return
    repairs = {"create_dot": _dot, "cast_impl": _cast, "create_fp_to_fp": _cast_of_floats}
    repairs |= dict.fromkeys(("binary_op", "unary_op", "create_clampf", "create_fma"), _in_float32)
    for name, repair in repairs.items():
        setattr(InterpreterBuilder, name, repair(getattr(InterpreterBuilder, name)))
    for operation in (triton_interpreter.ReduceOps, triton_interpreter.ScanOps):
        operation.apply_impl = _over_axis(operation.apply_impl)
    InterpreterBuilder.get_bf16 = lambda self, value: _narrow(self.get_fp32(value))  # 3.6 has none
    InterpreterBuilder.repaired = True


def patch_language_once() -> None:
    """The interpreter patches the language at each call of a @jit helper, a third of its time; once per launch will do."""
    patch, call, done = triton_interpreter._patch_lang, triton_interpreter.GridExecutor.__call__, set()

    def patch_once(function):
        if id(function.__globals__) in done:
            return None
        done.add(id(function.__globals__))
        return patch(function)

    def launch(self, *args, **kwargs):
        done.clear()
        return call(self, *args, **kwargs)

    triton_interpreter._patch_lang, triton_interpreter.GridExecutor.__call__ = patch_once, launch


# ----------------------------------------------------------------------------------------------------------------------
# Memory: what a launch may touch, what it did touch, and which program did


class Violation(NamedTuple):
    """Lanes of one access that lie outside every registered tensor; they were not carried out."""

    kernel: str
    program: tuple[int, int, int]
    kind: str  # load, store, atomic
    n_lanes: int
    near: str  # the registered tensor below the first of them, and the distance


class Conflict(NamedTuple):
    """Two programs of one launch at one address, at least one storing: their order decides the result."""

    kernel: str
    kind: str  # WW, RAW, WAR
    name: str
    offset: int  # bytes from the tensor's start, of the first such address
    programs: tuple[tuple[int, int, int], tuple[int, int, int]]  # in the order they ran


class Launch(NamedTuple):
    """Equal for two launches that a CUDA graph could replay for each other."""

    kernel: str
    grid: tuple[int, ...]
    scalars: tuple[tuple[str, object], ...]  # every argument that is no tensor, launch options included
    pointers: tuple[tuple[str, str], ...]  # argument -> registered name + offset, or #number in order of appearance


class Region(NamedTuple):
    start: int
    end: int
    name: str


def _regions(tensors: dict) -> list[Region]:
    """Each tensor's extent and, wider, its storage: the smallest one names an access, the widest ones are the bounds."""
    regions = []
    for name, x in tensors.items():
        storage = x.untyped_storage()
        if x.numel() > 0 and storage.nbytes() > 0:
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
            regions.append(Region(x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size(), name))
            regions.append(Region(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))
    return sorted(regions, key=lambda region: region.end - region.start)


def _units(addresses: np.ndarray, width: int, unit: int) -> np.ndarray:
    """Accesses of `width` bytes as addresses of units: what makes different widths comparable (they are aligned)."""
    return (addresses[:, None] + np.arange(0, width, unit, dtype=np.uint64)).ravel()


class Memory:
    """Filled by the launches inside `with watch(...)`."""

    def __init__(self, tensors):
        self.loaded, self.stored = Counter(), Counter()  # bytes per name, atomics in both
        self.violations: list[Violation] = []
        self.conflicts: list[Conflict] = []
        self.launches: list[Launch] = []
        self._tensors = tensors  # held: an address that is named must not be given to another tensor
        self._named = _regions(tensors)
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}
        self._distinct = defaultdict(lambda: np.empty(0, np.uint64))  # (name, width) -> addresses loaded

    @property
    def unique_loaded(self) -> Counter:
        """Distinct bytes loaded per name, over all launches."""
        parts = defaultdict(list)
        for (name, width), addresses in self._distinct.items():
            parts[name].append(_units(addresses, width, 1))
        return Counter({name: np.unique(np.concatenate(part)).size for name, part in parts.items()})

    def begin(self, kernel: str, grid, arguments: dict, options: dict) -> None:
        tensors = {name: x for name, x in arguments.items() if hasattr(x, "data_ptr")}
        if not self.launches:  # the caller emptied the list: a new trace, numbered anew
            self._numbers, self._count = {}, itertools.count(1)
        pointers = tuple((name, self._identity(x)) for name, x in tensors.items())
        scalars = tuple((name, x) for name, x in (arguments | options).items() if name not in tensors)
        self.launches.append(Launch(kernel, tuple(grid), scalars, pointers))
        self._kernel, self._programs, self._log = kernel, {}, defaultdict(list)
        self._regions = self._named + _regions({name: x for name, x in tensors.items() if self._owner(x) is None})

    def _owner(self, tensor) -> Region | None:
        return next((r for r in self._named if r.start <= tensor.data_ptr() < r.end), None)

    def _identity(self, tensor) -> str:
        owner, storage = self._owner(tensor), tensor.untyped_storage()
        if owner is not None:
            return f"{owner.name}+{tensor.data_ptr() - owner.start}"
        reference, number = self._numbers.get(storage.data_ptr(), (None, 0))
        if reference is None or reference.expired():  # a new tensor, perhaps at the address of one that is gone
            number = next(self._count)
            self._numbers[storage.data_ptr()] = StorageWeakRef(storage), number
        return f"#{number}+{tensor.data_ptr() - storage.data_ptr()}"

    def access(self, kind: str, pointers: TensorHandle, mask: np.ndarray | None) -> np.ndarray:
        """Account for one access; returns the mask of the lanes that may go on."""
        wanted = np.broadcast_to(True if mask is None else mask.astype(bool), pointers.data.shape)
        lanes = np.flatnonzero(wanted)
        left = pointers.data.ravel()[lanes]  # addresses not yet found in a region
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        program = triton_interpreter.interpreter_builder.grid_idx
        order = self._programs.setdefault(program, len(self._programs))
        for start, end, name in self._regions:
            inside = (left >= start) & (left <= end - width)
            if inside.any():
                found = left[inside]
                self.loaded.update({name: found.size * width} if kind != "store" else {})
                self.stored.update({name: found.size * width} if kind != "load" else {})
                self._log[name].append((kind, order, np.unique(found), width))
                left, lanes = left[~inside], lanes[~inside]
            if not left.size:
                return wanted
        below = max((r for r in self._regions if r.start <= left[0]), default=None, key=lambda r: r.start)
        near = f"{below.name} + {int(left[0]) - below.start}" if below else hex(left[0])
        self.violations.append(Violation(self._kernel, program, kind, left.size, near))
        wanted = wanted.copy()
        wanted.flat[lanes] = False
        return wanted

    def end(self) -> None:
        for name, log in self._log.items():
            loads = [(address, width) for kind, _, address, width in log if kind != "store"]
            for width in {width for _, width in loads}:
                new = [address for address, w in loads if w == width]
                self._distinct[name, width] = np.unique(np.concatenate([self._distinct[name, width], *new]))
            plain = [entry for entry in log if entry[0] != "atomic"]
            if any(kind == "store" for kind, *_ in plain):
                self._compare(name, plain)

    def _compare(self, name: str, log: list) -> None:
        """Each address that a program stored to, against the programs that came to it just before and after."""
        unit = min(width for *_, width in log)
        parts = [_units(address, width, unit) for *_, address, width in log]
        address, sizes = np.concatenate(parts), [part.size for part in parts]
        order = np.repeat([order for _, order, *_ in log], sizes)
        stored = np.repeat([kind == "store" for kind, *_ in log], sizes)
        shared = np.isin(address, address[stored])  # the others are only read
        address, order, stored = address[shared], order[shared], stored[shared]
        by_address = np.lexsort((stored, order, address))
        address, order, stored = address[by_address], order[by_address], stored[by_address]
        # of a program's accesses to an address the last counts: it is a store if any is
        last = np.append((address[1:] != address[:-1]) | (order[1:] != order[:-1]), True)
        address, order, stored = address[last], order[last], stored[last]
        clash = (address[1:] == address[:-1]) & (stored[1:] | stored[:-1])
        start, programs, seen = min(r.start for r in self._regions if r.name == name), list(self._programs), set()
        for at in np.flatnonzero(clash).tolist():
            kind = "WAR" if not stored[at] else "WW" if stored[at + 1] else "RAW"
            pair = programs[order[at]], programs[order[at + 1]]
            if (kind, pair) not in seen:
                seen.add((kind, pair))
                self.conflicts.append(Conflict(self._kernel, kind, name, int(address[at]) - start, pair))


@contextlib.contextmanager
def watch(**tensors):
    """Register tensors by name and watch every launch inside. Other tensors go by the kernel's argument names."""
    memory, builder, executor = Memory(tensors), InterpreterBuilder, triton_interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def allowed(kind, pointers, mask=None):
        return TensorHandle(memory.access(kind, pointers, None if mask is None else mask.data), tl.int1)

    def watched_load(self, pointers, mask, *rest):
        return load(self, pointers, allowed("load", pointers, mask), *rest)

    def watched_store(self, pointers, value, mask, *rest):
        return store(self, pointers, value, allowed("store", pointers, mask), *rest)

    def watched_rmw(self, operation, pointers, value, mask, *rest):
        return rmw(self, operation, pointers, value, allowed("atomic", pointers, mask), *rest)

    def watched_cas(self, pointers, compare, *rest):  # it has no mask: all lanes or none
        return cas(self, pointers, compare, *rest) if allowed("atomic", pointers).data.all() else compare

    def watched_call(self, *args, **kwargs):
        names = inspect.signature(self.fn).parameters
        arguments = inspect.getcallargs(self.fn, *args, **{k: v for k, v in kwargs.items() if k in names})
        options = {k: v for k, v in kwargs.items() if k not in names}
        memory.begin(self.fn.__name__, self.grid(arguments) if callable(self.grid) else self.grid, arguments, options)
        call(self, *args, **kwargs)
        memory.end()

    accesses = {"create_masked_load": watched_load, "create_masked_store": watched_store}
    accesses |= {"create_atomic_rmw": watched_rmw, "create_atomic_cas": watched_cas}
    with mock.patch.multiple(builder, **accesses), mock.patch.object(executor, "__call__", watched_call):
        yield memory


@contextlib.contextmanager
def shuffled(seed: int):
    """Run the programs of every launch inside in a random order."""
    chance = random.Random(seed)
    set_dim, set_index = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    order = iter(())

    def set_grid_dim(self, *grid):
        nonlocal order
        set_dim(self, *grid)
        programs = list(itertools.product(*map(range, grid)))
        chance.shuffle(programs)
        order = iter(programs)

    def set_grid_idx(self, *_):
        set_index(self, *next(order))

    with mock.patch.multiple(InterpreterBuilder, set_grid_dim=set_grid_dim, set_grid_idx=set_grid_idx):
        yield
