/* Host memory that CUDA knows: pinned, registered and managed. All of it is ordinary host memory, because
 * the script (and the ghost's own copies) read and write it.
 *
 * PyTorch's is_pinned asks about addresses inside a range, too, so the ranges are kept sorted and searched
 * by bisection.
 */
#include "core/ghost.h"

#include <string.h>
#include <sys/mman.h>

#include "array.h"

#define PAGE 4096
#define LARGE (1 << 20)

struct host_range {
    uint64_t start, size;
    int type;
    int device;
    bool owned; /* allocated and freed here; otherwise registered */
};

static struct {
    ARRAY(struct host_range);
} ranges; /* by start; they do not overlap */

/* The index of the first range that starts after `address`. */
static size_t after(uint64_t address)
{
    size_t low = 0, high = ranges.count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges.items[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct host_range *containing(uint64_t address)
{
    size_t at = after(address);
    if (at == 0 || address - ranges.items[at - 1].start >= ranges.items[at - 1].size)
        return NULL;
    return &ranges.items[at - 1];
}

static status add_range(void *start, size_t size, int type, bool owned)
{
    struct host_range made = {(uint64_t)start, size ? size : 1, type, ghost_current_device, owned};
    HOLD_LOCK;
    size_t at = after(made.start);
    if (containing(made.start) || (at < ranges.count && ranges.items[at].start - made.start < made.size))
        return HOST_MEMORY_REGISTERED;
    struct host_range *place = array_insert(&ranges, at);
    if (!place)
        return OUT_OF_MEMORY;
    *place = made;
    return SUCCESS;
}

/* Remove the range that starts exactly there from the list. Returns whether there was one. */
static bool remove_range(void *start, bool owned)
{
    HOLD_LOCK;
    struct host_range *found = containing((uint64_t)start);
    if (!found || found->start != (uint64_t)start || found->owned != owned)
        return false;
    array_remove(&ranges, (size_t)(found - ranges.items));
    return true;
}

static status allocate(void **pointer, size_t size, int type)
{
    *pointer = NULL;
    void *made;
    if (posix_memalign(&made, PAGE, size ? size : 1) != 0)
        return ghost_fail(OUT_OF_MEMORY);
    status result = add_range(made, size, type, true);
    if (result != SUCCESS) {
        free(made);
        return ghost_fail(result);
    }
    *pointer = made;
    return SUCCESS;
}

CALL(cudaHostAlloc(void **pointer, size_t size, unsigned flags), allocate(pointer, size, HOST))
API status cudaMallocHost(void **pointer, size_t size) { return allocate(pointer, size, HOST); }

API status cudaFreeHost(void *pointer)
{
    if (!pointer)
        return SUCCESS;
    if (!remove_range(pointer, true))
        return ghost_fail(INVALID_VALUE);
    free(pointer);
    return SUCCESS;
}

CALL(cudaHostRegister(void *pointer, size_t size, unsigned flags),
     ghost_fail(add_range(pointer, size, HOST, false)))
CALL(cudaHostUnregister(void *pointer),
     remove_range(pointer, false) ? SUCCESS : ghost_fail(HOST_MEMORY_NOT_REGISTERED))

/* There is one address space, as on every 64-bit system. */
ENTRY(cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned flags),
      *device_pointer = host_pointer)

int host_memory_type(const void *pointer, int *device)
{
    HOLD_LOCK;
    const struct host_range *found = containing((uint64_t)pointer);
    if (found && device)
        *device = found->device;
    return found ? found->type : UNREGISTERED;
}

/* Zero what a copy from the device would fill. Pages of pinned memory are given back to the kernel, and read as
 * zeros: offloaded tensors of a large GPU would not fit this machine's memory. */
void zero_host_memory(unsigned char *to, uint64_t size)
{
    if (size >= LARGE) {
        ghost_lock();
        const struct host_range *found = containing((uint64_t)to);
        bool ours = found && found->owned && (uint64_t)to + size <= found->start + found->size;
        ghost_unlock();
        uint64_t before = (PAGE - (uint64_t)to % PAGE) % PAGE;
        uint64_t pages = (size - before) / PAGE * PAGE;
        if (ours && madvise(to + before, pages, MADV_DONTNEED) == 0) {
            memset(to, 0, before);
            memset(to + before + pages, 0, size - before - pages);
            return;
        }
    }
    memset(to, 0, size);
}

/* ---- Managed memory -------------------------------------------------------------------------- */

/* Managed memory stays on the host here. On a card it moves to the device when kernels touch it, and away
 * again when cudaMalloc needs the room, so it takes nothing from the capacity. */
API status cudaMallocManaged(void **pointer, size_t size, unsigned flags)
{
    ghost_assumed("managed memory uses 0 bytes of the device (cudaMallocManaged)");
    return allocate(pointer, size, MANAGED);
}

bool free_managed(void *pointer)
{
    return host_memory_type(pointer, NULL) == MANAGED && !cudaFreeHost(pointer);
}

/* Hints on where the memory should be and how it will be used are ignored. Source: cuda_runtime_api.h;
 * CUDA 13 replaced the device's number by a location. */
#if CUDA_VERSION >= 13000
struct memory_location {
    int type, id;
};

CALL(cudaMemPrefetchAsync(const void *pointer, size_t size, struct memory_location to, unsigned flags,
                          void *stream),
     SUCCESS)
CALL(cudaMemAdvise(const void *pointer, size_t size, int advice, struct memory_location where), SUCCESS)
#else
CALL(cudaMemPrefetchAsync(const void *pointer, size_t size, int device, void *stream), SUCCESS)

API status cudaMemAdvise(const void *pointer, size_t size, int advice, int device) { return SUCCESS; }
#endif
