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

ENTRY(cudaGetDeviceCount(int *count), *count = ghost_device_count)
ALSO(cuDeviceGetCount, cudaGetDeviceCount)
ENTRY(cudaGetDevice(int *device), *device = ghost_current_device)
ALSO(cuCtxGetDevice, cudaGetDevice)

API status cudaSetDevice(int device)
{
    if (!valid(device))
        return ghost_fail(INVALID_DEVICE);
    ghost_current_device = device;
    return SUCCESS;
}

ENTRY(cudaRuntimeGetVersion(int *version), *version = CUDA_VERSION)
ALSO(cudaDriverGetVersion, cudaRuntimeGetVersion)
ALSO(cuDriverGetVersion, cudaRuntimeGetVersion)
ENTRY(cudaDeviceCanAccessPeer(int *can, int device, int peer), *can = device != peer)
API status cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return SUCCESS; }

/* The bus is the device's number + 1. */
API status cuDeviceGetPCIBusId(char *text, int capacity, int device)
{
    if (!valid(device) || capacity < 13)
        return INVALID_VALUE;
    snprintf(text, (size_t)capacity, "0000:%02x:00.0", (device + 1) & 0xff);
    return SUCCESS;
}

CALL(cudaDeviceGetPCIBusId(char *text, int capacity, int device),
     ghost_fail(cuDeviceGetPCIBusId(text, capacity, device)))

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

CALL(cudaGetDeviceProperties(struct properties *properties, int device), fill_properties(properties, device))
#else
_Static_assert(sizeof(struct properties) == 1032, "cudaDeviceProp, CUDA 12.8");

CALL(cudaGetDeviceProperties_v2(struct properties *properties, int device),
     fill_properties(properties, device))
#endif

/* ---- Attributes ------------------------------------------------------------------------------ */

/* Source: driver_types.h, cudaDeviceAttr (CUdevice_attribute of cuda.h has the same numbers). */
#define LAST_ATTRIBUTE 255

static int attribute_value(int attribute, int device)
{
    /* Others are 0: sharing memory between processes, RDMA, multicast, fabric, NUMA, textures. */
    const int values[LAST_ATTRIBUTE + 1] = {
        [1] = THREADS_PER_BLOCK,                          /* MaxThreadsPerBlock */
        [2] = THREADS_PER_BLOCK,                          /* MaxBlockDimX */
        [3] = THREADS_PER_BLOCK,                          /* MaxBlockDimY */
        [4] = 64,                                         /* MaxBlockDimZ */
        [5] = LONGEST_GRID,                               /* MaxGridDimX */
        [6] = 65535,                                      /* MaxGridDimY */
        [7] = 65535,                                      /* MaxGridDimZ */
        [8] = (int)ghost_spec.shared_per_block,           /* MaxSharedMemoryPerBlock */
        [9] = 64 * KIB,                                   /* TotalConstantMemory */
        [10] = 32,                                        /* WarpSize */
        [11] = LONGEST_PITCH,                             /* MaxPitch */
        [12] = REGISTERS,                                 /* MaxRegistersPerBlock */
        [13] = ghost_spec.clock_khz,                      /* ClockRate */
        [14] = 512,                                       /* TextureAlignment */
        [15] = 1,                                         /* GpuOverlap */
        [16] = ghost_spec.multiprocessors,                /* MultiProcessorCount */
        [19] = 1,                                         /* CanMapHostMemory */
        [31] = 1,                                         /* ConcurrentKernels */
        [33] = device + 1,                                /* PciBusId */
        [36] = ghost_spec.memory_clock_khz,               /* MemoryClockRate */
        [37] = ghost_spec.memory_bus_bits,                /* GlobalMemoryBusWidth */
        [38] = ghost_spec.l2_bytes,                       /* L2CacheSize */
        [39] = ghost_spec.threads_per_multiprocessor,     /* MaxThreadsPerMultiProcessor */
        [40] = 3,                                         /* AsyncEngineCount */
        [41] = 1,                                         /* UnifiedAddressing */
        [75] = ghost_spec.major,                          /* ComputeCapabilityMajor */
        [76] = ghost_spec.minor,                          /* ComputeCapabilityMinor */
        [78] = 1,                                         /* StreamPrioritiesSupported */
        [81] = (int)ghost_spec.shared_per_multiprocessor, /* MaxSharedMemoryPerMultiprocessor */
        [82] = REGISTERS,                                 /* MaxRegistersPerMultiprocessor */
        [83] = 1,                                         /* ManagedMemory */
        [90] = 1,                                         /* ComputePreemptionSupported */
        [95] = 1,                                         /* CooperativeLaunch */
        [97] = (int)ghost_spec.shared_per_block_optin,    /* MaxSharedMemoryPerBlockOptin */
        [99] = 1,                                         /* HostRegisterSupported */
        [102] = 1, /* VirtualMemoryManagementSupported, of the driver only */
        [106] = ghost_spec.blocks_per_multiprocessor, /* MaxBlocksPerMultiprocessor */
        [111] = reserved_shared(),                    /* ReservedSharedMemoryPerBlock */
        [115] = 1,                                    /* MemoryPoolsSupported */
        [120] = ghost_spec.major >= 9,                /* ClusterLaunch */
    };
    return values[attribute];
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

ALSO(cuDeviceGetAttribute, cudaDeviceGetAttribute)
