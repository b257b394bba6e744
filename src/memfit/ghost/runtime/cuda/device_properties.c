/* The properties and attributes of the configured device.
 *
 * Values without a configured field are those of every card since Volta (warps of 32 threads,
 * 1,024 threads a block, 65,536 registers a multiprocessor: CUDA C++ Programming Guide, table of
 * technical specifications per compute capability).
 */
#include "core/ghost.h"

#include <stdio.h>
#include <string.h>

#define THREADS_PER_BLOCK 1024
#define REGISTERS 65536
#define LONGEST_GRID 2147483647
#define LONGEST_PITCH 2147483647
#define RESERVED_SHARED 1024 /* bytes of each block's shared memory that CUDA keeps, from 8.0 on */

static bool valid(int device) { return device >= 0 && device < ghost_device_count; }

static int reserved_shared(void) { return ghost_spec.major >= 8 ? RESERVED_SHARED : 0; }

/* ---- Choosing -------------------------------------------------------------------------------- */

API status cudaGetDeviceCount(int *count)
{
    *count = ghost_device_count;
    return SUCCESS;
}

API status cudaGetDevice(int *device)
{
    *device = ghost_current_device;
    return SUCCESS;
}

API status cudaSetDevice(int device)
{
    if (!valid(device))
        return ghost_fail(INVALID_DEVICE);
    ghost_current_device = device;
    return SUCCESS;
}

API status cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return SUCCESS;
}

API status cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }

API status cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer;
    return SUCCESS;
}

API status cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return SUCCESS; }

API status cudaDeviceGetPCIBusId(char *text, int capacity, int device)
{
    if (!valid(device) || capacity < 13)
        return ghost_fail(INVALID_VALUE);
    snprintf(text, (size_t)capacity, "0000:%02x:00.0", (device + 1) & 0xff);
    return SUCCESS;
}

/* ---- Properties ------------------------------------------------------------------------------ */

/* Source: driver_types.h of CUDA 13.0 and 12.8, cudaDeviceProp. CUDA 13 dropped seven fields, and
 * the function that fills the CUDA 12 record is cudaGetDeviceProperties_v2. */
struct properties {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luid_device_node_mask;
    size_t total_global_mem;
    size_t shared_mem_per_block;
    int regs_per_block;
    int warp_size;
    size_t mem_pitch;
    int max_threads_per_block;
    int max_threads_dim[3];
    int max_grid_size[3];
#if CUDA_VERSION < 13000
    int clock_rate;
#endif
    size_t total_const_mem;
    int major;
    int minor;
    size_t texture_alignment;
    size_t texture_pitch_alignment;
#if CUDA_VERSION < 13000
    int device_overlap;
#endif
    int multi_processor_count;
#if CUDA_VERSION < 13000
    int kernel_exec_timeout_enabled;
#endif
    int integrated;
    int can_map_host_memory;
#if CUDA_VERSION < 13000
    int compute_mode;
    int max_texture_1d_linear;
#endif
    int textures_and_surfaces[39]; /* maxTexture1D .. maxSurfaceCubemapLayered: zeros */
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc_enabled;
    int pci_bus_id;
    int pci_device_id;
    int pci_domain_id;
    int tcc_driver;
    int async_engine_count;
    int unified_addressing;
#if CUDA_VERSION < 13000
    int memory_clock_rate;
#endif
    int memory_bus_width;
    int l2_cache_size;
    int persisting_l2_cache_max_size;
    int max_threads_per_multi_processor;
    int stream_priorities_supported;
    int global_l1_cache_supported;
    int local_l1_cache_supported;
    size_t shared_mem_per_multiprocessor;
    int regs_per_multiprocessor;
    int managed_memory;
    int is_multi_gpu_board;
    int multi_gpu_board_group_id;
    int host_native_atomic_supported;
#if CUDA_VERSION < 13000
    int single_to_double_precision_perf_ratio;
#endif
    int pageable_memory_access;
    int concurrent_managed_access;
    int compute_preemption_supported;
    int can_use_host_pointer_for_registered_mem;
    int cooperative_launch;
#if CUDA_VERSION < 13000
    int cooperative_multi_device_launch;
#endif
    size_t shared_mem_per_block_optin;
    int pageable_memory_access_uses_host_page_tables;
    int direct_managed_mem_access_from_host;
    int max_blocks_per_multi_processor;
    int access_policy_max_window_size;
    size_t reserved_shared_mem_per_block;
    int host_register_supported;
    int sparse_cuda_array_supported;
    int host_register_read_only_supported;
    int timeline_semaphore_interop_supported;
    int memory_pools_supported;
    int gpu_direct_rdma_supported;
    unsigned gpu_direct_rdma_flush_writes_options;
    int gpu_direct_rdma_writes_ordering;
    unsigned memory_pool_supported_handle_types;
    int deferred_mapping_cuda_array_supported;
    int ipc_event_supported;
    int cluster_launch;
    int unified_function_pointers;
    int rest[63]; /* NUMA and PCI identities, and room reserved by the header: zeros */
};

static status fill_properties(struct properties *properties, int device)
{
    if (!valid(device))
        return ghost_fail(INVALID_DEVICE);
    *properties = (struct properties){
        .uuid = {'g', 'h', 'o', 's', 't', (char)device},
        .total_global_mem = ghost_spec.total_bytes,
        .shared_mem_per_block = ghost_spec.shared_per_block,
        .regs_per_block = REGISTERS,
        .warp_size = 32,
        .mem_pitch = LONGEST_PITCH,
        .max_threads_per_block = THREADS_PER_BLOCK,
        .max_threads_dim = {1024, 1024, 64},
        .max_grid_size = {LONGEST_GRID, 65535, 65535},
        .total_const_mem = 64 * KIB,
        .major = ghost_spec.major,
        .minor = ghost_spec.minor,
        .texture_alignment = 512,
        .texture_pitch_alignment = 32,
        .multi_processor_count = ghost_spec.multiprocessors,
        .can_map_host_memory = 1,
#if CUDA_VERSION < 13000
        .clock_rate = ghost_spec.clock_khz,
        .memory_clock_rate = ghost_spec.memory_clock_khz,
        .device_overlap = 1,
#endif
        .surface_alignment = 512,
        .concurrent_kernels = 1,
        .pci_bus_id = device + 1,
        .async_engine_count = 3,
        .unified_addressing = 1,
        .memory_bus_width = ghost_spec.memory_bus_bits,
        .l2_cache_size = ghost_spec.l2_bytes,
        .max_threads_per_multi_processor = ghost_spec.threads_per_multiprocessor,
        .stream_priorities_supported = 1,
        .global_l1_cache_supported = 1,
        .local_l1_cache_supported = 1,
        .shared_mem_per_multiprocessor = ghost_spec.shared_per_multiprocessor,
        .regs_per_multiprocessor = REGISTERS,
        .managed_memory = 1,
        .compute_preemption_supported = 1,
        .cooperative_launch = 1,
        .shared_mem_per_block_optin = ghost_spec.shared_per_block_optin,
        .max_blocks_per_multi_processor = ghost_spec.blocks_per_multiprocessor,
        .reserved_shared_mem_per_block = (size_t)reserved_shared(),
        .host_register_supported = 1,
        .memory_pools_supported = 1,
        .cluster_launch = ghost_spec.major >= 9,
    };
    memcpy(properties->name, ghost_spec.name, sizeof properties->name);
    return SUCCESS;
}

#if CUDA_VERSION >= 13000
_Static_assert(sizeof(struct properties) == 1008, "cudaDeviceProp, CUDA 13.0");

API status cudaGetDeviceProperties(struct properties *properties, int device)
{
    return fill_properties(properties, device);
}
#else
_Static_assert(sizeof(struct properties) == 1032, "cudaDeviceProp, CUDA 12.8");

API status cudaGetDeviceProperties_v2(struct properties *properties, int device)
{
    return fill_properties(properties, device);
}
#endif

/* ---- Attributes ------------------------------------------------------------------------------ */

/* Source: driver_types.h, cudaDeviceAttr (CUdevice_attribute of cuda.h has the same numbers). */
enum device_attribute {
    MAX_THREADS_PER_BLOCK = 1,
    MAX_BLOCK_DIM_X = 2,
    MAX_BLOCK_DIM_Y = 3,
    MAX_BLOCK_DIM_Z = 4,
    MAX_GRID_DIM_X = 5,
    MAX_GRID_DIM_Y = 6,
    MAX_GRID_DIM_Z = 7,
    MAX_SHARED_MEMORY_PER_BLOCK = 8,
    TOTAL_CONSTANT_MEMORY = 9,
    WARP_SIZE = 10,
    MAX_PITCH = 11,
    MAX_REGISTERS_PER_BLOCK = 12,
    CLOCK_RATE = 13,
    TEXTURE_ALIGNMENT = 14,
    GPU_OVERLAP = 15,
    MULTIPROCESSOR_COUNT = 16,
    CAN_MAP_HOST_MEMORY = 19,
    CONCURRENT_KERNELS = 31,
    PCI_BUS_ID = 33,
    MEMORY_CLOCK_RATE = 36,
    GLOBAL_MEMORY_BUS_WIDTH = 37,
    L2_CACHE_SIZE = 38,
    MAX_THREADS_PER_MULTIPROCESSOR = 39,
    ASYNC_ENGINE_COUNT = 40,
    UNIFIED_ADDRESSING = 41,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    STREAM_PRIORITIES_SUPPORTED = 78,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
    MANAGED_MEMORY = 83,
    COMPUTE_PREEMPTION_SUPPORTED = 90,
    COOPERATIVE_LAUNCH = 95,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    HOST_REGISTER_SUPPORTED = 99,
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102, /* the driver's name only */
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
    MEMORY_POOLS_SUPPORTED = 115,
    CLUSTER_LAUNCH = 120,
    LAST_ATTRIBUTE = 255,
};

static int attribute_value(int attribute, int device)
{
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK:
    case MAX_BLOCK_DIM_X:
    case MAX_BLOCK_DIM_Y: return THREADS_PER_BLOCK;
    case MAX_BLOCK_DIM_Z: return 64;
    case MAX_GRID_DIM_X: return LONGEST_GRID;
    case MAX_GRID_DIM_Y:
    case MAX_GRID_DIM_Z: return 65535;
    case MAX_SHARED_MEMORY_PER_BLOCK: return (int)ghost_spec.shared_per_block;
    case TOTAL_CONSTANT_MEMORY: return 64 * KIB;
    case WARP_SIZE: return 32;
    case MAX_PITCH: return LONGEST_PITCH;
    case MAX_REGISTERS_PER_BLOCK:
    case MAX_REGISTERS_PER_MULTIPROCESSOR: return REGISTERS;
    case CLOCK_RATE: return ghost_spec.clock_khz;
    case TEXTURE_ALIGNMENT: return 512;
    case MULTIPROCESSOR_COUNT: return ghost_spec.multiprocessors;
    case PCI_BUS_ID: return device + 1;
    case MEMORY_CLOCK_RATE: return ghost_spec.memory_clock_khz;
    case GLOBAL_MEMORY_BUS_WIDTH: return ghost_spec.memory_bus_bits;
    case L2_CACHE_SIZE: return ghost_spec.l2_bytes;
    case MAX_THREADS_PER_MULTIPROCESSOR: return ghost_spec.threads_per_multiprocessor;
    case ASYNC_ENGINE_COUNT: return 3;
    case COMPUTE_CAPABILITY_MAJOR: return ghost_spec.major;
    case COMPUTE_CAPABILITY_MINOR: return ghost_spec.minor;
    case MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return (int)ghost_spec.shared_per_multiprocessor;
    case MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return (int)ghost_spec.shared_per_block_optin;
    case MAX_BLOCKS_PER_MULTIPROCESSOR: return ghost_spec.blocks_per_multiprocessor;
    case RESERVED_SHARED_MEMORY_PER_BLOCK: return reserved_shared();
    case CLUSTER_LAUNCH: return ghost_spec.major >= 9;
    case GPU_OVERLAP:
    case CAN_MAP_HOST_MEMORY:
    case CONCURRENT_KERNELS:
    case UNIFIED_ADDRESSING:
    case STREAM_PRIORITIES_SUPPORTED:
    case MANAGED_MEMORY:
    case COMPUTE_PREEMPTION_SUPPORTED:
    case COOPERATIVE_LAUNCH:
    case HOST_REGISTER_SUPPORTED:
    case VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case MEMORY_POOLS_SUPPORTED: return 1;
    /* Sharing memory between processes, RDMA, multicast, fabric, NUMA, textures: not offered. */
    default: return 0;
    }
}

API status cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    if (!valid(device))
        return ghost_fail(INVALID_DEVICE);
    if (attribute <= 0 || attribute > LAST_ATTRIBUTE)
        return ghost_fail(INVALID_VALUE);
    *value = attribute_value(attribute, device);
    return SUCCESS;
}
