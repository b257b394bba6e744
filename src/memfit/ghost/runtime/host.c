/* Host memory that CUDA knows: pinned, registered and managed. All of it is ordinary host memory,
 * because the script (and the ghost's own copies) read and write it.
 *
 * cudaPointerGetAttributes is asked about addresses inside a range too (PyTorch's is_pinned), so
 * the ranges are kept sorted and searched by bisection.
 */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096

/* Source: driver_types.h, cudaMemoryType. */
enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2, MANAGED = 3 };

struct host_range {
    uint64_t start, size;
    int type;
    int device;
    bool owned; /* made here, to be freed here; otherwise registered */
};

static struct host_range *ranges; /* by start; they do not overlap */
static size_t range_count, range_capacity;

/* The index of the first range that starts after `address`. */
static size_t after(uint64_t address)
{
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct host_range *containing(uint64_t address)
{
    size_t at = after(address);
    if (at == 0 || address - ranges[at - 1].start >= ranges[at - 1].size)
        return NULL;
    return &ranges[at - 1];
}

static status add(void *start, size_t size, int type, bool owned)
{
    struct host_range made = {(uint64_t)start, size ? size : 1, type, ghost_current_device, owned};
    status result = SUCCESS;
    ghost_lock();
    size_t at = after(made.start);
    bool overlaps =
        containing(made.start) != NULL || (at < range_count && ranges[at].start - made.start < made.size);
    if (overlaps) {
        result = HOST_MEMORY_REGISTERED;
    } else if (range_count == range_capacity) {
        size_t capacity = range_capacity ? 2 * range_capacity : 64;
        struct host_range *larger = realloc(ranges, capacity * sizeof *larger);
        if (larger) {
            ranges = larger;
            range_capacity = capacity;
        } else {
            result = OUT_OF_MEMORY;
        }
    }
    if (result == SUCCESS) {
        memmove(&ranges[at + 1], &ranges[at], (range_count - at) * sizeof *ranges);
        ranges[at] = made;
        range_count++;
    }
    ghost_unlock();
    return result;
}

/* Take the range that starts exactly there off the list. Returns whether there was one. */
static bool take_off(void *start, bool owned)
{
    ghost_lock();
    struct host_range *found = containing((uint64_t)start);
    bool matches = found && found->start == (uint64_t)start && found->owned == owned;
    if (matches) {
        range_count--;
        memmove(found, found + 1, (size_t)(&ranges[range_count] - found) * sizeof *found);
    }
    ghost_unlock();
    return matches;
}

static status allocate(void **pointer, size_t size, int type)
{
    *pointer = NULL;
    void *made;
    if (posix_memalign(&made, PAGE, size ? size : 1) != 0)
        return ghost_fail(OUT_OF_MEMORY);
    status result = add(made, size, type, true);
    if (result != SUCCESS) {
        free(made);
        return ghost_fail(result);
    }
    *pointer = made;
    return SUCCESS;
}

API status cudaHostAlloc(void **pointer, size_t size, unsigned flags)
{
    return allocate(pointer, size, HOST);
}
API status cudaMallocHost(void **pointer, size_t size) { return allocate(pointer, size, HOST); }

API status cudaFreeHost(void *pointer)
{
    if (!pointer)
        return SUCCESS;
    if (!take_off(pointer, true))
        return ghost_fail(INVALID_VALUE);
    free(pointer);
    return SUCCESS;
}

API status cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
    status result = add(pointer, size, HOST, false);
    return result ? ghost_fail(result) : SUCCESS;
}

API status cudaHostUnregister(void *pointer)
{
    return take_off(pointer, false) ? SUCCESS : ghost_fail(HOST_MEMORY_NOT_REGISTERED);
}

API status cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned flags)
{
    *device_pointer = host_pointer; /* one address space, as on every 64-bit system */
    return SUCCESS;
}

int host_memory_type(const void *pointer)
{
    ghost_lock();
    const struct host_range *found = containing((uint64_t)pointer);
    int type = found ? found->type : UNREGISTERED;
    ghost_unlock();
    return type;
}

/* ---- Managed memory -------------------------------------------------------------------------- */

/* It is the host's alone here: on a card it moves there when kernels touch it, and away again when
 * cudaMalloc needs the room, so it takes nothing from the capacity. */
API status cudaMallocManaged(void **pointer, size_t size, unsigned flags)
{
    ghost_assumed("managed memory takes 0 bytes of the device (cudaMallocManaged)");
    return allocate(pointer, size, MANAGED);
}

bool free_managed(void *pointer) { return host_memory_type(pointer) == MANAGED && !cudaFreeHost(pointer); }

/* Where it is to lie, and how it will be used: there is one place. Source: cuda_runtime_api.h; CUDA 13
 * put a location in the place of the device's number. */
#if CUDA_VERSION >= 13000
struct memory_location {
    int type, id;
};

API status cudaMemPrefetchAsync(const void *pointer, size_t size, struct memory_location to, unsigned flags,
                                void *stream)
{
    return SUCCESS;
}

API status cudaMemAdvise(const void *pointer, size_t size, int advice, struct memory_location where)
{
    return SUCCESS;
}
#else
API status cudaMemPrefetchAsync(const void *pointer, size_t size, int device, void *stream)
{
    return SUCCESS;
}

API status cudaMemAdvise(const void *pointer, size_t size, int advice, int device) { return SUCCESS; }
#endif

/* ---- What an address is ---------------------------------------------------------------------- */

/* Source: driver_types.h 13.0; in CUDA 12 the record ends after the two pointers. */
struct pointer_attributes {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
#if CUDA_VERSION >= 13000
    long reserved[8];
#endif
};

API status cudaPointerGetAttributes(struct pointer_attributes *attributes, const void *pointer)
{
    *attributes = (struct pointer_attributes){.type = UNREGISTERED, .device = -2};
    if (is_device_address(pointer)) {
        int device = allocation_device((uint64_t)pointer);
        if (device < 0)
            device = mapping_device((uint64_t)pointer);
        if (device < 0)
            return SUCCESS; /* freed, or never handed out */
        attributes->type = DEVICE;
        attributes->device = device;
        attributes->device_pointer = (void *)pointer;
        return SUCCESS;
    }

    attributes->host_pointer = (void *)pointer;
    ghost_lock();
    const struct host_range *found = containing((uint64_t)pointer);
    if (found) {
        attributes->type = found->type;
        attributes->device = found->device;
        attributes->device_pointer = (void *)pointer;
    }
    ghost_unlock();
    return SUCCESS;
}

/* Source: cuda.h, CUpointer_attribute; those that PyTorch and Triton ask for. */
enum {
    ATTRIBUTE_MEMORY_TYPE = 2, /* unsigned: CU_MEMORYTYPE_HOST 1, CU_MEMORYTYPE_DEVICE 2 */
    ATTRIBUTE_DEVICE_POINTER = 3,
    ATTRIBUTE_HOST_POINTER = 4,
    ATTRIBUTE_BUFFER_ID = 7,
    ATTRIBUTE_IS_MANAGED = 8,
    ATTRIBUTE_DEVICE_ORDINAL = 9,
    ATTRIBUTE_RANGE_START = 11,
    ATTRIBUTE_RANGE_SIZE = 12,
};

API status cuMemGetAddressRange_v2(uint64_t *start, size_t *size, uint64_t address)
{
    uint64_t found_start, found_size;
    if (!allocation_range(address, &found_start, &found_size) &&
        !mapping_range(address, &found_start, &found_size))
        return NOT_FOUND;
    if (start)
        *start = found_start;
    if (size)
        *size = found_size;
    return SUCCESS;
}

API status cuPointerGetAttribute(void *value, int attribute, uint64_t address)
{
    struct pointer_attributes known;
    cudaPointerGetAttributes(&known, (void *)address);
    if (known.type == UNREGISTERED)
        return INVALID_VALUE; /* as for any host address that CUDA did not make */
    uint64_t start = 0, size = 0;
    switch (attribute) {
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = known.type == DEVICE ? 2 : 1; return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER: *(uint64_t *)value = address; return SUCCESS;
    case ATTRIBUTE_HOST_POINTER: *(void **)value = known.host_pointer; return SUCCESS;
    case ATTRIBUTE_IS_MANAGED: *(int *)value = known.type == MANAGED; return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = known.device; return SUCCESS;
    case ATTRIBUTE_BUFFER_ID:
    case ATTRIBUTE_RANGE_START:
        cuMemGetAddressRange_v2(&start, NULL, address);
        *(uint64_t *)value = start; /* one buffer, one start: as good an id as any */
        return SUCCESS;
    case ATTRIBUTE_RANGE_SIZE:
        cuMemGetAddressRange_v2(NULL, &size, address);
        *(size_t *)value = size;
        return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}
