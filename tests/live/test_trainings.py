"""Several trainings in one process, watched: every step of each is seen."""

from scripts import WATCHED

IN_TURN = """
    seen = []

    class Writer:
        def add_scalar(self, tag, value, step):
            seen.append(step)

    def fold():
        model = Net().cuda()
        steps(model, torch.optim.Adam(model.parameters()), 12)

    with memfit.watch(writer=Writer()):
        for _ in range(3):
            fold()
        assert seen[::2] == list(range(1, 37)), seen
        model = Net().cuda()
        head = torch.optim.SGD(model.blocks.parameters())
        steps(model, head, 12)
        steps(model, torch.optim.SGD(model.parameters()), 12)  # and nobody has dropped the other
        assert seen[-1] == 60, seen
        steps(model, head, 12)
        assert seen[-1] == 72, seen
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # after the last step
"""


def test_one_after_another(rehearse):
    done = rehearse(WATCHED + IN_TURN)
    assert done.returncode == 0, done.stderr
    assert "memfit: step 72 · peak 1.0 GiB measured" in done.stderr
