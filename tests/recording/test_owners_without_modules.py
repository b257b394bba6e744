"""Attribution of computations outside modules, against figures that each script reports itself, in bytes."""

import pytest

from support.attributed_runs import bytes_of

pytestmark = pytest.mark.warm

FUNCTIONS = """
import threading
backbone = nn.Linear(64, 128).cuda().requires_grad_(False)
W = [nn.Parameter(torch.ones(128, 256, device="cuda")), nn.Parameter(torch.ones(256, 256, device="cuda"))]
optimizer = torch.optim.SGD(W, 0.1, foreach=False)
def work():
    x = given
    for weight in W:
        x = torch.tanh(x @ weight)
    losses.append(x.sum())
def train():
    losses.pop().backward()
    optimizer.step()
    optimizer.zero_grad()
losses, x = [], torch.ones(32, 64, device="cuda")
with torch.no_grad():
    given = backbone(x)
work()
train()
given = torch.ones(32, 128, device="cuda")
on_a_thread = threading.Thread(target=work)
on_a_thread.start()
on_a_thread.join()
train()
hidden = 32 * 256 * 4
truth(saved=2 * 2 * hidden + size([given]), inputs=size([x, given]), products=2 * 2 * hidden, losses=2 * 4)
"""


def test_a_functional_forward_is_detected_after_a_frozen_module_and_on_another_thread(attributed):
    found, truth = attributed(FUNCTIONS)
    assert bytes_of(found, category="activations", phase="forward") == truth["saved"]
    assert bytes_of(found, category="activations") == truth["saved"]
    assert bytes_of(found, category="inputs") == truth["inputs"]
    assert bytes_of(found, category="temporaries", phase="forward") == truth["products"]
    assert bytes_of(found, category="outputs") == truth["losses"]
    given = [row.name for row in found if row.category == "inputs"]
    assert {row.op for row in found if row.category in ("inputs", "parameters")} == {""}
    assert "self of MmBackward0" in given


GRADIENTS = """
net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).cuda()
words = nn.Embedding(1000, 64, sparse=True).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *words.parameters()], 0.1)
x = torch.ones(32, 64, device="cuda", requires_grad=True)
slope, = torch.autograd.grad(net(x).sum(), x, create_graph=True)
penalty = slope.square().sum()
penalty.backward()
net(x).sum().backward()
seen = [tensor.grad for tensor in (*net.parameters(), x) if tensor.grad is not None]
index = torch.ones(32, dtype=torch.long, device="cuda")
words(index).sum().backward()
sparse = words.weight.grad
hidden = 32 * 128 * 4
# The forward saves the tanh; its gradients save the input and output of the tanh backward, and the root.
truth(saved=2 * hidden + size([slope]) + 2 * hidden + 4, inputs=size([x, index]), gradients=size(seen),
      sparse=size([sparse._values(), sparse._indices()]))
optimizer.step()
"""


def test_the_graph_of_a_gradient_is_activations_and_sparse_gradients_are_gradients(attributed):
    found, truth = attributed(GRADIENTS)
    assert bytes_of(found, category="activations") == truth["saved"]
    parts = [
        bytes_of(found, name=f"weight.grad.{part}", module="Embedding") for part in ("values", "indices")
    ]
    assert sum(parts) == truth["sparse"]
    assert bytes_of(found, category="gradients") == truth["gradients"] + truth["sparse"]
    # The batch requires a gradient in two graphs, but an optimizer exists and does not update it.
    assert bytes_of(found, category="inputs") == truth["inputs"]


BY_HAND = """
W = [torch.ones(64, 64, device="cuda", requires_grad=True) for _ in range(2)]
batch = 32 * 64 * 4
truth(parameters=size(W), saved=3 * 2 * batch, inputs=3 * batch + 2 * 4)
for _ in range(3):
    x = torch.ones(32, 64, device="cuda", requires_grad=True)
    h = x
    for w in W:
        h = torch.tanh(h @ w)
    h.sum().backward()
    with torch.no_grad():
        for w in W:
            w -= 0.1 * w.grad
            w.grad = None
    norm = x.grad.square().sum()
"""


def test_leaves_updated_by_hand_are_parameters_and_batches_are_not(attributed):
    found, truth = attributed(BY_HAND, steps=2)  # ended at the third backward
    assert bytes_of(found, category="parameters") == truth["parameters"]
    assert bytes_of(found, category="activations") == truth["saved"]
    assert bytes_of(found, category="inputs") == truth["inputs"]  # with the norms of the previous steps
