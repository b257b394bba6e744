"""Linear algebra, sparse matrices and transforms on the ghost; and a sample of PyTorch's own operators."""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from support.scripts import INSTALL_VALUES, check

pytestmark = [pytest.mark.process, pytest.mark.warm]

OPS = Path(__file__).parents[2] / "benchmarks/ops.py"

LINEAR_ALGEBRA = """
    from torch import linalg

    def matrix(rows=40, columns=40):
        return torch.randn(*batch, rows, columns, device="cuda", dtype=dtype, requires_grad=True)

    FACTORIZATIONS = {
        "cholesky": lambda a: linalg.cholesky(a),
        "cholesky_solve": lambda a: torch.cholesky_solve(matrix(40, 3), linalg.cholesky(a)),
        "inv": lambda a: linalg.inv(a),
        "solve": lambda a: linalg.solve(a, matrix(40, 3)),
        "solve_triangular": lambda a: linalg.solve_triangular(a, matrix(40, 3), upper=True),
        "lu": lambda a: linalg.lu(a)[2],
        "lu_solve": lambda a: linalg.lu_solve(*linalg.lu_factor(a), matrix(40, 3)),
        "qr": lambda a: linalg.qr(a)[1],
        "svd": lambda a: linalg.svd(a)[1],
        "svd gesvd": lambda a: linalg.svd(a, full_matrices=False, driver="gesvd")[1],
        "svd gesvdj": lambda a: linalg.svd(a, full_matrices=False, driver="gesvdj")[1],
        "svd gesvda": lambda a: linalg.svd(a, full_matrices=False, driver="gesvda")[1],
        "eigh": lambda a: linalg.eigh(a)[0],
        "eig": lambda a: linalg.eig(a)[0].abs(),
        "lstsq": lambda a: linalg.lstsq(a, matrix(40, 3))[0],
        "pinv": lambda a: linalg.pinv(a),
        "matrix_norm": lambda a: linalg.matrix_norm(a, "nuc"),
        "det": lambda a: linalg.det(a),
        "slogdet": lambda a: linalg.slogdet(a)[1],
        "householder": lambda a: linalg.householder_product(a, matrix()[..., 0, :]),
        "matrix_exp": lambda a: linalg.matrix_exp(a),
        "svd_lowrank": lambda a: torch.svd_lowrank(a)[1],
    }
    NOT_DIFFERENTIABLE = {
        "matrix_rank": lambda a: linalg.matrix_rank(a),
        "ldl": lambda a: linalg.ldl_solve(*linalg.ldl_factor(a), matrix(40, 3)),
        "geqrf, ormqr": lambda a: torch.ormqr(*torch.geqrf(a.detach()), matrix(40, 3).detach()),
    }
    for dtype in (torch.float32, torch.complex128):
        for batch in ((), (2,), (2, 0), (3, 70)):
            for name, factorize in {**FACTORIZATIONS, **NOT_DIFFERENTIABLE}.items():
                a = matrix()
                if 0 in batch and name == "eig":
                    continue  # shapes that PyTorch works out on the host do not fit (2.14.1)
                result = factorize(a)
                assert result.shape[:len(batch)] == batch, (name, result.shape, batch)
                if name in FACTORIZATIONS:
                    result.abs().sum().backward()
                    assert 0 in batch or a.grad.shape == a.shape, name
    print(ghost.gaps_reached())
"""


def test_linear_algebra_runs_forward_and_backward(on_ghost):
    out = on_ghost(INSTALL_VALUES + "values = install()\n" + textwrap.dedent(LINEAR_ALGEBRA))
    assert out == "('cuSOLVER workspace, as large as on an H100, or as LAPACK documents',)\n"


def test_the_workspace_of_a_solver_is_allocated(on_ghost):
    """PyTorch allocates what the rule gives."""
    out = on_ghost("""
        a = torch.eye(700, device="cuda", dtype=torch.float64)
        torch.cuda.memory._record_memory_history()
        torch.linalg.eigh(a)
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        print(max(event["size"] for event in events if event["action"] == "alloc"))
    """)
    assert int(out) == (17 * 700 * 700 // 5 + 724 * 700 + 50_600) * 8


SPARSE = """
    x = torch.randn(64, 8, device="cuda", requires_grad=True)
    dense = torch.randn(64, 64, device="cuda")
    csr, coo, bsr = dense.to_sparse_csr(), dense.to_sparse(), dense.to_sparse_bsr((16, 16))
    def entries(*places):
        coo = torch.sparse_coo_tensor(list(zip(*places)), torch.ones(len(places)), (64, 64))
        return coo.to_sparse_csr().cuda()
    few, fewer = entries((0, 1), (1, 2), (2, 0)), entries((0, 1), (5, 5))
    for matrix in (csr, coo, bsr):
        assert (matrix @ x.detach()).shape == (64, 8)
        assert (matrix @ x.detach()[:, 0]).shape == (64,)
    for matrix in (csr, coo):
        matrix = matrix.detach().requires_grad_()
        (matrix @ x).sum().backward()
        assert matrix.grad.shape == matrix.shape and x.grad.shape == x.shape
    for matrix in (csr, bsr):
        assert torch.triangular_solve(x.detach(), matrix).solution.shape == (64, 8)
        assert torch.triangular_solve(x.detach()[:, :1], matrix).solution.shape == (64, 1)
    assert torch.sparse.sampled_addmm(csr, x, x.T).shape == (64, 64)
    print(few._nnz(), (few @ few)._nnz(), (few + fewer)._nnz(), (csr @ csr)._nnz())
    print(ghost.gaps_reached())
"""


def test_sparse_matrices_run_and_their_products_have_the_largest_possible_number_of_entries(on_ghost):
    counts, reached = on_ghost(INSTALL_VALUES + "values = install()\n" + textwrap.dedent(SPARSE)).splitlines()
    assert counts == f"3 {3 * 3} {3 + 2} {64 * 64}"
    assert "cuSPARSE workspace" in reached
    assert "entries in a sparse product or sum" in reached
    assert reached.count(",") == 3, reached


def test_checks_inside_operators_pass(evaluate):
    check(
        evaluate,
        {
            "torch.allclose(x, x + 1, 1e-3, 1e-5, False)": True,  # all positional, as torch.linalg calls it
            "list(torch.linalg.eig(torch.randn(5, 5, device=d))[0].shape)": [5],
            "list(torch.cov(x).shape)": [4, 4],
            "list(torch.cov(x, fweights=whole.repeat(2), aweights=x[0].abs()).shape)": [4, 4],
            "list(torch.segment_reduce(x[0], 'sum', lengths=torch.tensor([4, 6], device=d)).shape)": [2],
            "list(torch.mode(torch.randn(3, 5000, device=d)).values.shape)": [3],
            "list(torch.linalg.matrix_exp(torch.randn(100, 40, 40, device=d)).shape)": [100, 40, 40],
        },
    )


def test_cov_can_be_differentiated(evaluate):
    """The value read by the check of the degrees of freedom must not make it fail."""
    before = "c = x.clone().requires_grad_(); torch.cov(c).sum().backward()"
    check(evaluate, {"list(c.grad.shape)": [4, 10]}, before=before)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sample", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_a_sample_of_pytorchs_operators_runs(tmp_path, sample):
    """Run them with two inputs each; python benchmarks/ops.py runs all operators."""
    pytest.importorskip("expecttest", reason="PyTorch's database of operators imports it")
    results = tmp_path / "results.json"
    options = ["--sample", f"{sample}", "--seed", "0", "--inputs", "2", "--json", results]
    done = subprocess.run(
        [sys.executable, OPS, *options], capture_output=True, text=True, check=False, timeout=880
    )
    outcomes = Counter(result["outcome"] for result in json.loads(results.read_text()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes.total() == sample
    assert outcomes["ran"] > 290 / 300 * sample
