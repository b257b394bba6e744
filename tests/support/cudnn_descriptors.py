"""Trees of cuDNN descriptors for one convolution, as the runtime's cudnn_graph.c records them."""

import json

INSTANT, FALLBACK = 0, 2
FLOAT = 0

# Numbers of cudnn_graph.h 9.24: the operation, its alpha, beta, convolution, w, x and y.
_OPERATIONS = {
    "forward": (10, 700, 701, 702, 703, 704, 705),
    "weight gradient": (11, 712, 713, 714, 715, 716, 717),
    "data gradient": (12, 706, 707, 708, 709, 710, 711),
}


def convolution(operation, *, images=1, width=224, channels=64, mode=INSTANT, data_type=FLOAT):
    """Return the question for a 3x3 convolution with padding 1 that keeps the number of channels."""
    image = [images, channels, width, width]
    kind, alpha, beta, description, w, x, y = _OPERATIONS[operation]
    parts = [(x, image, "x"), (w, [channels, channels, 3, 3], "w"), (y, image, "y")]
    tensors = [[name, 15, [_tensor(sizes, data_type, uid)]] for name, sizes, uid in parts]
    own = [[100, 1, [FLOAT]], [101, 7, [1]], [106, 3, [2]]]
    own += [[name, 3, [1, 1]] for name in (102, 103, 104, 105)]
    factors = [[alpha, 4, [1]], [beta, 4, [0]]]
    whole = _descriptor(kind, [*tensors, [description, 15, [_descriptor(1, own)]], *factors])
    graph = _descriptor(15, [[801, 15, [whole]]])
    return json.dumps(_descriptor(4, [[201, 15, [graph]], [200, 8, [mode]]])).encode()


def attention():
    """Return the question for a graph of one operation that is not a convolution."""
    graph = _descriptor(15, [[801, 15, [_descriptor(19, [])]]])
    return json.dumps(_descriptor(4, [[201, 15, [graph]], [200, 8, [INSTANT]]])).encode()


def _descriptor(kind, attributes):
    return {"type": kind, "attributes": attributes}


def _tensor(sizes, data_type, uid):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    dimensions = [[902, 3, sizes], [903, 3, strides]]
    return _descriptor(17, [[901, 1, [data_type]], *dimensions, [906, 3, [ord(uid)]], [900, 3, [32]]])
