"""Lightning's own patches of torch's loader classes end with the call that they were made for."""

import pytest
from lightning_fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import BatchSampler, DataLoader

from lightning_memguard.training.adapter.loader_access import preserve_loader_classes


class OwnLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def dunders():
    """Attributes that each class has under these names, own or inherited, and those that Lightning keeps to undo."""
    names = [f"__{old}{name}__" for old in ("", "old__") for name in ("init", "setattr", "delattr")]
    return [(cls, name, getattr(cls, name, None)) for cls in (DataLoader, BatchSampler, OwnLoader) for name in names]


def test_lightning_does_not_undo_its_patches_one_inside_the_other():
    """If this fails, Lightning has mended it, and `preserve_loader_classes` may go."""
    with preserve_loader_classes():
        before = dunders()
        with _replace_dunder_methods(DataLoader), _replace_dunder_methods(DataLoader):
            pass
        assert dunders() != before


def test_a_capture_inside_a_loader_call_leaves_the_outer_patches_to_end_as_usual():
    before = dunders()
    with _replace_dunder_methods(DataLoader), _replace_dunder_methods(BatchSampler):
        outer = dunders()
        with preserve_loader_classes(), _replace_dunder_methods(DataLoader), _replace_dunder_methods(BatchSampler):
            assert dunders() != outer
        assert dunders() == outer
    assert dunders() == before


def test_an_error_in_a_loader_hook_leaves_no_patch():
    before = dunders()
    with pytest.raises(KeyError), preserve_loader_classes(), _replace_dunder_methods(DataLoader):
        raise KeyError
    assert dunders() == before
