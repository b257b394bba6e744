/* The ordinary allocator for CUDA: heaps over address ranges whose pages are mapped when they are first
 * used.
 *
 *   addresses   | live |  free  |live| free | live |                free                 |  heap_blocks.c
 *   pages       |######|######|......|######|######|......|......|......|......|......|....|  device_pages.c
 *                mapped        spare, or not created
 *
 * Sources of the CUDA declarations: cuda.h and driver_types.h of CUDA 12.0 and 13.0, where they are the
 * same. */
#ifndef MEMFIT_CUDA_HEAPS_H
#define MEMFIT_CUDA_HEAPS_H

#include "arena.h"

/* ---- cuda_functions.c: NVIDIA's functions, from the libraries that PyTorch has loaded ------- */

typedef int status;
enum { SUCCESS = 0 };

typedef struct {
    int type, requested_handle_types;
    int location_type, location;
    void *win32;
    unsigned char flags[8];
} allocation_properties; /* CUmemAllocationProp_v1 */

typedef struct {
    int location_type, location;
    int flags;
} access; /* CUmemAccessDesc_v1 */

/* Of each function: its library, its name without cu or cuda, and its arguments. */
#define CUDA_FUNCTIONS(F)                                                                                    \
    F(RUNTIME, GetDevice, (int *))                                                                           \
    F(RUNTIME, SetDevice, (int))                                                                             \
    F(RUNTIME, GetLastError, (void))                                                                         \
    F(RUNTIME, DeviceSynchronize, (void))                                                                    \
    F(RUNTIME, MemGetInfo, (size_t *, size_t *))                                                             \
    F(RUNTIME, StreamIsCapturing, (void *, int *))                                                           \
    F(RUNTIME, ThreadExchangeStreamCaptureMode, (int *))                                                     \
    F(RUNTIME, EventCreateWithFlags, (void **, unsigned))                                                    \
    F(RUNTIME, EventRecord, (void *, void *))                                                                \
    F(RUNTIME, EventQuery, (void *))                                                                         \
    F(DRIVER, MemGetAllocationGranularity, (size_t *, const allocation_properties *, int))                   \
    F(DRIVER, MemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))                 \
    F(DRIVER, MemAddressFree, (uint64_t, size_t))                                                            \
    F(DRIVER, MemCreate, (uint64_t *, size_t, const allocation_properties *, unsigned long long))            \
    F(DRIVER, MemRelease, (uint64_t))                                                                        \
    F(DRIVER, MemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                              \
    F(DRIVER, MemSetAccess, (uint64_t, size_t, const access *, size_t))                                      \
    F(DRIVER, MemUnmap, (uint64_t, size_t))

#define CUDA_FIELD(library, name, arguments) status(*name) arguments;
typedef struct {
    CUDA_FUNCTIONS(CUDA_FIELD)
} cuda_functions;

/* Return the functions; NULL without a CUDA build of PyTorch in this process, or with too old a driver. */
const cuda_functions *cuda_driver(void);

/* ---- throw_torch_errors.c: PyTorch's own exceptions, thrown from C; no lock may be held, as these do not return */

_Noreturn void throw_out_of_memory(const char *message);
_Noreturn void throw_error(const char *message);

/* ---- device_pages.c: pages of device memory ------------------------------------------------- */

enum { GPUS = 64 };

typedef struct {
    int device;
    int64_t page_bytes, total_bytes;
    struct {
        ARRAY(uint64_t);
    } spare;                   /* handles of pages that are not mapped */
    int64_t pages, most_pages; /* that the driver counts as used, now and at the peak */
    int64_t allowed_pages;
    int64_t idle; /* bytes that were mapped for heaps, and free, after the last trim */
} gpu;

typedef struct {
    uint64_t handle;
    int is_mapped;
} page;

typedef struct range {
    gpu *gpu;
    uint64_t base;
    int64_t bytes;
    page *pages;
    int64_t mapped; /* number of mapped pages */
    struct range *next;
} range;

/* The device must be the current one on first use; NULL if the driver does not know it. */
gpu *gpu_of(int device);
gpu *gpu_known(int device);
/* Release the spare pages to the driver. */
void gpu_release(gpu *g);
/* Wait until all GPUs in use are idle. */
void gpus_synchronize(void);
/* Reserve more addresses than the GPU could have memory for; return whether that many are free. */
int range_open(range *r, gpu *g);
void range_close(range *r);
/* Map the unmapped pages of [from, to), spare ones first; return whether all of the range is mapped. */
int range_map(range *r, int64_t from, int64_t to);
/* Unmap the pages that are entirely within [from, to); they become spare. Work that used them must have
 * ended. */
void range_unmap(range *r, int64_t from, int64_t to);
int range_holds(const range *r, const void *pointer);

/* ---- heap_blocks.c: the blocks of an address range, live and free --------------------------- */

typedef struct {
    int64_t bytes;
    struct hash_table live; /* of offset + 1 to size */
    pairs free;             /* offset and size of each */
    pairs free_by_size;     /* size and offset */
} blocks;

int blocks_begin(blocks *b, int64_t bytes);
void blocks_end(blocks *b);
/* Allocate a block and return its offset; -1 if no free block is large enough. */
int64_t blocks_take(blocks *b, int64_t size);
/* Free a block and return its size; 0 if no live block begins there. */
int64_t blocks_free(blocks *b, int64_t offset);
/* Find the first free block at an offset or above it; -1 if there is none. */
int64_t blocks_next_free(const blocks *b, int64_t offset, int64_t *size);

/* ---- stream_heaps.c: blocks on pages -------------------------------------------------------- */

typedef struct {
    uint64_t high, low;
} pool_id; /* c10::cuda::MempoolId_t; {0, 0}: no captured graph */

typedef struct {
    range range;
    blocks blocks;
    const void *stream;
    pool_id pool;
    int64_t live; /* bytes */
} heap;

/* Return the heap that serves a stream, created if need be; NULL without memory for it. */
heap *heap_for(gpu *g, const void *stream, pool_id pool);
heap *heap_of(const void *pointer);
/* The heaps in no particular order; NULL after the last. */
heap *heap_at(int64_t i);
void *heap_take(heap *h, int64_t size);
int heap_free(heap *h, const void *pointer);
/* Unmap the pages without live blocks. Work that used them must have ended. */
void heap_trim(heap *h);
/* Delete a heap without live blocks, and its addresses. */
void heap_end(heap *h);

/* ---- graph_captures.c: captured graphs ------------------------------------------------------ */

int is_pool(pool_id id);
/* Begin a capture; return NULL, or an error message. */
const char *capture_begin(int device, pool_id id);
void capture_end(int device, pool_id id);
/* One graph fewer uses the pool: each begin is matched by a release. */
void capture_release(int device, pool_id id);
int64_t captures_open(void);
int capture_uses(int device, pool_id id);
/* Return the pool that a stream is being captured for; {0, 0} if it is not. */
pool_id capture_pool(int device, void *stream);
/* During a capture, set what else this thread may do; return the mode before. */
enum { RELAXED = 2 }; /* cudaStreamCaptureModeRelaxed */
int capture_relax(int mode);

/* ---- deferred_frees.c: memory that other streams use ---------------------------------------- */

/* Record that a stream uses an allocation; return whether host memory sufficed. */
int stream_use_add(const void *pointer, const void *stream);
/* Defer a free if other streams use the allocation, or if its own stream is not the next to use the
 * memory. Returns whether it was deferred; -1: forever, for lack of host memory. */
int free_defer(const void *pointer, int64_t size, int device, const void *stream, int is_next);
/* Record events for the deferred frees. Like free_finished, not during a capture. */
void free_record_events(void);
/* Return one of the oldest `among` deferred frees whose streams are done, or NULL. */
const void *free_finished(int64_t among, int64_t *size);
int64_t free_deferred_count(void);

/* ---- gpu_memory_usage.c: how a GPU's memory is used ------------------------------------------------ */

/* Bytes. */
typedef struct {
    int64_t pages, most_pages;   /* that the driver counts as used, now and at the peak */
    int64_t arena, heaps, spare; /* of the pages now */
    int64_t in_heaps;            /* live blocks of the heaps */
    int64_t live, most_live;     /* of all GPUs, as requested */
} gpu_usage;

/* Count all fields but live and most_live. */
void gpu_usage_count(int device, const range *arena, gpu_usage *out);
/* Write PyTorch's out-of-memory message for a request. */
void describe_out_of_memory(char *out, size_t room, int64_t size, int device, const range *arena);

#endif
