/* Device memory: cudaMalloc and cudaFree, with or without a pool, and how much is left.
 *
 * What an allocation takes from the capacity is assumed, not documented by NVIDIA: granules of 2 MiB from
 * 1 MiB upwards (units.h) and multiples of 512 bytes below. PyTorch's caching allocator requests multiples
 * of 2 MiB only, so the assumption changes nothing there; it matters when caching is off
 * (PYTORCH_NO_CUDA_MEMORY_CACHING).
 *
 * A call that fails changes nothing.
 */
#include "cuda/stream_marks.h"
#include "core/ghost.h"

#include "hash_table.h"

#define MOST (1024 * TIB)

struct allocation {
    uint64_t address;
    uint64_t size;  /* bytes as requested */
    uint64_t taken; /* bytes of capacity; of its pool where `pooled` */
    int device;
    bool pooled;
};

static struct hash_table live; /* by address */

static uint64_t bytes_taken(uint64_t size, bool pooled)
{
    if (size > MOST)
        return MOST; /* more than any capacity: refused, without overflowing on the way */
    return round_up(size, size >= DEVICE_GRANULE_FROM && !pooled ? DEVICE_GRANULE : DEVICE_ALIGNMENT);
}

/* What the device has left, plus the pool's idle bytes for an allocation from it. */
static uint64_t bytes_free(int device, bool pooled)
{
    uint64_t used = capacity_used(device), total = ghost_spec.total_bytes;
    return (used < total ? total - used : 0) + (pooled ? pool_idle_bytes(device) : 0);
}

static status allocate(void **out, uint64_t size, bool pooled, const void *stream)
{
    *out = NULL;
    if (size == 0)
        return SUCCESS; /* as the runtime does: no memory, a null pointer */
    struct allocation *made = malloc(sizeof *made);
    int device = ghost_current_device;
    bool taken = false;
    uint64_t bytes = bytes_taken(size, pooled);

    ghost_lock();
    COUNT(mallocs);
    if (made) {
        *made = (struct allocation){0, size, bytes, device, pooled};
        taken = pooled ? pool_take(device, bytes) : capacity_take(device, bytes);
    }
    if (taken)
        made->address = address_take(ARENA_MALLOC, bytes);
    if (taken && made->address && hash_table_put(&live, made->address, made)) {
        *out = (void *)made->address;
        log_allocation(pooled ? GHOST_MALLOC_ASYNC : GHOST_MALLOC, device, made->address, bytes, stream);
        ghost_unlock();
        return SUCCESS;
    }

    if (taken && made->address)
        address_release(ARENA_MALLOC, made->address, bytes);
    if (taken && pooled)
        pool_release(device, bytes);
    else if (taken)
        capacity_release(device, bytes);
    log_allocation(GHOST_OUT_OF_MEMORY, device, bytes_free(device, pooled), size, stream);
    ghost_unlock();
    free(made);
    return ghost_fail(OUT_OF_MEMORY);
}

static status release(void *pointer, enum ghost_action action, const void *stream)
{
    if (!pointer)
        return SUCCESS;
    ghost_lock();
    struct allocation *gone = hash_table_remove(&live, (uint64_t)pointer);
    if (gone) {
        COUNT(frees);
        if (gone->pooled)
            pool_release(gone->device, gone->taken);
        else
            capacity_release(gone->device, gone->taken);
        address_release(ARENA_MALLOC, gone->address, gone->taken);
        log_allocation(action, gone->device, gone->address, gone->taken, stream);
    }
    ghost_unlock();
    if (!gone)
        return ghost_fail(INVALID_VALUE);
    forget(gone->address, gone->taken);
    free(gone);
    return SUCCESS;
}

API status cudaMalloc(void **pointer, size_t size)
{
    mark("malloc");
    return allocate(pointer, size, false, NULL);
}

API status cudaFree(void *pointer)
{
    mark("free");
    synchronize_everything(); /* cudaFree waits for the device; PyTorch relies on it */
    return free_managed(pointer) ? SUCCESS : release(pointer, GHOST_FREE, NULL);
}

CALL(cudaMallocAsync(void **pointer, size_t size, void *stream), allocate(pointer, size, true, stream))

API status cudaFreeAsync(void *pointer, void *stream) { return release(pointer, GHOST_FREE_ASYNC, stream); }

API status cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    HOLD_LOCK;
    *total = ghost_spec.total_bytes;
    *free_bytes = bytes_free(ghost_current_device, false);
    return SUCCESS;
}

/* ---- Which allocation contains an address ---------------------------------------------------- */

/* Slots are powers of two aligned to their own size, so the start of the slot that contains an address is
 * found by trying each size. */
bool allocation_around(uint64_t address, struct address_range *range)
{
    HOLD_LOCK;
    for (int order = 9; order < 47; order++) {
        const struct allocation *found = hash_table_get(&live, address & ~(((uint64_t)1 << order) - 1));
        if (found && address - found->address < found->taken) {
            *range = (struct address_range){found->address, found->size, found->device};
            return true;
        }
    }
    return false;
}
