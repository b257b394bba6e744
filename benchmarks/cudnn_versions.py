"""Ask several versions of cuDNN for the workspaces of published jobs, and train on the ghost with each.

    python benchmarks/cudnn_versions.py --folder FOLDER [--versions 9.8.0.87 ...] [--jobs regnet ...]
        [--markdown FILE] [--json FILE]

Wheels of nvidia-cudnn-cu12 are downloaded into FOLDER and unpacked there: about 1 GB a version. Without
--versions, they are those of ``VERSIONS``; the installed cuDNN is always asked, too.

Each job is a row of benchmarks/accuracy/milabench.csv. It is trained for two steps on the ghost, in a process
of its own, with one cuDNN answering. PyTorch chooses among the engines, so what it reserves follows from the
answers. Then the fallback engines of every convolution are asked for, too; PyTorch asks for these only if it
can use no other. The tables show what is reserved, and the largest workspaces: those that were used, and what
any engine would have used.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from measuring import MIB, command_line, load_ghost, table, write_json, write_or_print
from published_cards import CARDS, read_rows

HERE = Path(__file__).parent / "accuracy"
VERSIONS = ("9.8.0.87", "9.10.2.21", "9.13.1.26", "9.16.0.29", "9.19.0.56", "9.28.0.42")
LIBRARIES = ("nvidia-cublas-cu12==12.8.4.1", "nvidia-cuda-nvrtc-cu12==12.8.93")
"""What cuDNN for CUDA 12 loads, beside the wheel of cuDNN."""
ROWS = (
    *(("H100", "regnet_y_128gf", batch) for batch in (64, 128, 136, 184, 192)),
    *(("L40S", "regnet_y_128gf", batch) for batch in (64, 112)),
    *((card, job, 64) for job in ("convnext_large-tf32", "convnext_large-fp32") for card in ("H100", "L40S")),
)
PUBLISHED = {(row.card, row.job, row.batch): row for row in reversed(read_rows())}
"""By card, job and batch size; of rows that differ in their workers, the first."""
FALLBACK, SHOWN = 2, 4
HEADER = """# cuDNN's answers by version

Printed by `python benchmarks/cudnn_versions.py --folder FOLDER --markdown FILE`, in MiB. The conclusions
are in [docs/accuracy.md](../../docs/accuracy.md)."""
CAPTIONS = (
    "Allocated / reserved by PyTorch at the peak of two steps, with each version of cuDNN answering:",
    "Workspaces of all different convolutions: the sum of those used / the largest / the largest offered:",
    "The convolutions that use most, without the batch: used / the largest offered by any engine:",
)


@dataclass(frozen=True)
class Libraries:
    """A cuDNN and the libraries to load before it."""

    name: str
    cudnn: str
    before: tuple[str, ...]


@dataclass(frozen=True)
class Workspace:
    """The workspace of one convolution in one pass; all sizes in bytes."""

    convolution: str
    used: int
    """Of the first engine that PyTorch's settings allow."""
    offered: int
    """The largest of any engine, fallback engines included."""


@dataclass(frozen=True)
class Result:
    """One job with one cuDNN; sizes in bytes."""

    card: str
    job: str
    batch: int
    libraries: str
    version: int
    """As cuDNN reports it: 92400 is 9.24.0."""
    reserved: int
    allocated: int
    error: str
    workspaces: tuple[Workspace, ...]


def main() -> None:
    """Download, run and print."""
    from memfit.ghost.build.runtime_library import build_ghost

    parser = command_line(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--versions", nargs="*", default=VERSIONS)
    parser.add_argument("--jobs", nargs="*", default=["regnet", "convnext"], help="beginnings of jobs' names")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path, help="results so far; they are kept, and added to")
    args = parser.parse_args()
    known = args.json.read_bytes() if args.json and args.json.exists() else b"[]"
    results = msgspec.json.decode(known, type=list[Result])
    done = {(result.card, result.job, result.batch, result.libraries) for result in results}
    rows = [row for row in ROWS if row[1].startswith(tuple(args.jobs))]
    no_device = str(build_ghost().no_device)
    versions = [_downloaded(version, args.folder, no_device) for version in args.versions]
    for libraries in [_installed(no_device), *versions]:
        for card, job, batch in rows:
            if (card, job, batch, libraries.name) not in done:
                results.append(_run(libraries, card, job, batch))
                print(_line(results[-1]), file=sys.stderr, flush=True)
                write_json(args.json, [asdict(result) for result in results])
    chosen = [result for result in results if result.job.startswith(tuple(args.jobs))]
    tables = (_reserved_table(chosen), _sum_table(chosen), _largest_table(chosen))
    blocks = [HEADER]
    for caption, lines in zip(CAPTIONS, tables, strict=True):
        blocks += [caption, "\n".join(lines)]
    text = "\n\n".join(blocks) + "\n"
    write_or_print(args.markdown, text)


def _downloaded(version: str, folder: Path, no_device: str) -> Libraries:
    """Return a version of cuDNN, unpacked in ``folder`` and downloaded if it is not there."""
    before = [str(_unpack(LIBRARIES, folder / "cuda12", name)) for name in ("libcublasLt", "libnvrtc")]
    library = _unpack([f"nvidia-cudnn-cu12=={version}"], folder / version, "libcudnn")
    return Libraries(version, str(library), (no_device, *before))


def _unpack(wheels: Sequence[str], root: Path, name: str) -> Path:
    """Return the library of that name in wheels unpacked under ``root``; download them if necessary."""
    if not root.exists():
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*command, *wheels], check=True)
            for wheel in Path(folder).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(root)
    return min(root.glob(f"nvidia/*/lib/{name}.so.*"), key=lambda path: len(path.name))


def _installed(no_device: str) -> Libraries:
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.ghost.build.torch_install import find_torch
    from memfit.ghost.cudnn.client import find_library_loaded_by_torch

    torch = find_torch().folder
    found = {}
    for name in ("libcudnn", "libcublasLt"):
        soname = next(soname for soname in build_ghost().sonames if soname.startswith(f"{name}.so"))
        found[name] = str(find_library_loaded_by_torch(soname, torch))
    return Libraries("installed", found["libcudnn"], (no_device, found["libcublasLt"]))


def _run(libraries: Libraries, card: str, job: str, batch: int) -> Result:
    """Train in a new process; return what it reserved and its workspaces."""
    request = json.dumps({"libraries": asdict(libraries), "card": card, "job": job, "batch": batch})
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cudnn_versions as c; "
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "MEMFIT_CUDNN_ANSWERS": cache}
        command = [sys.executable, "-c", code + "c.train(sys.argv[1])", request]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{job} with batches of {batch} and cuDNN {libraries.name} failed:\n{done.stderr}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Result)


def train(request: str) -> None:
    """Train on the ghost with one cuDNN answering, and print the result as JSON."""
    asked = json.loads(request)
    from memfit.devices import find_device
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.ghost.cudnn.cache import HeuristicsCache
    from memfit.ghost.cudnn.client import CudnnClient, cudnn_device_properties
    from memfit.ghost.ghost_device import GhostDevice
    from memfit.ghost.workspaces import WorkspaceSizes, WorkspaceSource

    ghost = load_ghost(CARDS[asked["card"]], context=True)
    libraries = asked["libraries"]
    client = CudnnClient(
        Path(libraries["cudnn"]),
        [Path(path) for path in libraries["before"]],
        cudnn_device_properties(
            GhostDevice.of(find_device(CARDS[asked["card"]])), build_ghost().cuda_version
        ),
        HeuristicsCache(Path(os.environ["MEMFIT_CUDNN_ANSWERS"]) / "answers.jsonl"),
    )
    workspaces = WorkspaceSizes.read(WorkspaceSource.CUDNN, lambda: client)
    questions: dict[bytes, None] = {}

    def answer(question: bytes) -> Sequence[Any]:
        questions[question] = None
        return workspaces.answer(question)

    ghost.answer_with(answer)
    import torch

    _skip_initialization(torch)
    error = ""
    sys.argv = [*PUBLISHED[asked["card"], asked["job"], asked["batch"]].run, "--steps", "2"]
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(HERE / sys.argv[0]), run_name="__main__")
    except torch.OutOfMemoryError as raised:
        error = str(raised).partition(".")[0]
    found = _workspaces(list(questions), workspaces.answer, allow_tf32="--tf32" in sys.argv)
    result = Result(
        asked["card"],
        asked["job"],
        asked["batch"],
        libraries["name"],
        client.version(),
        torch.cuda.max_memory_reserved(),
        torch.cuda.max_memory_allocated(),
        error,
        tuple(found),
    )
    print(json.dumps(asdict(result)))


def _skip_initialization(torch: Any) -> None:
    """Leave parameters as they are allocated: their values count for nothing here, and take a minute."""
    for name in ("kaiming_uniform_", "kaiming_normal_", "uniform_", "normal_", "trunc_normal_"):
        setattr(torch.nn.init, name, lambda tensor, *_given, **_named: tensor)


def _workspaces(
    questions: Iterable[bytes], answer: Callable[[bytes], Sequence[Any]], *, allow_tf32: bool
) -> Iterable[Workspace]:
    """Yield the workspaces of the convolutions asked about, with their fallback engines."""
    from memfit.ghost.cudnn import descriptors

    for question in questions:
        tree = json.loads(question)
        if tree.get("kind") != "plan":
            continue
        descriptor = msgspec.convert(tree["descriptor"], descriptors.CudnnDescriptor)
        convolution = descriptors.cudnn_operation_of_graph(descriptor)
        mode = descriptor.values(descriptors.ENGINEHEUR_MODE)
        if mode == (FALLBACK,) or not isinstance(convolution, descriptors.CudnnConvolution):
            continue
        attributes = tree["descriptor"]["attributes"]
        tree["descriptor"]["attributes"] = [
            [name, kind, [FALLBACK] if name == descriptors.ENGINEHEUR_MODE else values]
            for name, kind, values in attributes
        ]
        own, fallback = answer(question), answer(json.dumps(tree).encode())
        yield _workspace(convolution, own, fallback, allow_tf32=allow_tf32)


def _workspace(
    convolution: Any, own: Sequence[Any], fallback: Sequence[Any], *, allow_tf32: bool
) -> Workspace:
    # As PyTorch's filterEngineConfigs: tensor cores (note 0) only with TF32 where data are float32 (type 0),
    # and no engine that converts its inputs (note 1).
    refused = 0b10 | (convolution.x.data_type == 0 and not allow_tf32)
    allowed = [config for config in (*own, *fallback) if not config.numerical_notes & refused]
    image, weight = ("x".join(map(str, sizes)) for sizes in (convolution.x.sizes[1:], convolution.w.sizes))
    return Workspace(
        f"{convolution.operation}, {image} by {weight}, stride {convolution.stride[0]}",
        allowed[0].workspace if allowed else 0,
        max((config.workspace for config in (*own, *fallback)), default=0),
    )


def _line(result: Result) -> str:
    job = f"{result.card} {result.job} {result.batch} {result.libraries}"
    return f"{job}: allocated / reserved {_reserved(result)} MiB, workspaces {_sums(result)} MiB"


def _keys(results: Iterable[Result]) -> list[tuple[str, str, int]]:
    return [row for row in ROWS if any(_key(found) == row for found in results)]


def _columns(results: Sequence[Result]) -> dict[str, str]:
    """Return the heading of each cuDNN, by increasing version."""
    by_version = sorted({(result.version, result.libraries) for result in results})
    return {
        libraries: f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        for version, libraries in by_version
    }


def _table(results: Sequence[Result], extra: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    headings = ["card", "job", "batch", *extra, *_columns(results).values()]
    middle = "l" if "convolution" in extra else "r" * len(extra)
    return table(headings, "llr" + middle + "r" * len(_columns(results)), rows).splitlines()


def _reserved_table(results: Sequence[Result]) -> list[str]:
    """Return the MiB that PyTorch had, with those that the published run's device had in use."""
    rows = [
        [key[0], key[1], str(key[2]), f"{PUBLISHED[key].published:,.0f}", *_cells(results, key, _reserved)]
        for key in _keys(results)
    ]
    return _table(results, ["published, device"], rows)


def _sum_table(results: Sequence[Result]) -> list[str]:
    """Return the MiB of all workspaces used, of the largest, and of the largest that any engine asks for."""
    rows = [[key[0], key[1], str(key[2]), *_cells(results, key, _sums)] for key in _keys(results)]
    return _table(results, [], rows)


def _largest_table(results: Sequence[Result]) -> list[str]:
    """Return the MiB used and the most offered for the convolutions that use most with any cuDNN."""
    rows = []
    for key in _keys(results):
        most: dict[str, int] = {}
        for space in (space for found in results if _key(found) == key for space in found.workspaces):
            most[space.convolution] = max(most.get(space.convolution, 0), space.used)
        for convolution in sorted(most, key=lambda name: -most[name])[:SHOWN]:
            cells = _cells(results, key, lambda found, name=convolution: _use(found, name))
            rows.append([key[0], key[1], str(key[2]), convolution, *cells])
    return _table(results, ["convolution"], rows)


def _key(result: Result) -> tuple[str, str, int]:
    return result.card, result.job, result.batch


def _cells(results: Sequence[Result], key: tuple[str, str, int], cell: Callable[[Result], str]) -> list[str]:
    found = {result.libraries: cell(result) for result in results if _key(result) == key}
    return [found.get(libraries, "") for libraries in _columns(results)]


def _reserved(result: Result) -> str:
    figures = f"{result.allocated / MIB:,.0f} / {result.reserved / MIB:,.0f}"
    return f"{figures}, out of memory" if result.error else figures


def _sums(result: Result) -> str:
    used = [space.used for space in result.workspaces]
    offered = [space.offered for space in result.workspaces]
    return f"{sum(used) / MIB:,.0f} / {max(used) / MIB:,.0f} / {max(offered) / MIB:,.0f}"


def _use(result: Result, convolution: str) -> str:
    space = next((space for space in result.workspaces if space.convolution == convolution), None)
    return f"{space.used / MIB:,.0f} / {space.offered / MIB:,.0f}" if space else ""


if __name__ == "__main__":
    main()
