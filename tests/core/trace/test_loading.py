"""Weights that are quantized while they are loaded leave free blocks behind; a trace begins with that."""

from dataclasses import replace

from lightning_memguard.core.trace.loading import Weight, with_loading
from lightning_memguard.core.trace.trace import Event, ScratchSpan, Trace

# An embedding that is cast to 32 bits, a weight of 4 bits with scales and a table, an adapter, and one operator.
WEIGHTS = [Weight("embed.weight", 2000), Weight("layer.weight", 8000, 4), Weight("", 64)]
PARAMETERS = [Event("alloc", at, size, "parameters", "setup") for at, size in enumerate((4000, 2000, 64, 500, 64))]
STEP = Event("alloc", 9, 1, "workspaces")
TRACE = Trace(
    1,
    "cuda",
    "fake",
    (*PARAMETERS, STEP, STEP._replace(action="free")),
    scratch_spans=(ScratchSpan(5, 7, 0, None, STEP),),
    held_at=5,
)


def outline(trace: Trace) -> list[tuple[int, int]]:
    """By block, its bytes; below zero where it is freed."""
    return [(event.block, event.change) for event in trace if event.phase == "setup"]


def test_a_weight_is_in_16_bits_until_it_is_quantized() -> None:
    warm_up, embedding, layer, other = 10, 11, 12, 14
    assert outline(with_loading(TRACE, WEIGHTS, 0)) == [
        *((warm_up, 4000), (warm_up, -4000)),
        (embedding, 2000),
        *((layer, 8000), (other, 0), (1, 2000), (3, 500), (4, 64), (other, 0), (layer, -8000)),
        *((0, 4000), (embedding, -2000)),
        (2, 64),
    ]


def test_threads_move_the_next_weights_meanwhile() -> None:
    weights = [WEIGHTS[1]._replace(name=name) for name in ("2", "10", "9", "x")]
    events = [PARAMETERS[1]._replace(block=at) for at in range(8)]
    moved = with_loading(replace(TRACE, events=tuple(events)), weights, 2)
    order = [(block - 8, size > 0) for block, size in outline(moved) if abs(size) == 8000 and block > 8]
    assert order == [(1, True), (3, True), (2, True), (4, True), (1, False), (3, False), (2, False), (4, False)]


def test_what_follows_is_as_it_was() -> None:
    loading = with_loading(TRACE, WEIGHTS, 0)
    more = len(loading) - len(TRACE)
    assert loading.events[-2:] == TRACE.events[-2:]
    assert loading.held_at == TRACE.held_at + more
    assert loading.scratch_spans == (ScratchSpan(5 + more, 7 + more, 0, None, STEP),)


def test_a_trace_of_other_parameters_stays() -> None:
    for trace in (replace(TRACE, device="cpu"), replace(TRACE, events=TRACE.events[:3])):
        assert with_loading(trace, WEIGHTS, 0) is trace
    assert with_loading(TRACE, [WEIGHTS[0], WEIGHTS[0], *WEIGHTS[1:], WEIGHTS[1]], 0) is TRACE


def test_8_bit_weights_are_in_16_bits_twice() -> None:
    trace = replace(TRACE, events=(PARAMETERS[1], PARAMETERS[2]))
    loading = with_loading(trace, [Weight("layer.weight", 4000, 8)], 0)
    assert [size for _, size in outline(loading)] == [2000, -2000, 4000, 4000, 2000, 64, -4000, -4000]
