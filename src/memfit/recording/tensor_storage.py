"""The memory of a tensor, looked at by memfit rather than by the script."""

import torch


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return ``tensor.untyped_storage()``, to be identified and measured, not written to.

    A script that holds a storage can write to it unnoticed. The ghost therefore wraps the method of
    ``torch.Tensor``, and forgets the tensor's values (``ghost/values/value_tracking_patches.py``). It must
    not forget them because memfit looks, so this calls the method that is wrapped.

    >>> storage_of(torch.ones(2)).nbytes()
    8
    """
    return torch._C.TensorBase.untyped_storage(tensor)
