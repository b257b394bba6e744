"""The runtime compared with NVIDIA's own headers, if the pip packages include them.

The tests check the layouts that cross the boundary, the arguments of every function that the runtime
implements, and that every function with an output on the host is either implemented or a named gap.
"""

import re
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from memfit.ghost.build.runtime_library import INCLUDES, RUNTIME, build_ghost, read_ghost_gaps
from memfit.ghost.build.torch_install import find_torch, scan_nvidia_imports
from memfit.native_build import find_compiler

pytestmark = pytest.mark.process

PACKAGES = Path(sysconfig.get_paths()["purelib"])
HEADERS = (
    "cuda.h",
    "cuda_runtime_api.h",
    "cublas_v2.h",
    "cublasLt.h",
    "cudnn.h",
    "cufftXt.h",
    "cusolverDn.h",
    "cusparse.h",
    "cusparseLt.h",
    "nccl.h",
    "nvrtc.h",
    "cupti.h",
    "cufile.h",
)


@cache
def include_folders():
    found = sorted(
        {path.parent for header in HEADERS for path in PACKAGES.glob(f"nvidia/*/include/{header}")}
    )
    # The pip packages lack crt/, which the Triton package has, and nv/target, which is for C++.
    return found, PACKAGES / "triton/backends/nvidia/include"


@pytest.fixture(scope="session")
def headers(tmp_path_factory):
    """Return compiler arguments with which NVIDIA's headers can be included, or skip."""
    found, last = include_folders()
    missing = [header for header in HEADERS if not any((folder / header).exists() for folder in found)]
    if missing or not (last / "crt").exists():
        pytest.skip(f"NVIDIA's headers are not all installed: {missing or 'crt/'}")
    shim = tmp_path_factory.mktemp("shim")
    (shim / "nv").mkdir()
    (shim / "nv/target").write_text("#define NV_IF_TARGET(...)\n#define NV_IF_ELSE_TARGET(...)\n")
    return [f"-I{shim}", *(f"-I{folder}" for folder in found), "-idirafter", str(last)]


@pytest.fixture(scope="session")
def cuda_version(headers):
    return constants(headers, HEADERS[:1], ["CUDA_VERSION"])[0]


def constants(arguments, includes, expressions):
    """Return the values of these constant expressions, after including these files."""
    source = "#include <stdalign.h>\n#include <stddef.h>\n#include <stdint.h>\n"
    source += "".join(f'#include "{header}"\n' for header in includes)
    # Each plus one, so that none is 0, which the assembler writes differently.
    source += f"const unsigned long long values[] = {{{', '.join(f'1 + {e}' for e in expressions)}}};\n"
    command = [*find_compiler(), "-std=c11", "-D_GNU_SOURCE", "-w", "-S", *arguments, "-xc", "-", "-o", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = re.search(r"^values:\n((?:\s+\.quad\s+\d+.*\n)+)", done.stdout, re.MULTILINE)[1]
    return [int(value) - 1 for value in re.findall(r"\.quad\s+(\d+)", values)]


# ---- Layouts ---------------------------------------------------------------------------------------

CAMEL = re.compile(r"_([a-z0-9])")
PROPERTIES = re.findall(
    r"^    (?:char|int|size_t|unsigned) (\w+)",
    (RUNTIME / "cuda/device_properties.c").read_text().split("struct properties {")[1].split("};")[0],
    re.MULTILINE,
)
IRREGULAR = {
    "ecc_enabled": "ECCEnabled",
    "pci_bus_id": "pciBusID",
    "pci_device_id": "pciDeviceID",
    "pci_domain_id": "pciDomainID",
    "gpu_direct_rdma_supported": "gpuDirectRDMASupported",
    "gpu_direct_rdma_flush_writes_options": "gpuDirectRDMAFlushWritesOptions",
    "gpu_direct_rdma_writes_ordering": "gpuDirectRDMAWritesOrdering",
    "multi_gpu_board_group_id": "multiGpuBoardGroupID",
    "textures_and_surfaces": "maxTexture1D",
    "rest": "deviceNumaConfig",
}
ONLY_CUDA_12 = {
    "clock_rate",
    "device_overlap",
    "kernel_exec_timeout_enabled",
    "compute_mode",
    "max_texture_1d_linear",
    "memory_clock_rate",
    "single_to_double_precision_perf_ratio",
    "cooperative_multi_device_launch",
}


def camel(name):
    return IRREGULAR.get(name) or CAMEL.sub(lambda letter: letter[1].upper(), name)


LAYOUTS = [
    (
        "cuda/device_properties.c",
        "struct properties",
        "struct cudaDeviceProp",
        {name: camel(name) for name in PROPERTIES if name not in ONLY_CUDA_12},
    ),
    (
        "cuda/pointer_attributes.c",
        "struct pointer_attributes",
        "struct cudaPointerAttributes",
        {
            "type": "type",
            "device": "device",
            "device_pointer": "devicePointer",
            "host_pointer": "hostPointer",
        },
    ),
    (
        "cuda/kernels.c",
        "struct function_attributes",
        "struct cudaFuncAttributes",
        {
            "max_threads_per_block": "maxThreadsPerBlock",
            "num_regs": "numRegs",
            "ptx_version": "ptxVersion",
            "binary_version": "binaryVersion",
            "max_dynamic_shared_size_bytes": "maxDynamicSharedSizeBytes",
            "preferred_shmem_carveout": "preferredShmemCarveout",
        },
    ),
    (
        "cuda/kernels.c",
        "struct launch_config",
        "cudaLaunchConfig_t",
        {"grid": "gridDim", "block": "blockDim", "shared": "dynamicSmemBytes", "stream": "stream"},
    ),
    (
        "cuda/kernels.c",
        "struct driver_launch_config",
        "CUlaunchConfig",
        {"grid": "gridDimX", "block": "blockDimX", "shared": "sharedMemBytes", "stream": "hStream"},
    ),
    (
        "cuda/virtual_memory.c",
        "struct allocation_properties",
        "CUmemAllocationProp",
        {
            "type": "type",
            "requested_handle_types": "requestedHandleTypes",
            "location_type": "location.type",
            "location_id": "location.id",
            "flags": "allocFlags",
        },
    ),
    (
        "libraries/cublas.c",
        "struct heuristic_result",
        "cublasLtMatmulHeuristicResult_t",
        {"algorithm": "algo", "workspace_size": "workspaceSize", "state": "state", "waves": "wavesCount"},
    ),
    (
        "libraries/cudnn_convolution.c",
        "struct algorithm_performance",
        "cudnnConvolutionFwdAlgoPerf_t",
        {"result": "status", "time": "time", "memory": "memory", "determinism": "determinism"},
    ),
    ("libraries/nccl.h", "struct unique_id", "ncclUniqueId", {"bytes": "internal"}),
]


def test_the_part_of_nccls_configuration_that_the_ghost_reads_has_its_layout(headers, cuda_version):
    names = {"size": "size", "min_ctas": "minCTAs", "max_ctas": "maxCTAs", "split_share": "splitShare"}
    arguments = [f"-DCUDA_VERSION={cuda_version}", *INCLUDES]
    mine = constants(
        arguments,
        [RUNTIME / "libraries/nccl_communicators.c"],
        [f"offsetof(struct config, {n})" for n in names],
    )
    real = constants(headers, HEADERS, [f"offsetof(ncclConfig_t, {name})" for name in names.values()])
    assert mine == real


@pytest.mark.parametrize(("file", "ours", "theirs", "fields"), LAYOUTS, ids=[layout[2] for layout in LAYOUTS])
def test_a_struct_has_nvidias_layout(headers, cuda_version, file, ours, theirs, fields):
    def layout(name, members):
        return [f"sizeof({name})", *(f"offsetof({name}, {member})" for member in members)]

    arguments = [f"-DCUDA_VERSION={cuda_version}", *INCLUDES]
    mine = constants(arguments, [RUNTIME / file], layout(ours, fields))
    real = constants(headers, HEADERS, layout(theirs, fields.values()))
    assert dict(zip(["size", *fields], mine, strict=True)) == dict(zip(["size", *fields], real, strict=True))


# ---- Arguments -------------------------------------------------------------------------------------

WIDE = {"size_t", "int64_t", "uint64_t", "long", "CUdeviceptr", "cuuint64_t", "cudaGraphConditionalHandle"}
LOCATION = {"cudaMemLocation", "memory_location"}
BY_VALUE = {"dim3", "ncclUniqueId", "unique_id", "cudaIpcMemHandle_t", "cudaIpcEventHandle_t", *LOCATION}


@cache
def preprocessed(arguments, includes):
    source = "".join(f'#include "{header}"\n' for header in includes)
    command = [*find_compiler(), "-E", "-P", "-w", "-std=c11", "-D_GNU_SOURCE", *arguments, "-xc", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", " ", done.stdout)
    return re.sub(r"\s+", " ", text)


PROTOTYPE = re.compile(
    r"(?:^|(?<=[;}{])) ?([\w \*]+?[ \*])((?:__)?(?:cu|nccl|nvrtc|nvml)\w*) ?"  # its result and name
    r"\(((?:[^(){};]|\([^()]*\))*)\) ?[;{]"  # its arguments, callbacks among them
)


SECOND_NAME = re.compile(r"extern __typeof__\((\w+)\) (\w+) ?;")


def prototypes(text):
    """Return the arguments of each function, as the text spells them."""
    found = {
        name: split(arguments)
        for returned, name, arguments in PROTOTYPE.findall(text)
        if returned.split()[0] not in {"return", "else"}  # a call
    }
    return found | {name: found[function] for function, name in SECOND_NAME.findall(text)}


def split(arguments):
    """Split at the commas outside brackets; a callback's own arguments are dropped."""
    arguments = re.sub(r"\( ?\* ?(\w*) ?\) ?\([^()]*\)", r"*\1", arguments).strip()
    return [] if arguments in {"", "void"} else [argument.strip() for argument in arguments.split(",")]


def pointer_types(text):
    """Return the names that a typedef declares as pointers: handles and callbacks."""
    handles = re.findall(r"typedef (?:const )?(?:struct )?\w+ ?(?:const ?)?\* ?(?:const )?(\w+) ?;", text)
    callbacks = re.findall(r"typedef [\w \*]+\( ?(?:\w+ )?\* ?(\w+) ?\) ?\(", text)
    return set(handles) | set(callbacks)


def passed_as(argument, pointers):
    """Return how x86-64 passes an argument: a pointer, 64 bits, 32 bits, a float, a double, or a record."""
    words = re.findall(r"\w+", argument)
    if "*" in argument or "[" in argument or pointers & set(words):
        return "64"
    if BY_VALUE & set(words):
        return "record"
    if "double" in words or "float" in words:
        return "double" if "double" in words else "float"
    if WIDE & set(words) or {"CUmemGenericAllocationHandle"} & set(words):
        return "64"
    return "32"


@pytest.fixture(scope="session")
def real(headers):
    text = preprocessed(tuple(headers), HEADERS)
    return prototypes(text), pointer_types(text)


@pytest.fixture(scope="session")
def implemented(cuda_version):
    arguments = (f"-DCUDA_VERSION={cuda_version}", *INCLUDES)
    found = {}
    for file in sorted(RUNTIME.rglob("*.c")):
        found |= prototypes(preprocessed(arguments, (str(file),)))
    return found


def test_arguments_are_passed_as_the_headers_declare(real, implemented):
    theirs, pointers = real
    compared = [name for name in implemented if name in theirs]
    assert len(compared) > 250
    mismatched = {
        name: (implemented[name], theirs[name])
        for name in compared
        if [passed_as(a, set()) for a in implemented[name]] != [passed_as(a, pointers) for a in theirs[name]]
    }
    assert mismatched == {}


# ---- Outputs ---------------------------------------------------------------------------------------

# Pointers that are not outputs on the host, by the names NVIDIA's headers give them.
ON_THE_DEVICE = re.compile(
    r"devInfo|info|infoArray|d_info|devInfoArray|devIpiv|ipiv|P|p|cooRowsA|cooColsA|csrColIndA|csrSortedRowPtr\w*|"
    r"csrSortedColInd\w*|dev\w+|Aarray|Barray|Carray|TauArray|A|B|C"
)
INPUTS = {
    "cuLinkAddData_v2": "options",
    "cudaStreamUpdateCaptureDependencies": "dependencies",
    "cuptiActivitySetAttribute": "value",
    "cusparseLtMatmul": "streams",
    "cusparseLtMatmulSearch": "streams",
}
OPAQUE_TO_THE_CALLER = re.compile(r"cusparseLt\w+(Init|SetAttribute)|cusparseLtInit|cusparseLtMatmulSearch")
HOST_OUTPUT = re.compile(r"\b(size_t|int64_t|uint64_t|int|unsigned|uint32_t|int32_t) ?\*|\*\*|\* ?\*")


def test_every_function_with_a_host_output_is_implemented_or_a_gap(real, implemented):
    theirs, pointers = real
    handles = re.compile(r"\b(" + "|".join(sorted(pointers)) + r") ?\*")
    known = implemented.keys() | {gap.name for gap in read_ghost_gaps()[0]} | INPUTS.keys()
    missing = {
        name: argument
        for name in scan_nvidia_imports(find_torch()).symbols & theirs.keys() - known
        for argument in theirs[name]
        if (HOST_OUTPUT.search(argument) or handles.search(argument))
        and "const" not in argument.split("*")[0]
        and not ON_THE_DEVICE.fullmatch(re.findall(r"\w+", argument)[-1])
        and not OPAQUE_TO_THE_CALLER.fullmatch(name)
    }
    assert missing == {}


def test_gaps_are_not_implemented(implemented):
    """A call of an implemented function is never reported as a gap."""
    assert {gap.name for gap in read_ghost_gaps()[0]} & implemented.keys() == set()


# ---- Looked up by name -----------------------------------------------------------------------------


def test_functions_looked_up_by_name_exist(real, implemented):
    """PyTorch looks these up by cudaGetDriverEntryPoint and dlsym; a plain name may stand for its _v2."""
    offered = (
        implemented.keys()
        | {gap.name for gap in read_ghost_gaps()[0]}
        | scan_nvidia_imports(find_torch()).symbols
    )
    for library in ("libc10_cuda.so", "libtorch_cuda.so"):
        text = (find_torch().folder / "lib" / library).read_bytes()
        names = {name.decode() for name in re.findall(rb"\0((?:cu[A-Z]|nvml)\w{3,50})(?=\0)", text)}
        looked_up = {
            name for name in names if name in real[0] or f"{name}_v2" in real[0] or name.startswith("nvml")
        }
        assert {name for name in looked_up if name not in offered and f"{name}_v2" not in offered} == set()


def test_driver_functions_that_tritons_module_is_linked_with_exist():
    looked_up = {"cuLaunchKernelExHandle", "cuOccupancyMaxActiveClusters"}
    source = (PACKAGES / "triton/backends/nvidia/driver.c").read_text()
    linked = set(re.findall(r"\bcu(?!TensorMap)[A-Z]\w+(?=\()", source)) - looked_up
    linked.add("cuStreamIsCapturing")  # since Triton 3.9, of PyTorch 2.15
    command = ("nm", "-D", "--defined-only", str(build_ghost().library))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert linked - set(done.stdout.split()) == set()
