"""cuDNN's own answer to what a convolution takes as workspace, asked without a GPU: a script that runs in a process.

Since cuDNN 9.8 a description of a device, written as JSON, lets the library's heuristics run with no driver and no
device ("Deviceless Ahead-of-time Compilation"). A library that misses a part of itself ends the process that asks, and
one that is loaded takes some 250 MiB: so `lightning_memguard.core.kernels.cudnn` runs this file as a script of its own,
which imports nothing of the package. It is given the paths of the libraries to load, the last one cuDNN's, prints
cuDNN's version, and answers each line of its input with one line, both JSON. Numbers of attributes are those of
cudnn_graph.h, the same in cuDNN 9.8 to 9.19.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
# cudnnBackendDescriptorType_t
_CONVOLUTION, _ENGINE, _CONFIGURATION, _HEURISTICS, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 15, 17, 38
_OPERATIONS = {"forward": 10, "weight": 11, "input": 12}
# cudnnBackendAttributeType_t
_A_TYPE, _A_LONG, _A_FLOAT, _A_DOUBLE, _A_MODE, _A_DESCRIPTOR, _A_HEURISTIC, _A_CHAR = 1, 3, 4, 5, 7, 15, 8, 24
_A_NOTE = 11
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # cudnnDataType_t
_FIRST_ATTRIBUTE = {"forward": 700, "input": 706, "weight": 712}  # alpha, beta, convolution, weight, x, y
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4  # cudnnBackendNumericalNote_t
_HEURISTIC_MODES = (0, 3)  # instant, and the fallback list
_KIB = 1 << 10

# Engines that the heuristics name without a device, but only a device tells whether they run, so the list comes without
# them: they are in the messages alone. Their numbers are the same in cuDNN 9.8 to 9.26. On an H100 (cuDNN 9.19) they
# ran wherever they are named first: one for 1x1 convolutions as a tensor contraction, one for each channel apart, which
# takes no workspace. For a weight's gradient in groups they ran in four of five layers, and in channels last in four of
# four (`benchmarks/recordings/calls/`), where they add up sums of eight parts of each image, by 32 channels.
_CONTRACTIONS = {"forward": 58, "input": 63, "weight": 62}
_OF_CHANNELS = {"forward": (5,), "input": (6,), "weight": (16, 19)}
_PARTS, _CHANNELS = 8, 32
_CONTRACTION_BYTES, _ACCUMULATOR_BYTES = 400, 4  # at most three descriptors of tensors; float32
_TILE, _SMALL_TILE, _STEP, _MANY_CHANNELS = 128, 64, 64, 1024
_INFO = 3  # cudnnSeverity_t

# Multiprocessors of each graphics processing cluster (GPC), by compute capability and multiprocessors, as cuDNN 9.19
# measured them on one H100. They are that chip's: others of its kind have other clusters switched off.
_CLUSTERS = {((9, 0), 132): (18, 18, 16, 16, 16, 16, 16, 8, 2, 2, 2, 2)}
_MOST_CLUSTERS, _GREATEST_CLUSTER = 24, 18

# By compute capability: multiprocessors, shared memory a block can opt in to (KiB), blocks and threads of a
# multiprocessor, memory (GiB), level-2 cache (MiB). Of these only the compute capability was seen to move a choice; on
# Hopper, the memory's clock does, too.
_DEVICES = {
    (7, 5): (72, 64, 16, 1024, 24, 6),
    (8, 0): (108, 163, 32, 2048, 40, 40),
    (8, 6): (82, 99, 16, 1536, 24, 6),
    (8, 9): (128, 99, 24, 1536, 24, 72),
    (9, 0): (132, 227, 32, 2048, 80, 50),
    (10, 0): (148, 227, 32, 2048, 180, 126),
    (12, 0): (170, 99, 24, 1536, 32, 96),
}
_MEMORY_KHZ = 2_619_000  # of the H100 whose workspaces were recorded; with the H200's the answers are the same
_SLOWER_MEMORY_KHZ = {114: 1_593_000}  # by multiprocessors: the H100 PCIe


class _CudnnError(Exception):
    """Status of a function of cuDNN, other than success."""


class _Descriptor:
    """One of cuDNN's descriptors, destroyed with the object."""

    library: Any

    def __init__(self, kind: int) -> None:
        self.pointer = _POINTER()
        self._kept: list[object] = []
        _check(self.library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        self.library.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, attribute: int, kind: int, values: ctypes.Array[Any]) -> _Descriptor:
        self._kept.append(values)
        array = ctypes.cast(values, _POINTER)
        _check(self.library.cudnnBackendSetAttribute(self.pointer, attribute, kind, len(values), array))
        return self

    def numbers(self, attribute: int, *values: int) -> _Descriptor:
        return self.set(attribute, _A_LONG, (_LONG * len(values))(*values))

    def choice(self, attribute: int, kind: int, value: int) -> _Descriptor:
        return self.set(attribute, kind, (ctypes.c_int * 1)(value))

    def descriptor(self, attribute: int, value: _Descriptor) -> _Descriptor:
        self._kept.append(value)
        return self.set(attribute, _A_DESCRIPTOR, (_POINTER * 1)(value.pointer))

    def done(self) -> _Descriptor:
        _check(self.library.cudnnBackendFinalize(self.pointer))
        return self

    def read(self, attribute: int, kind: int, into: ctypes.Array[Any] | None) -> int:
        """Read an attribute into an array; the number of its values."""
        count = _LONG(0)
        wanted, array = (0, None) if into is None else (len(into), ctypes.cast(into, _POINTER))
        ask = self.library.cudnnBackendGetAttribute
        _check(ask(self.pointer, attribute, kind, wanted, ctypes.byref(count), array))
        return count.value


def _check(status: int) -> None:
    if status:
        raise _CudnnError(_Descriptor.library.cudnnGetErrorString(status).decode())


_devices: dict[tuple[tuple[int, int], int], _Descriptor] = {}


def _device(capability: tuple[int, int], multiprocessors: int) -> _Descriptor:
    key = capability, multiprocessors
    if key not in _devices:
        text = json.dumps(_properties(capability, multiprocessors)).encode()
        chars = ctypes.create_string_buffer(text, len(text))
        _devices[key] = _Descriptor(_DEVICE).set(2702, _A_CHAR, chars).done()
        if capability == (9, 0):
            _set_clusters(_devices[key], _CLUSTERS.get(key, ()))
    return _devices[key]


def _set_clusters(device: _Descriptor, clusters: Sequence[int]) -> None:
    """Write into the descriptor what its JSON has no name for: the sizes of the GPCs, or that they are unknown.

    They say how many groups of thread blocks run at once, and with that what is left over for the last ones to share
    (stream-K), by a workspace. On a device cuDNN measures them; made from JSON, a description has a single GPC of 18
    multiprocessors. If that is not found there, nothing is written.
    """
    blank = [_GREATEST_CLUSTER] + [0] * (_MOST_CLUSTERS - 1)
    assert device.pointer.value is not None
    numbers = (ctypes.c_int * 128).from_address(device.pointer.value)  # of an object of some 560 bytes
    for place in range(len(numbers) - _MOST_CLUSTERS):
        if numbers[place : place + _MOST_CLUSTERS] == blank:
            numbers[place : place + _MOST_CLUSTERS] = [*clusters, *[0] * (_MOST_CLUSTERS - len(clusters))]
            return


def _like(capability: tuple[int, int]) -> tuple[int, ...]:
    return _DEVICES[max((known for known in _DEVICES if known <= capability), default=(7, 5))]


def _multiprocessors(capability: tuple[int, int], known: int) -> int:
    return known or _like(capability)[0]


def _properties(capability: tuple[int, int], multiprocessors: int) -> dict[str, object]:
    _, shared, blocks, threads, memory, cache = _like(capability)
    return {
        "deviceVer": capability[0] * 100 + capability[1] * 10,
        "multiProcessorCount": _multiprocessors(capability, multiprocessors),
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 48 * _KIB,
        "maxSharedMemoryPerBlockOptin": shared * _KIB,
        "reservedSharedMemoryPerBlock": 0 if capability < (8, 0) else _KIB,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": blocks,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "regsPerBlock": 65536,
        "totalGlobalMem": memory << 30,
        "smClockRateKHz": 1_700_000,
        "l2CacheSize": cache << 20,
        "maxBlockSize": [1024, 1024, 64],
        "memClockRateKHz": _SLOWER_MEMORY_KHZ.get(multiprocessors, _MEMORY_KHZ),
        "maxGridSize": [2_147_483_647, 65535, 65535],
        "supportCoopLaunch": 1,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "cudaDeviceId": 0,
        "driverVer": 13000,
        "deviceName": "GPU",
    }


def _strides(shape: Sequence[int], *, channels_last: bool) -> list[int]:
    order = [*range(len(shape) - 1, -1, -1)]
    if channels_last:
        order = [1, *range(len(shape) - 1, 1, -1), 0]
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return strides


def _tensor(name: str, shape: Sequence[int], kind: str, *, channels_last: bool) -> _Descriptor:
    tensor = _Descriptor(_TENSOR).choice(901, _A_TYPE, _TYPES[kind])
    tensor.numbers(902, *shape).numbers(903, *_strides(shape, channels_last=channels_last))
    return tensor.numbers(906, ord(name)).numbers(900, 16).done()


def _graph(asked: dict[str, Any]) -> _Descriptor:
    """The graph of one operation, as `build_opgraph` in aten/src/ATen/native/cudnn/Conv_v8.cpp builds it."""
    kind, double = asked["kind"], asked["kind"] == "float64"
    convolution = _Descriptor(_CONVOLUTION).choice(100, _A_TYPE, _TYPES["float64" if double else "float32"])
    convolution.choice(101, _A_MODE, 1).numbers(102, *asked["dilation"]).numbers(103, *asked["stride"])
    padding = asked["padding"]
    convolution.numbers(104, *padding).numbers(105, *padding).numbers(106, len(padding)).done()
    first = _FIRST_ATTRIBUTE[asked["operation"]]
    number, of = (ctypes.c_double, _A_DOUBLE) if double else (ctypes.c_float, _A_FLOAT)
    operation = _Descriptor(_OPERATIONS[asked["operation"]])
    operation.set(first, of, (number * 1)(1.0)).set(first + 1, of, (number * 1)(0.0)).descriptor(first + 2, convolution)
    for place, name in enumerate(("weight", "x", "y"), 3):
        tensor = _tensor(name[0], asked[name], kind, channels_last=asked["channels_last"])
        operation.descriptor(first + place, tensor)
    return _Descriptor(_GRAPH).descriptor(801, operation.done()).done()


def _heuristics(graph: _Descriptor, device: _Descriptor, mode: int) -> _Descriptor:
    heuristics = _Descriptor(_HEURISTICS).descriptor(201, graph).choice(200, _A_HEURISTIC, mode)
    return heuristics.descriptor(204, device).done()


def _configurations(graph: _Descriptor, device: _Descriptor) -> Iterator[_Descriptor]:
    """Yield the configurations that cuDNN would try, in its order, a few at a time: reading many takes milliseconds."""
    for mode in _HEURISTIC_MODES:
        heuristics = _heuristics(graph, device, mode)
        total, known, wanted = heuristics.read(202, _A_DESCRIPTOR, None), 0, 4
        while known < total:
            some = [_Descriptor(_CONFIGURATION) for _ in range(min(wanted, total))]
            found = heuristics.read(202, _A_DESCRIPTOR, (_POINTER * len(some))(*(one.pointer for one in some)))
            yield from some[known : min(found, len(some))]
            if len(some) == total or found < len(some):
                break
            known, wanted = len(some), 4 * wanted


def _notes(configuration: _Descriptor) -> set[int]:
    engine = _Descriptor(_ENGINE)
    configuration.read(300, _A_DESCRIPTOR, (_POINTER * 1)(engine.pointer))
    notes = (ctypes.c_int * 16)()
    return set(notes[: engine.read(1303, _A_NOTE, notes)])


def _workspace(configuration: _Descriptor) -> int:
    nbytes = (_LONG * 1)()
    configuration.read(303, _A_LONG, nbytes)
    return nbytes[0]


_heard: list[bytes] = []


def _listen(_severity: int, _data: int, _origin: int, message: int) -> None:
    """Keep a message of cuDNN: lines that each end with a zero byte, and an empty one."""
    while line := ctypes.string_at(message):
        _heard.append(line)
        message += len(line) + 1


_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, _POINTER, _POINTER, _POINTER)(_listen)


def _named_first(graph: _Descriptor, device: _Descriptor, *engines: int) -> bool:
    """Whether one of these engines is named before all configurations that can be checked."""
    library, first = _Descriptor.library, _Descriptor(_CONFIGURATION)
    heuristics = _heuristics(graph, device, _HEURISTIC_MODES[0])
    _heard.clear()
    library.cudnnSetCallback(1 << _INFO, None, _LISTENER)
    try:
        heuristics.read(202, _A_DESCRIPTOR, (_POINTER * 1)(first.pointer))
    finally:
        library.cudnnSetCallback(0, None, _LISTENER)
    return any(b'"engineId":%d,' % engine in line for engine in engines for line in _heard)


def _unlisted(asked: dict[str, Any], graph: _Descriptor, device: _Descriptor) -> list[int]:
    """The workspace of an engine that is not in the list, if it is the first one; else none."""
    operation, on_tensor_cores = asked["operation"], asked["kind"] != "float32" or asked["tf32"]
    if asked["weight"][1] < asked["x"][1]:
        takes_groups = operation == "weight" or asked["weight"][1] == 1
        is_first = takes_groups and _named_first(graph, device, *_OF_CHANNELS[operation])
        return [_partial_sums(asked) if operation == "weight" else 0] if is_first else []
    if math.prod(asked["weight"][2:]) > 1 or not (on_tensor_cores or tuple(asked["capability"]) < (8, 0)):
        return []
    if not _named_first(graph, device, _CONTRACTIONS[operation]):
        return []
    return [_CONTRACTION_BYTES + _accumulators(asked) * _ACCUMULATOR_BYTES]


def _partial_sums(asked: dict[str, Any]) -> int:
    """Bytes of the sums that the gradient of a grouped weight keeps apart."""
    out, *window = asked["weight"]
    channels = -(-out // _CHANNELS) * _CHANNELS if asked["channels_last"] else 0
    sums: int = asked["x"][0] * _PARTS * channels * math.prod(window)
    return sums * _ACCUMULATOR_BYTES


def _accumulators(asked: dict[str, Any]) -> int:
    """Sums that a contraction keeps apart: the weight's gradients of all images; with channels last, parts of them.

    With channels last, pixels of all images are one dimension. A gradient is divided along it, such that its tiles fill
    the multiprocessors: twice in float32. A product over many channels is divided in two where its last tiles fill them
    in part. That is what 18 shapes took in float32 on an H100; five in float16 took up to a third more or less.
    """
    operation, (out, channels) = asked["operation"], asked["weight"][:2]
    single = asked["kind"] == "float32"
    pixels = asked["y"][0] * math.prod(asked["y"][2:])
    multiprocessors = _multiprocessors(tuple(asked["capability"]), asked["multiprocessors"])
    if not asked["channels_last"]:
        return asked["x"][0] * out * channels if operation == "weight" else 0
    if operation == "weight":
        sides = [(side, _TILE if side >= _TILE else _SMALL_TILE) for side in (out, channels)]
        tiles = math.prod(-(-side // tile) for side, tile in sides)
        parts = min(multiprocessors * (2 if single else 1) // tiles, -(-pixels // _STEP))
        return parts * tiles * math.prod(tile for _, tile in sides) if parts > 1 else 0
    if operation == "forward" and single and channels >= _MANY_CHANNELS:
        tiles = -(-pixels // _TILE) * -(-out // _TILE)
        return 2 * (tiles % multiprocessors) * _TILE**2 if tiles > multiprocessors else 0
    return 0


def workspaces(asked: dict[str, Any]) -> list[int]:
    """Workspaces of the plans that PyTorch would try, in its order, until a small one (see ``enough_bytes``)."""
    refused = {_DOWN_CONVERT}  # `filterEngineConfigs` in Conv_v8.cpp
    if asked["deterministic"]:
        refused.add(_NONDETERMINISTIC)
    if asked["kind"] == "float32" and not asked["tf32"]:
        refused.add(_TENSOR_CORE)
    graph, device = _graph(asked), _device(tuple(asked["capability"]), asked["multiprocessors"])
    found = _unlisted(asked, graph, device)
    for configuration in _configurations(graph, device):
        try:
            if refused & _notes(configuration):
                continue
            found.append(_workspace(configuration))
        except _CudnnError:
            continue
        if len(found) >= asked["least"] and found[-1] <= asked["enough_bytes"]:
            break
    return found


def _load(paths: Sequence[str]) -> Any:
    for path in paths[:-1]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(paths[-1], mode=ctypes.RTLD_GLOBAL)
    number, pointers = ctypes.c_int, ctypes.POINTER(_POINTER)
    library.cudnnGetVersion.restype = ctypes.c_size_t
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    library.cudnnSetCallback.argtypes = [ctypes.c_uint, _POINTER, type(_LISTENER)]
    library.cudnnBackendCreateDescriptor.argtypes = [number, pointers]
    library.cudnnBackendDestroyDescriptor.argtypes = [_POINTER]
    library.cudnnBackendFinalize.argtypes = [_POINTER]
    library.cudnnBackendSetAttribute.argtypes = [_POINTER, number, number, _LONG, _POINTER]
    library.cudnnBackendGetAttribute.argtypes = [_POINTER, number, number, _LONG, ctypes.POINTER(_LONG), _POINTER]
    return library


def main() -> None:
    """Answer every line of the standard input; an answer is empty if cuDNN refuses."""
    _Descriptor.library = _load(sys.argv[1:])
    out = sys.stdout
    out.write(f"{_Descriptor.library.cudnnGetVersion()}\n")
    out.flush()
    for line in sys.stdin:
        try:
            answer = workspaces(json.loads(line))
        except _CudnnError:
            answer = []
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
