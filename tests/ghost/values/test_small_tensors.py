"""The elements of small tensors are followed one by one: sizes, offsets, and how often each class occurs."""

import pytest

from support.scripts import INSTALL_VALUES, check

pytestmark = pytest.mark.warm


def test_sizes_stay_known_through_what_scripts_do_with_them(evaluate):
    check(
        evaluate,
        {
            "sizes.tolist()": [3, 4, 5, 6],
            "sizes[1:].sum().item()": 15,
            "sizes.view(2, 2).sum(1).tolist()": [7, 11],
            "sizes.cumsum(0)[-1].item()": 18,
            "int(sizes.max())": 6,
            "(sizes * 2 + 1).tolist()": [7, 9, 11, 13],
            "torch.stack([sizes[0], sizes[3]]).tolist()": [3, 6],
            "torch.cat([sizes, sizes.long()]).sum().item()": 36,
            "sizes.to(torch.float32).cpu().tolist()": [3.0, 4.0, 5.0, 6.0],
            "torch.tensor([2, 3]).cuda().tolist()": [2, 3],
            "torch.tensor([2, 3]).to(d, torch.int32)[1].item()": 3,
            "written.tolist()": [0, 0, 0, 0],
            "(filled == 7).tolist()": [True, False],  # nothing is left of what was there
            "overwritten.tolist()": [0, 0, 0, 0],
            "(sizes + x[0, :4]).tolist()": [0.0, 0.0, 0.0, 0.0],  # with unknown numbers, nothing is known
        },
        before="""
        sizes = torch.tensor([3, 4, 5, 6], device=d)
        written, overwritten = sizes.clone(), sizes.clone()
        filled = torch.empty(2, dtype=torch.int64, device=d)
        filled.copy_(torch.tensor([7, 8]))
        torch.randn(9, device=d)  # a launch: the ghost remembers no bytes after it
        written[:2].random_()
        overwritten.copy_(x[0, :4])
        """,
    )


def test_a_new_tensor_at_the_address_of_an_exposed_storage_is_known(evaluate):
    check(
        evaluate,
        {
            "after_exposing(lambda: sizes.sum())": [15] * 20,
            "after_exposing(lambda: sizes.cumsum(0)[-1])": [15] * 20,
            "after_exposing(lambda: received(torch.empty_like(sizes))[0])": [4] * 20,
            "after_exposing(lambda: received(sizes.new_empty(3))[1])": [5] * 20,
            "after_exposing(lambda: received(torch.empty(3, dtype=torch.int64, device=d))[2])": [6] * 20,
            "exposed.flatten().tolist()": [0, 0],  # a view shares the exposed storage
        },
        before="""
        from memfit.ghost.values.tensor_facts import KnownElements
        sizes, exposed = torch.tensor([4, 5, 6], device=d), torch.tensor([1, 2], device=d)
        exposed.data_ptr()
        torch.randn(9, device=d)  # a launch: the ghost remembers no bytes after it

        def received(buffer):  # as exchanged_sizes.py records what a collective wrote
            values.known.put(buffer, KnownElements(torch.tensor([4, 5, 6])))
            return buffer

        def after_exposing(make):
            read = []
            for _ in range(20):  # the address of a storage is that of one freed just before
                torch.empty(3, device=d).data_ptr()
                read.append(make().item())
            return read
        """,
    )


def test_counts_by_class_add_up_and_are_even(evaluate):
    even = [3, 3, 2, 2, 2]
    check(
        evaluate,
        {
            "torch.bincount(chosen.flatten(), minlength=5).tolist()": even,
            "torch.histc(chosen.float(), bins=5, min=0, max=5).int().tolist()": even,
            "F.one_hot(chosen.flatten(), 5).sum(0).tolist()": even,
            "F.one_hot(chosen, 5).sum(dim=(0, 1)).tolist()": even,
            "zeros.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten())).tolist()": even,
            "torch.bincount(chosen.flatten(), minlength=5).view(5, 1).sum(1).sum().item()": 12,
            "torch.bincount(chosen.flatten(), weights=x[0].repeat(2)[:12], minlength=5).tolist()": [0.0] * 5,
        },
        before="""
        chosen = x[:, :5].topk(3).indices
        zeros = torch.zeros(5, dtype=torch.long, device=d)
        """,
    )


def test_a_read_of_counts_is_noted(on_ghost):
    script = """
install()
counts = torch.bincount(torch.randint(4, (10,), device="cuda"), minlength=4)
counts.tolist()
print(notes[-1][1])
"""
    noted = "The script read how often each class occurs: memfit assumed the 10 to be even.\n"
    assert on_ghost(INSTALL_VALUES + script) == noted
