"""Scratch of CUDA kernels: each rule against a case worked by hand from PyTorch's source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.kernels import cudnn, sorting, table
from lightning_memguard.core.kernels.arguments import Call
from lightning_memguard.core.range import Range
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.trace.scratch import NONE, CudaTarget, Plans, Scratch

pytestmark = pytest.mark.exact

H200 = CudaTarget((9, 0), 132)
T4 = CudaTarget((7, 5), 40)

CHANNELS_LAST = torch.channels_last


def tensor(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta", **options)


def longs(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.long)


def half(*shape: int, **options: Any) -> torch.Tensor:
    return tensor(*shape, dtype=torch.bfloat16, **options)


def rule(name: str, args: Any, results: Any, kernel_target: CudaTarget = H200, **kwargs: Any) -> Scratch:
    known = table.rule(name, kernel_target)
    assert known is not None
    arguments = by_name(overload(name, args, kwargs), args, kwargs)
    return known(Call(arguments, results if isinstance(results, list) else [results], kernel_target))


def overload(name: str, args: Any, kwargs: Any) -> Any:
    """The overload of an operator that torch calls with such arguments; the first where some are missing."""
    packet = getattr(torch.ops.aten, name)
    try:
        return getattr(packet, torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs))
    except RuntimeError:
        return getattr(packet, packet.overloads()[0])


def blocks(scratch: Scratch) -> list[Any]:
    return [block for moment in scratch.after for block in (moment if isinstance(moment, tuple) else (moment,))]


# -- what CUB was asked for, compute capability by compute capability


@pytest.mark.parametrize(
    ("capability", "key", "value", "count", "nbytes"),
    [
        ((7, 5), 8, 8, 3073, 68_607),
        ((7, 5), 4, 8, 1_000_000, 12_373_247),
        ((8, 0), 8, 8, 16_384, 284_159),
        ((8, 6), 8, 8, 16_384, 284_159),
        ((8, 0), 4, 0, 1_000_000, 4_136_703),
        ((9, 0), 8, 8, 1000, 1),
        ((9, 0), 8, 8, 3073, 67_583),
        ((9, 0), 8, 8, 1_000_000, 16_240_127),
        ((9, 0), 8, 0, 1_000_000, 8_195_071),
        ((9, 0), 4, 8, 10_000_000, 121_914_367),
        ((9, 0), 2, 8, 1_000_000, 10_187_007),
        ((12, 0), 8, 8, 1_000_000, 16_240_127),
    ],
)
def test_radix_sort_takes_what_cub_says(capability, key, value, count, nbytes):
    assert sorting.radix_sort(count, key, value, CudaTarget(capability, 132)) == nbytes


def test_one_pass_of_radix_sort_needs_no_second_buffers():
    assert sorting.radix_sort(1_000_000, 8, 8, H200, bits=8) == 225_791


def test_short_keys_on_older_gpus_are_sorted_within_bounds():
    low, point, high = sorting.radix_sort(1_000_000, 2, 8, CudaTarget((8, 0), 132))
    assert low < point < high
    assert low < 12_748_799 < high  # CUB's answer where four blocks fit on a multiprocessor


@pytest.mark.parametrize(
    ("itemsize", "count", "nbytes"),
    [(4, 1, 1023), (4, 1_000_000, 5119), (8, 1_000_000, 18_943), (2, 1_000_000, 1791), (8, 0, 0)],
)
def test_scan_takes_what_cub_says(itemsize, count, nbytes):
    assert sorting.scan(count, itemsize) == nbytes


# -- reductions


def test_sum_over_rows_keeps_a_block_of_threads_for_each_partial_result():
    # 4 columns a thread, 16 threads wide and 8 high; 512 rows each, so 32 blocks share: 64 x 32 x 16 x 4 floats
    assert rule("sum", (tensor(4096, 64), [0], True), tensor(1, 64)).after == ((524_288, 4),)


def test_sum_of_a_bias_gradient_takes_over_a_hundred_megabytes_on_a_large_gpu():
    # 32 x 4 threads of 4 columns; 6 blocks side by side, 2112 wanted, so 352 share: 768 x 352 x 32 x 4 floats
    assert rule("sum", (tensor(32_768, 768), [0], True), tensor(1, 768)).after == ((138_412_032, 24),)


def test_sum_of_everything_keeps_one_number_a_block():
    # 512 threads, 1,048,576 / 512 = 2048 numbers each; 528 blocks wanted, 128 have 16 numbers a thread
    assert rule("sum", (tensor(1024, 1024),), tensor()).after == ((512, 4),)


def test_sum_along_rows_is_done_by_one_block_each():
    assert rule("sum", (tensor(4096, 64), [1]), tensor(4096)) == NONE


def test_gpus_with_fewer_multiprocessors_take_less():
    few = rule("sum", (tensor(32_768, 768), [0], True), tensor(1, 768), kernel_target=T4).after
    # 1024 / 128 x 40 = 320 blocks wanted over 6: 54 share
    assert few == ((768 * 54 * 128 * 4, 24),)


def test_order_of_dimensions_does_not_matter_to_a_reduction_but_strides_do():
    images = tensor(64, 32, 64, 64)
    contiguous = rule("sum", (images, [0, 2, 3]), tensor(32)).after
    last = rule("sum", (images.to(memory_format=CHANNELS_LAST), [0, 2, 3]), tensor(32)).after
    assert contiguous[0][0] < 1 << 20 < last[0][0]


def test_counting_a_mask_makes_it_long_first():
    assert blocks(rule("sum", (tensor(100, dtype=torch.bool),), longs())) == [800]


def test_half_precision_is_summed_into_float_without_a_copy():
    assert rule("sum", (half(10, 10), [1]), tensor(10), dtype=torch.float32) == NONE


def test_a_sum_in_another_type_copies_first():
    assert blocks(rule("sum", (tensor(10, 10), [1]), tensor(10, dtype=torch.double), dtype=torch.double)) == [800]


def test_norms_have_their_dimensions_in_third_place():
    assert rule("linalg_vector_norm", (tensor(4096, 64), 2, [0]), tensor(64)).after == ((524_288, 4),)
    assert rule("linalg_vector_norm", (tensor(4096, 64), 2, [1]), tensor(4096)) == NONE


def test_variance_carries_four_numbers_a_partial_result():
    summed = rule("sum", (tensor(4096, 64), [0]), tensor(64)).after[0][0]
    assert rule("var", (tensor(4096, 64), [0]), tensor(64)).after[0][0] == 4 * summed


def test_a_maximum_with_its_place_carries_sixteen_bytes():
    summed = rule("sum", (tensor(4096, 64), [0]), tensor(64)).after[0][0]
    assert rule("amax", (tensor(4096, 64), [0]), tensor(64)).after[0][0] == summed
    assert rule("max", (tensor(4096, 64), 0), [tensor(64), longs(64)]).after[0][0] == 4 * summed
    assert rule("argmax", (tensor(4096, 64), 0), longs(64)).after[0][0] == 4 * summed


def test_the_larger_of_two_tensors_is_no_reduction():
    assert rule("max", (tensor(4096, 64), tensor(4096, 64)), tensor(4096, 64)) == NONE


def test_inputs_past_two_gigabytes_are_reduced_in_halves():
    whole = rule("sum", (half(1 << 16, 1 << 15), [0]), half(1 << 15)).after
    assert whole[0][0] == 4 << 15  # a place to add up in, since bfloat16 is none


def test_logsumexp_shifts_the_input_by_its_maxima():
    assert rule("logsumexp", (tensor(8, 100), [1]), tensor(8)).after == ((32,), (32, 32, 8), (32, 3200))


def test_count_nonzero_compares_and_counts():
    assert rule("count_nonzero", (tensor(4, 5),), longs()).after == ((20, 160),)


# -- embeddings and indexing


def test_few_embedded_tokens_take_only_copies():
    args = (tensor(4, 10, 8), longs(4, 10), 50, -1, False)
    assert rule("embedding_dense_backward", args, tensor(50, 8)) == NONE
    turned = (tensor(10, 4, 8).transpose(0, 1), *args[1:])
    assert blocks(rule("embedding_dense_backward", turned, tensor(50, 8))) == [1280]


def test_many_embedded_tokens_are_sorted_and_summed_in_pieces():
    scratch = rule("embedding_dense_backward", (tensor(10_000, 64), longs(10_000), 50, -1, False), tensor(50, 64))
    places = 80_000
    assert scratch.before == ((places, places, places, sorting.radix_sort(10_000, 8, 8, H200)),)
    # sorted and old indices, where segments start, their number, their pieces (twice), the pieces' number and starts
    pieces = 10_000 // 10 + 50
    assert scratch.after[-1] == (places, places, places, 8, 400, 400, 8, pieces * 8, pieces * 64 * 4)


def test_pieces_of_half_precision_are_summed_in_float():
    scratch = rule("embedding_dense_backward", (half(10_000, 64), longs(10_000), 50, -1, False), half(50, 64))
    assert scratch.after[-1][-1] == 1050 * 64 * 4


def test_bags_are_sorted_too_but_not_for_the_maximum():
    args = [tensor(10, 64), longs(5000), longs(5000), longs(10), longs(10), 50, False, 0, None]
    assert rule("_embedding_bag_dense_backward", args, tensor(50, 64)).before
    args[7] = 2
    assert rule("_embedding_bag_dense_backward", args, tensor(50, 64)) == NONE


def test_gradients_of_indexing_are_added_by_sorting():
    x = tensor(1000, 16)
    scratch = rule("index_put", (x, [longs(5000)], tensor(5000, 16), True), x)
    join, sort = scratch.after
    assert join == (40_000, 40_000)
    # ten bits name one of 1000 rows, so two passes
    assert sort == (40_000, 40_000, 40_000, 40_000, sorting.radix_sort(5000, 8, 8, H200, bits=10))


def test_values_are_expanded_before_they_are_put():
    x = tensor(1000, 16)
    scratch = rule("index_put", (x, [longs(5000)], tensor(16), True), x)
    assert 5000 * 16 * 4 in blocks(scratch)


def test_putting_without_adding_up_takes_nothing_unless_order_must_not_matter():
    x, put = tensor(1000, 16), ([longs(50)], tensor(50, 16), False)
    assert rule("index_put_", (x, *put), x) == NONE
    assert rule("index_put_", (x, *put), x, kernel_target=CudaTarget((9, 0), 132, deterministic=True)) != NONE


def test_indexing_by_a_mask_lists_what_it_chooses():
    scratch = rule("index", (tensor(10, 10), [tensor(10, 10, dtype=torch.bool)]), tensor(7))
    assert scratch.after == ((7 * 2 * 8,),)
    assert rule("index", (tensor(10, 10), [longs(4)]), tensor(4, 10)) == NONE


def test_a_mask_to_put_by_is_a_span():
    scratch = rule("index_put_", (tensor(10), [tensor(10, dtype=torch.bool)], tensor()), tensor(10))
    assert blocks(scratch) == [Range(0, 40, 80)]


def test_a_number_from_the_host_is_filled_in_by_the_mask_itself():
    mask = [tensor(10, dtype=torch.bool)]
    assert rule("index_put_", (tensor(10), mask, torch.zeros(())), tensor(10)) == NONE
    assert rule("index_put_", (tensor(10), mask, torch.zeros(()), True), tensor(10)) != NONE


def test_index_add_takes_nothing_unless_order_must_not_matter():
    args = (tensor(10, 4), 0, longs(6), tensor(6, 4))
    assert rule("index_add", args, tensor(10, 4)) == NONE
    assert (
        rule("index_add", args, tensor(10, 4), kernel_target=CudaTarget((9, 0), 132, deterministic=True)).after[0][0]
        == 96
    )


# -- sorting and scans


def test_short_rows_are_sorted_in_place_from_a_range():
    assert rule("sort", (tensor(8, 4096),), [tensor(8, 4096), longs(8, 4096)]).after == ((4096 * 8,),)


def test_one_long_row_takes_indices_and_cubs_storage():
    scratch = rule("sort", (tensor(5000),), [tensor(5000), longs(5000)])
    assert scratch.after == ((40_000, sorting.radix_sort(5000, 4, 8, H200)),)


def test_a_few_long_rows_are_sorted_together_and_many_in_segments():
    few = rule("sort", (tensor(10, 5000),), [tensor(10, 5000), longs(10, 5000)]).after
    assert few[0][:3] == (400_000, 400_000, 200_000)
    many = rule("sort", (tensor(128, 5000),), [tensor(128, 5000), longs(128, 5000)]).after
    assert many == ((128 * 5000 * 8, 128 * 5000 * 12 + 255),)


def test_sorting_columns_turns_them_first():
    scratch = rule("sort", (tensor(5000, 2), 0), [tensor(5000, 2), longs(5000, 2)])
    assert scratch.after[0][:3] == (40_000, 40_000, 80_000)


def test_the_largest_of_long_rows_count_digits_by_block():
    assert rule("topk", (tensor(8, 1000), 5), [tensor(8, 5), longs(8, 5)]) == NONE
    # 8 x 20 blocks of 1024 numbers
    scratch = rule("topk", (tensor(8, 20_000), 5), [tensor(8, 5), longs(8, 5)])
    assert 160 * 256 * 2 in blocks(scratch)


def test_many_rows_are_counted_twice_over_and_scanned_twice():
    """PyTorch 2.11 to 2.15 allocated this, with its kernels left out (`benchmarks/operators.py`)."""
    held = (16, 32, 32, 100_352, 4096, 784, 784)
    taken = rule("topk", (tensor(4, 50_000), 50), [tensor(4, 50), longs(4, 50)]).after
    assert taken == ((*held, 1279), (*held, 1279))


def test_a_permutation_sorts_a_range_by_random_keys():
    """As recorded by `benchmarks/operators.py`."""
    assert rule("randperm", (1000,), longs(1000)).after == ((8,), (8000, 4000, 4000, 1))
    assert rule("randperm", (100_000,), longs(100_000)).after == ((8,), (800_000, 800_000, 800_000, 1_633_279))


@pytest.mark.parametrize(("count", "nbytes"), [(1000, 1279), (100_000, 1279), (1_000_000, 3327), (3_000_001, 7423)])
def test_half_precision_is_summed_up_in_larger_tiles(count, nbytes):
    """As recorded by `benchmarks/operators.py`, alike for capability 7.5 to 12.0."""
    assert sorting.scan(count, 2, half=True) == nbytes


def test_columns_of_an_image_begin_as_large_as_the_image():
    image, columns = tensor(4, 16, 30, 34), tensor(4, 144, 896)
    assert rule("im2col", (image, [3, 3], [1, 1], [0, 0], [1, 1]), columns).after == ((261_120,),)
    back = rule("col2im", (columns, [30, 34], [3, 3], [1, 1], [0, 0], [1, 1]), image)
    assert (back.after, back.kept) == ((), 2_064_384 - 261_120)


def test_each_dimension_but_the_last_is_rolled_to_a_tensor_of_its_own():
    x = tensor(8, 16, 16, 4)
    assert rule("roll", (x, [1, 1], [1, 2]), x).after == ((32_768,),)
    assert rule("roll", (x, [1], [1]), x) == NONE


def test_partial_results_of_all_are_as_wide_as_the_input_before_2_14(monkeypatch):
    monkeypatch.setattr(port, "VERSION", (2, 11))
    older = blocks(rule("all", (tensor(3_000_001),), tensor()))
    monkeypatch.setattr(port, "VERSION", (2, 14))
    assert older[0] == 4 * blocks(rule("all", (tensor(3_000_001),), tensor()))[0]


def test_norms_of_a_list_count_the_chunks_of_each_tensor_from_2_15_on(monkeypatch):
    monkeypatch.setattr(port, "VERSION", (2, 14))
    sizes = (210_000, 700, 70_000, 1, 105)
    tensors, results = [tensor(size) for size in sizes], [tensor() for _ in sizes]
    assert blocks(rule("_foreach_norm", (tensors, 2), results)) == [80]
    monkeypatch.setattr(port, "VERSION", (2, 15))
    assert blocks(rule("_foreach_norm", (tensors, 2), results)) == [48, 36]


def test_a_median_of_all_is_found_by_sorting_them():
    assert rule("median", (tensor(100),), tensor()).after == ((400, 800),)
    assert rule("median", (tensor(4, 100), 1), [tensor(4), longs(4)]) == NONE


def test_only_a_single_row_is_scanned_by_cub():
    assert blocks(rule("cumsum", (tensor(1000), 0), tensor(1000))) == [1023]
    assert rule("cumsum", (tensor(10, 100), 1), tensor(10, 100)) == NONE


def test_scans_of_masks_make_them_long_first():
    assert blocks(rule("cumsum", (tensor(10, 100, dtype=torch.bool), 1), longs(10, 100))) == [8000]


def test_unique_keeps_storage_for_all():
    assert rule("_unique2", (tensor(100),), [tensor(7), longs(0), longs(0)]).kept == 93 * 4


def test_one_sample_is_drawn_by_a_race(monkeypatch):
    monkeypatch.setattr(port, "VERSION", (2, 11))
    assert blocks(rule("multinomial", (tensor(8, 100), 1), longs(8, 1))) == [1, 1, 3200]
    monkeypatch.setattr(port, "VERSION", (2, 14))
    assert blocks(rule("multinomial", (tensor(8, 100), 1), longs(8, 1))) == [1, 1, 1, 1, 3200]


# -- normalisation


def test_layer_norm_copies_what_is_not_contiguous():
    x = tensor(8, 16)
    assert rule("native_layer_norm", (x, [16], tensor(16), tensor(16), 1e-5), [x, tensor(8), tensor(8)]) == NONE
    turned = tensor(16, 8).T
    args = (turned, [16], tensor(16), tensor(16), 1e-5)
    assert blocks(rule("native_layer_norm", args, [x, tensor(8), tensor(8)])) == [512]


def test_layer_norm_of_many_short_rows_sums_its_gradients_in_two_steps():
    x, mean, weight = tensor(1 << 17, 32), tensor(1 << 17, 1), tensor(32)
    args = (x, x, [32], mean, mean, weight, weight, [True, True, True])
    # one column of blocks: 131,072 / 32 = 4096 rows of partial sums
    held = rule("native_layer_norm_backward", args, [x, weight, weight]).after[0]
    assert held[:3] == (4096 * 32 * 4, 4096 * 32 * 4, 128)
    few = (tensor(1 << 16, 32), tensor(1 << 16, 32), *args[2:])
    assert rule("native_layer_norm_backward", few, [x, weight, weight]) == NONE


def test_rms_norm_has_one_gradient_to_sum():
    x, rstd, weight = tensor(1 << 17, 32), tensor(1 << 17, 1), tensor(32)
    held = rule("_fused_rms_norm_backward", (x, x, [32], rstd, weight, [True, True]), [x, weight]).after[0]
    assert held[:2] == (4096 * 32 * 4, 128)


def test_group_norm_keeps_a_factor_and_a_shift_for_each_channel():
    args = (tensor(2, 8, 4, 4), tensor(8), tensor(8), 2, 8, 16, 4, 1e-5)
    assert rule("native_group_norm", args, tensor(2, 8, 4, 4)).after == ((64, 64),)
    halves = (half(2, 8, 4, 4), half(8), half(8), *args[3:])
    assert rule("native_group_norm", halves, half(2, 8, 4, 4)).after == ((32, 32, 64, 64),)


def test_group_norm_backward_sums_each_channel_and_scales_each_group():
    x = tensor(2, 8, 4, 4)
    args = (x, x, tensor(2, 4), tensor(2, 4), tensor(8), 2, 8, 16, 4, [True, True, True])
    assert rule("native_group_norm_backward", args, [x, tensor(8), tensor(8)]).after == ((64, 64, 32, 32, 64),)


@pytest.mark.parametrize(("version", "copies"), [((2, 11), 1), ((2, 14), 2), ((2, 15), 0)])
def test_group_norm_backward_of_channels_last_copies_what_its_version_cannot_read(monkeypatch, version, copies):
    monkeypatch.setattr(port, "VERSION", version)
    x = tensor(2, 8, 4, 4).to(memory_format=CHANNELS_LAST)
    args = (x, x, tensor(2, 4), tensor(2, 4), tensor(8), 2, 8, 16, 4, [True, True, True])
    taken = blocks(rule("native_group_norm_backward", args, [x, tensor(8), tensor(8)]))
    assert taken.count(1024) == copies
    assert taken.count(64) == (3 if copies else 2)


def test_batch_norm_of_channels_last_sums_blocks_of_rows():
    x = tensor(64, 32, 16, 16).to(memory_format=CHANNELS_LAST)
    args = (x, tensor(32), tensor(32), None, None, True, 0.1, 1e-5)
    # 16,384 rows, 16 x 16 rows a block: 64 blocks
    assert rule("native_batch_norm", args, [x, tensor(32), tensor(32)]).after == ((4 * 32 * 64 * 4, 4),)
    evaluated = (*args[:5], False, *args[6:])
    assert rule("native_batch_norm", evaluated, [x, tensor(32), tensor(32)]) == NONE
    contiguous = (tensor(64, 32, 16, 16), *args[1:])
    assert rule("native_batch_norm", contiguous, [x, tensor(32), tensor(32)]) == NONE


def test_batch_norm_of_features_has_its_channels_last():
    x = tensor(16_384, 32)
    assert rule("native_batch_norm", (x, None, None, None, None, True, 0.1, 1e-5), [x]).after == ((32_768, 4),)


def test_batch_norm_backward_of_channels_last_sums_before_its_results():
    x = tensor(64, 32, 16, 16).to(memory_format=CHANNELS_LAST)
    args = (x, x, tensor(32), None, None, tensor(32), tensor(32), True, 1e-5, [True, True, True])
    scratch = rule("native_batch_norm_backward", args, [x, tensor(32), tensor(32)])
    assert scratch == Scratch(before=((128, 128, 2 * 32 * 64 * 4, 4),), after=((128, 128),))


def test_cudnns_batch_norm_copies_into_the_inputs_layout():
    x = half(8, 16, 4, 4).to(memory_format=CHANNELS_LAST)
    args = (x, half(8, 16, 4, 4), tensor(16))
    assert rule("cudnn_batch_norm", (x, tensor(16), tensor(16)), x) == NONE
    assert blocks(rule("cudnn_batch_norm_backward", args, x)) == [8 * 16 * 16 * 2]


# -- losses and softmax


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss"])
def test_averaged_losses_stay_in_the_results_storage_and_next_to_it(name):
    scratch = rule(name, (tensor(8, 10), tensor(8, 10)), tensor())
    assert (scratch.kept, blocks(scratch)) == (316, [320])
    assert rule(name, (tensor(8, 10), tensor(8, 10), 0), tensor(8, 10)) == NONE


def test_binary_cross_entropy_shrinks_its_losses_in_place():
    scratch = rule("binary_cross_entropy", (tensor(8, 10), tensor(8, 10)), tensor())
    assert (scratch.kept, blocks(scratch)) == (316, [4])


def test_binary_cross_entropy_with_logits_has_log_sigmoids_next_to_its_losses():
    args = (tensor(8, 10), tensor(8, 10))
    assert blocks(rule("binary_cross_entropy_with_logits", args, tensor())) == [320, 320]
    assert blocks(rule("binary_cross_entropy_with_logits", (*args, None, None, 0), tensor(8, 10))) == [320]


def test_huber_loss_keeps_its_losses_next_to_the_mean():
    assert blocks(rule("huber_loss", (tensor(8, 10), tensor(8, 10)), tensor())) == [320]


def test_likelihood_copies_what_is_not_contiguous():
    args = (tensor(10, 8).T, longs(8), None, 1, -100)
    assert blocks(rule("nll_loss_forward", args, [tensor(), tensor()])) == [320]


def test_softmax_backward_multiplies_first():
    x = tensor(4, 10)
    assert blocks(rule("_softmax_backward_data", (x, x, 1, torch.float32), x)) == [160]
    assert rule("_log_softmax_backward_data", (x, x, 1, torch.float32), x) == NONE
    assert blocks(rule("_log_softmax_backward_data", (tensor(10, 4).T, x, 1, torch.float32), x)) == [160]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_reflection_pads_a_contiguous_copy(dims: int) -> None:
    sides = (4, 5, 6)[:dims]
    x, padded = tensor(2, *sides, 3).movedim(-1, 1), tensor(2, 3, *(side + 2 for side in sides))
    assert blocks(rule(f"reflection_pad{dims}d", (x, [1] * 2 * dims), padded)) == [x.numel() * 4]
    assert rule(f"reflection_pad{dims}d", (x.contiguous(), [1] * 2 * dims), padded) == NONE


def test_safe_softmax_masks_elements_and_rows():
    assert rule("_safe_softmax", (tensor(4, 10), 1), tensor(4, 10)).after == ((40, 4, 4),)


def test_ctc_backward_has_as_many_variables_as_forward():
    args = (tensor(2), tensor(50, 2, 20), longs(2, 10), [50, 50], [10, 10], tensor(2), tensor(2, 50, 21), 0)
    assert blocks(rule("_ctc_loss_backward", args, tensor(50, 2, 20))) == [2 * 50 * 21 * 4, 16, 16, 16]


# -- matrices


def test_matrices_that_cublas_reads_as_they_are_take_nothing():
    a, b = tensor(8, 16), tensor(16, 4)
    assert rule("mm", (a, b), tensor(8, 4)) == NONE
    assert rule("mm", (a, tensor(4, 16).T), tensor(8, 4)) == NONE
    assert rule("addmm", (tensor(4), a, tensor(16, 9)[:, :4]), tensor(8, 4)) == NONE


def test_expanded_matrices_are_copied():
    assert blocks(rule("mm", (tensor().expand(8, 16), tensor(16, 4)), tensor(8, 4))) == [512]
    assert blocks(rule("addmm", (tensor(4), tensor(8, 16), tensor(32, 8)[::2, ::2]), tensor(8, 4))) == [256]
    skipping = tensor(32, 2048, dtype=torch.float8_e4m3fn)[:, ::2]
    scaled = (skipping, tensor(16, 1024, dtype=torch.float8_e4m3fn).T, tensor(), tensor())
    assert blocks(rule("_scaled_mm", scaled, tensor(32, 16))) == [32 << 10]


def test_batched_matrices_are_copied_where_no_stride_is_one():
    a, b = tensor(3, 8, 16), tensor(3, 16, 4)
    assert rule("bmm", (a, b), tensor(3, 8, 4)) == NONE
    assert rule("bmm", (tensor(3, 16, 8).mT, b), tensor(3, 8, 4)) == NONE
    assert rule("bmm", (tensor(8, 3, 16).transpose(0, 1), b), tensor(3, 8, 4)) == NONE
    assert blocks(rule("bmm", (tensor().expand(3, 8, 16), b), tensor(3, 8, 4))) == [3 * 8 * 16 * 4]
    args = (tensor(3, 8, 4), a, tensor(3, 16, 4, 2)[..., 0])
    assert blocks(rule("baddbmm", args, tensor(3, 8, 4))) == [3 * 16 * 4 * 4]


def test_distances_widen_both_sets_by_two_columns():
    scratch = rule("_euclidean_dist", (tensor(5, 3), tensor(7, 3)), tensor(5, 7))
    assert scratch.after == ((5 * 5 * 4, 7 * 5 * 4),)


def test_distances_backward_have_a_row_for_each_pair():
    args = (tensor(5, 7), tensor(5, 3), tensor(7, 3), 1.0, tensor(5, 7))
    assert blocks(rule("_cdist_backward", args, tensor(5, 3))) == [5 * 7 * 3 * 4]


# -- images


def conv(x: torch.Tensor, weight: torch.Tensor, groups: int = 1) -> tuple[Any, ...]:
    return (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)


def conv_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]) -> tuple[Any, ...]:
    return (grad, x, weight, [weight.shape[0]], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[cudnn.Question]:
    """Collect the questions to a cuDNN that never answers."""
    questions: list[cudnn.Question] = []
    monkeypatch.setattr(cudnn, "workspaces", questions.append)
    return questions


@pytest.fixture
def without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of cuDNN takes one."""
    monkeypatch.setattr(cudnn, "likely", lambda _: 0)
    monkeypatch.setattr(cudnn, "workspaces", lambda _: (0,))
    monkeypatch.setattr(cudnn, "tensors_bytes", lambda _: 0)


def test_a_workspace_is_that_of_the_plan_that_cudnn_names_first_or_none(monkeypatch):
    """With `torch.backends.cudnn.benchmark` that of any plan."""
    sizes = (300, 800, 100, 200, 5000, 0)
    monkeypatch.setattr(cudnn, "workspaces", lambda _: sizes)
    x, weight, y = tensor(2, 64, 6, 6), tensor(64, 64, 3, 3), tensor(2, 64, 6, 6)
    expected = Plans(Range(0, 300, 300), sizes)
    copies = (2 * 2 * 64 * 36 + 64 * 64 * 9) * 4
    assert blocks(rule("convolution", conv(x, weight), y)) == [expected._replace(first=copies)]
    both = rule("convolution_backward", conv_backward(y, x, weight, [True, True, False]), [x, weight])
    assert (both.between, both.after) == ({0: ((expected,),)}, ((expected,),))
    fastest = replace(H200, benchmark=True)
    assert blocks(rule("convolution", conv(x, weight), y, fastest)) == [
        expected._replace(size=Range(0, 300, 5000), first=copies)
    ]


def test_for_a_gpu_that_cudnn_does_not_answer_for_a_workspace_is_at_most_as_large_as_the_tensors(monkeypatch):
    monkeypatch.setattr(cudnn, "workspaces", lambda _: None)
    x, weight, y = tensor(2, 64, 6, 6), tensor(64, 64, 3, 3), tensor(2, 64, 6, 6)
    (found,) = blocks(rule("convolution", conv(x, weight), y, CudaTarget((7, 0), 80)))
    assert (found.size.low, found.size.high) == (0, 4 * (x.numel() + weight.numel() + y.numel()))


def test_cudnn_is_asked_for_each_gradient_as_pytorch_asks(asked):
    x, weight, y = tensor(2, 8, 6, 6), tensor(16, 8, 3, 3), tensor(2, 16, 6, 6)
    target = CudaTarget((8, 6), 28, deterministic=True, tf32=False, benchmark=True)
    rule("convolution", conv(x, weight), y, target)
    rule("convolution_backward", conv_backward(y, x, weight, [True, True, False]), [x, weight], target)
    assert [question.operation for question in asked] == ["forward", "input", "weight"]
    assert {(question.x, question.weight, question.y) for question in asked} == {((2, 8, 6, 6), (16, 8, 3, 3), y.shape)}
    first = asked[0]
    assert (first.kind, first.channels_last, first.capability) == ("float32", False, (8, 6))
    assert (first.deterministic, first.tf32, first.every) == (True, False, True)


def test_a_transposed_convolution_is_the_gradient_of_one(asked):
    x, weight, y = tensor(2, 16, 6, 6), tensor(16, 8, 4, 4), tensor(2, 8, 12, 12)
    args = (x, weight, None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    rule("convolution", args, y)
    rule("convolution_backward", (y, x, weight, [8], *args[3:], [True, True, False]), [x, weight])
    assert [question.operation for question in asked] == ["input", "forward", "weight"]
    assert {(question.x, question.y) for question in asked} == {((2, 8, 12, 12), (2, 16, 6, 6))}


def test_a_sequence_is_an_image_of_one_row(asked):
    x, weight, y = tensor(2, 8, 20), tensor(16, 8, 3), tensor(2, 16, 10)
    rule("convolution", (x, weight, None, [2], [1], [1], False, [0], 1), y)
    (question,) = asked
    assert (question.x, question.weight, question.y) == ((2, 8, 1, 20), (16, 8, 1, 3), (2, 16, 1, 10))
    assert (question.padding, question.stride, question.dilation) == ((0, 1), (1, 2), (1, 1))


def test_depthwise_convolutions_are_pytorchs_own_unless_in_channels_last(asked):
    x, weight, y = tensor(2, 8, 6, 6), tensor(8, 1, 3, 3), tensor(2, 8, 6, 6)
    assert rule("convolution", conv(x, weight, groups=8), y) == NONE
    assert asked == []
    rule("convolution", conv(x.to(memory_format=CHANNELS_LAST), weight, groups=8), y)
    assert [question.channels_last for question in asked] == [True]


def test_depthwise_convolutions_of_sequences_are_pytorchs_own_but_in_float16(asked):
    x, weight, y = tensor(2, 32, 20), tensor(32, 1, 3), tensor(2, 32, 20)
    sequences = (x, weight, None, [1], [1], [1], False, [0], 32)
    assert rule("convolution", sequences, y) == NONE
    assert rule("convolution_backward", (y, x, weight, None, *sequences[3:], [True, True, False]), [x, weight]) == NONE
    assert asked == []
    rule("convolution", (x.half(), weight.half(), *sequences[2:]), y.half())
    assert len(asked) == 1


@pytest.mark.usefixtures("asked")
def test_without_cudnn_a_table_knows_the_usual_shares():
    x, weight, y = tensor(8, 64, 56, 56), tensor(64, 64, 3, 3), tensor(8, 64, 56, 56)
    ampere, turing = CudaTarget((8, 6), 28), CudaTarget((7, 5), 40)
    backward = conv_backward(y, x, weight, [False, True, False])
    copies = (2 * 8 * 64 * 56 * 56 + 64 * 64 * 9) * 4
    (block,) = blocks(rule("convolution_backward", backward, [weight], ampere))
    assert 0.9 * copies < block.size.likely <= block.size.high
    assert block.otherwise == (block.size.likely, 0)
    assert rule("convolution_backward", backward, [weight], turing) == NONE
    assert rule("convolution", conv(x.double(), weight.double()), y.double()) == NONE


@pytest.mark.usefixtures("without_workspaces")
def test_a_weight_in_channels_last_brings_the_input_along():
    x, weight = tensor(2, 8, 6, 6), tensor(16, 8, 3, 3)
    last = weight.to(memory_format=CHANNELS_LAST)
    assert blocks(rule("convolution", conv(x, last), tensor(2, 16, 6, 6))) == [2 * 8 * 36 * 4]
    images = x.to(memory_format=CHANNELS_LAST)
    assert blocks(rule("convolution", conv(images, weight), tensor(2, 16, 6, 6))) == [16 * 8 * 9 * 4]


@pytest.mark.usefixtures("without_workspaces")
def test_sequences_with_features_last_are_copied_and_the_copy_lives_to_the_end_of_the_backward_pass():
    sequence, weight, copied = tensor(2, 20, 8).transpose(1, 2), tensor(16, 8, 3), 2 * 20 * 8 * 4
    y = tensor(2, 16, 20)
    assert blocks(rule("convolution", conv(sequence, weight), y)) == [copied]
    backward = conv_backward(y, sequence, weight, [True, False, True])
    scratch = rule("convolution_backward", backward, [tensor(2, 8, 20), tensor(16)])
    assert (scratch.between, scratch.after) == ({0: ((copied,),)}, ((copied,),))


def test_sequences_with_features_last_are_not_in_channels_last_for_cudnn(asked):
    sequence, weight = tensor(2, 20, 8).transpose(1, 2), tensor(16, 8, 1)
    rule("convolution", conv(sequence, weight), tensor(2, 16, 20))
    assert [question.channels_last for question in asked] == [False]


@pytest.mark.usefixtures("without_workspaces")
def test_doubles_are_never_channels_last():
    x = tensor(2, 8, 6, 6, dtype=torch.double).to(memory_format=CHANNELS_LAST)
    args = conv(x, tensor(16, 8, 3, 3, dtype=torch.double))
    assert blocks(rule("convolution", args, tensor(2, 16, 6, 6))) == [2 * 8 * 36 * 8]


@pytest.mark.usefixtures("without_workspaces")
def test_convolution_backward_copies_the_weight_for_the_inputs_gradient_alone():
    x, weight = tensor(2, 8, 6, 6), tensor(16, 8, 3, 3)
    grad = tensor(2, 16, 6, 6).to(memory_format=CHANNELS_LAST)
    images, copy, turned = x.to(memory_format=CHANNELS_LAST), 16 * 8 * 9 * 4, 2 * 16 * 36 * 4
    both = rule("convolution_backward", conv_backward(grad, images, weight, [True, True, False]), [images, weight])
    assert (both.between, both.after) == ({0: ((copy,),)}, ())
    args = conv_backward(grad, x, weight, [True, True, False])
    contiguous = rule("convolution_backward", args, [x, weight])
    assert (contiguous.between, contiguous.after) == ({0: ((turned,),)}, ((turned,),))


def test_a_convolutions_bias_gradient_is_a_sum_over_images():
    x, weight, grad = tensor(64, 8, 64, 64), tensor(16, 8, 1, 1), tensor(64, 16, 64, 64)
    scratch = rule("convolution_backward", conv_backward(grad, x, weight, [False, False, True]), [tensor(16)])
    assert scratch == rule("sum", (grad, [0, 2, 3]), tensor(16))
    assert scratch != NONE


def test_pooling_takes_its_tensors_in_the_inputs_layout():
    x = tensor(2, 8, 6, 6).to(memory_format=CHANNELS_LAST)
    grad = tensor(2, 8, 3, 3)
    assert blocks(rule("avg_pool2d_backward", (grad, x, [2, 2]), x)) == [2 * 8 * 9 * 4]
    assert rule("avg_pool2d", (x, [2, 2]), grad) == NONE


def test_resizing_few_channels_in_channels_last_copies_both_sides():
    x, y = (tensor(2, 3, size, size).to(memory_format=CHANNELS_LAST) for size in (6, 12))
    assert blocks(rule("upsample_nearest2d", (x, None, [2.0, 2.0]), y)) == [2 * 3 * 36 * 4, 2 * 3 * 144 * 4]
    x, y = (tensor(2, 4, size, size).to(memory_format=CHANNELS_LAST) for size in (6, 12))
    assert rule("upsample_nearest2d", (x, None, [2.0, 2.0]), y) == NONE


def test_resizing_volumes_in_channels_last_copies_both_sides():
    x, y = (tensor(2, 4, size, size, size).to(memory_format=torch.channels_last_3d) for size in (6, 12))
    for name in ("upsample_nearest3d", "_upsample_nearest_exact3d"):
        assert blocks(rule(name, (x, [12] * 3), y)) == [2 * 4 * 12**3 * 4, 2 * 4 * 6**3 * 4]
        assert rule(name, (x.contiguous(), [12] * 3), y.contiguous()) == NONE


# -- lists, transforms, copies


def test_norms_of_a_list_have_a_row_as_long_as_the_longest():
    tensors = [tensor(100), tensor(65_537)]
    assert blocks(rule("_foreach_norm", (tensors, 2), [tensor(), tensor()])) == [2 * 2 * 4]
    halves = [half(100), half(65_537)]
    assert blocks(rule("_foreach_norm", (halves, 2), [half(), half()])) == [2 * 2 * 4]


def test_transforms_back_copy_their_input():
    x = tensor(8, 9, dtype=torch.complex64)
    assert blocks(rule("_fft_c2r", (x, [1], 0, 16), tensor(8, 16)))[0] == 8 * 9 * 8


def test_copies_on_one_device_take_nothing():
    x = tensor(8, 8)
    assert rule("copy_", (x, x.T), x) == NONE


# -- what no rule knows


def test_sparse_and_nested_tensors_are_left_alone():
    sparse = torch.zeros(3, 3).to_sparse()
    assert rule("sum", (sparse,), sparse) == NONE
