/* Kernels: queried and launched. None runs; launches are counted, and each may have written to any device
 * memory (core/remembered_bytes.c).
 */
#include "cuda/stream_captures.h"

/* ---- Launches -------------------------------------------------------------------------------- */

static status launched(const void *stream)
{
    COUNT(launches);
    note_stream_work(stream);
    forget_everything();
    return SUCCESS;
}

/* kernel<<<grid, block, shared, stream>>>(...) pushes its configuration and calls the kernel's host function,
 * which pops it again. */
#define DEEPEST 16

static _Thread_local struct configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configurations[DEEPEST];
static _Thread_local int depth;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    if (depth == DEEPEST)
        return INVALID_CONFIGURATION; /* the caller then skips the launch */
    configurations[depth++] = (struct configuration){grid, block, shared, stream};
    return SUCCESS;
}

API status __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream)
{
    if (depth == 0)
        return ghost_fail(INVALID_CONFIGURATION);
    const struct configuration *last = &configurations[--depth];
    *grid = last->grid;
    *block = last->block;
    *shared = last->shared;
    *stream = last->stream;
    return SUCCESS;
}

ENTRY(__cudaGetKernel(const void **kernel, const void *function), *kernel = function)
CALL(cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                      void *stream),
     launched(stream))
ALSO(__cudaLaunchKernel, cudaLaunchKernel)
ALSO(cudaLaunchCooperativeKernel, cudaLaunchKernel)

/* Source: driver_types.h, cudaLaunchConfig_t. */
struct launch_config {
    dim3 grid, block;
    size_t shared;
    void *stream;
    void *attributes;
    unsigned attribute_count;
};

CALL(cudaLaunchKernelExC(const struct launch_config *config, const void *function, void **arguments),
     launched(config->stream))
CALL(cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                    unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                    void **extra),
     launched(stream))
CALL(cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                               void *stream, void **arguments),
     launched(stream))

/* Source: cuda.h, CUlaunchConfig. */
struct driver_launch_config {
    unsigned grid[3], block[3], shared;
    void *stream;
    void *attributes;
    unsigned attribute_count;
};

CALL(cuLaunchKernelEx(const struct driver_launch_config *config, void *function, void **arguments,
                      void **extra),
     launched(config->stream))

/* ---- Kernel attributes ----------------------------------------------------------------------- */

/* The registers and shared memory of a kernel are in a binary that is never read, so they are assumed. They
 * decide launch shapes and, through occupancy, the size of a few reduction buffers. */
#define REGISTERS_ASSUMED 32

/* Source: driver_types.h 12.8 and 13.0, cudaFuncAttributes. */
struct function_attributes {
    size_t shared_size_bytes, const_size_bytes, local_size_bytes;
    int max_threads_per_block;
    int num_regs;
    int ptx_version;
    int binary_version;
    int cache_mode_ca;
    int max_dynamic_shared_size_bytes;
    int preferred_shmem_carveout;
    int clusters[6]; /* clusterDimMustBeSet .. nonPortableClusterSizeAllowed */
    int reserved[16];
};
_Static_assert(sizeof(struct function_attributes) == 144, "cudaFuncAttributes");

API status cudaFuncGetAttributes(struct function_attributes *attributes, const void *function)
{
    int architecture = kernel_architecture(function);
    *attributes = (struct function_attributes){
        .max_threads_per_block = 1024,
        .num_regs = REGISTERS_ASSUMED,
        .ptx_version = architecture,
        .binary_version = architecture,
        .max_dynamic_shared_size_bytes = (int)ghost_spec.shared_per_block,
        .preferred_shmem_carveout = -1, /* the driver chooses */
    };
    return SUCCESS;
}

/* Source: cuda.h, CUfunction_attribute. */
enum { FUNCTION_MAX_THREADS_PER_BLOCK = 0, FUNCTION_REGISTERS = 4 };

API status cuFuncGetAttribute(int *value, int attribute, void *function)
{
    *value = attribute == FUNCTION_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == FUNCTION_REGISTERS           ? REGISTERS_ASSUMED
                                                         : 0;
    return SUCCESS;
}

static int occupancy(int block_size, size_t shared)
{
    int blocks = block_size > 0 ? ghost_spec.threads_per_multiprocessor / block_size : 1;
    if (blocks > ghost_spec.blocks_per_multiprocessor)
        blocks = ghost_spec.blocks_per_multiprocessor;
    if (shared > 0 && (uint64_t)blocks > ghost_spec.shared_per_multiprocessor / shared)
        blocks = (int)(ghost_spec.shared_per_multiprocessor / shared);
    return blocks < 1 ? 1 : blocks;
}

ENTRY(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                             int block_size, size_t shared, unsigned flags),
      *blocks = occupancy(block_size, shared))
ENTRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                    size_t shared),
      *blocks = occupancy(block_size, shared))
ALSO(cuOccupancyMaxActiveBlocksPerMultiprocessor, cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ENTRY(cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config), *clusters = 1)

/* The device address of a __device__ variable. Its bytes are never known, so all variables share one address
 * of the malloc arena. */
API status cudaGetSymbolAddress(void **address, const void *symbol)
{
    static uint64_t variables;
    ghost_lock();
    if (!variables)
        variables = address_take(ARENA_MALLOC, MIB);
    ghost_unlock();
    *address = (void *)variables;
    return variables ? SUCCESS : ghost_fail(OUT_OF_MEMORY);
}
