/* Device memory: cudaMalloc and cudaFree, the stream-ordered pools, and how much is left.
 *
 * What an allocation takes from the capacity is assumed, not documented by NVIDIA: 2 MiB granules
 * from 1 MiB upwards (the granularity cuMemGetAllocationGranularity reports for device memory) and
 * 512 bytes below. PyTorch's caching allocator asks for multiples of 2 MiB only, so the assumption
 * touches nothing there; it shows when caching is switched off (PYTORCH_NO_CUDA_MEMORY_CACHING).
 *
 * A call that fails changes nothing.
 */
#include "ghost.h"

#include <stdlib.h>

#define GRANULE (2 * MIB)
#define ALIGNMENT ((uint64_t)512)
#define MOST (1024 * TIB)

struct allocation {
    uint64_t address;
    uint64_t size;  /* bytes as requested */
    uint64_t taken; /* bytes of capacity; of its pool where `pooled` */
    int device;
    bool pooled;
};

static struct table live; /* by address */

static uint64_t round_up(uint64_t size, uint64_t multiple)
{
    return (size + multiple - 1) / multiple * multiple;
}

static uint64_t bytes_taken(uint64_t size, bool pooled)
{
    if (size > MOST)
        return MOST; /* more than any capacity: refused, without overflowing on the way */
    return round_up(size, size >= MIB && !pooled ? GRANULE : ALIGNMENT);
}

/* ---- The log, for allocators that PyTorch keeps no history of -------------------------------- */

static struct {
    bool on;
    struct ghost_event *events;
    size_t length, capacity;
} allocation_log;
static _Thread_local uint64_t label;

static void log_event(enum ghost_action action, int device, uint64_t address, uint64_t size,
                      const void *stream)
{
    if (!allocation_log.on)
        return;
    if (allocation_log.length == allocation_log.capacity) {
        size_t capacity = allocation_log.capacity ? 2 * allocation_log.capacity : 1024;
        void *larger = realloc(allocation_log.events, capacity * sizeof *allocation_log.events);
        if (!larger) {
            allocation_log.on = false; /* a log with a hole would be a lie; it ends here */
            return;
        }
        allocation_log.events = larger;
        allocation_log.capacity = capacity;
    }
    allocation_log.events[allocation_log.length++] = (struct ghost_event){
        action, device, address, size, (uint64_t)stream, label, ghost_now_us(),
    };
}

API void ghost_set_label(uint64_t value) { label = value; }

uint64_t ghost_label(void) { return label; }

API void ghost_log_allocations(int on)
{
    ghost_lock();
    allocation_log.on = on;
    if (on)
        allocation_log.length = 0;
    ghost_unlock();
}

API size_t ghost_allocation_log(struct ghost_event *out, size_t capacity)
{
    ghost_lock();
    for (size_t i = 0; i < allocation_log.length && i < capacity; i++)
        out[i] = allocation_log.events[i];
    size_t length = allocation_log.length;
    ghost_unlock();
    return length;
}

/* ---- Pools: cudaMallocAsync ------------------------------------------------------------------ */

/* One default pool per device. Assumed: it rounds to 512 bytes, takes memory from the device in
 * pieces of 32 MiB, reuses what was freed without fragmentation, and keeps it until a synchronisation finds more
 * reserved than the release threshold. PyTorch's backend:cudaMallocAsync sets the threshold to
 * the largest value, so there only cudaMemPoolTrimTo gives memory back. */
#define POOL_PIECE (32 * MIB)

struct pool {
    uint64_t used, used_high, reserved, reserved_high, threshold;
};

static struct pool pools[MAX_DEVICES];

static bool pool_take(int device, uint64_t bytes)
{
    struct pool *pool = &pools[device];
    uint64_t wanted = round_up(pool->used + bytes, POOL_PIECE);
    if (wanted > pool->reserved) {
        if (!capacity_take(device, wanted - pool->reserved))
            return false;
        pool->reserved = wanted;
    }
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return true;
}

/* What the device has left, and for an allocation from the pool what lies idle in it. */
static uint64_t bytes_free(int device, bool pooled)
{
    uint64_t used = capacity_used(device), total = ghost_spec.total_bytes;
    uint64_t idle = pooled ? pools[device].reserved - pools[device].used : 0;
    return (used < total ? total - used : 0) + idle;
}

static void pool_trim(int device, uint64_t keep)
{
    struct pool *pool = &pools[device];
    uint64_t least = round_up(pool->used > keep ? pool->used : keep, POOL_PIECE);
    if (pool->reserved > least) {
        capacity_give(device, pool->reserved - least);
        pool->reserved = least;
    }
}

void pools_synchronized(void)
{
    ghost_lock();
    for (int device = 0; device < ghost_device_count; device++)
        if (pools[device].reserved > pools[device].threshold)
            pool_trim(device, pools[device].threshold);
    ghost_unlock();
}

/* ---- Allocating and freeing ------------------------------------------------------------------ */

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
    if (taken && made->address && table_put(&live, made->address, made)) {
        *out = (void *)made->address;
        log_event(pooled ? GHOST_MALLOC_ASYNC : GHOST_MALLOC, device, made->address, bytes, stream);
        ghost_unlock();
        return SUCCESS;
    }

    if (taken && made->address)
        address_give(ARENA_MALLOC, made->address, bytes);
    if (taken && pooled)
        pools[device].used -= bytes;
    else if (taken)
        capacity_give(device, bytes);
    log_event(GHOST_OUT_OF_MEMORY, device, bytes_free(device, pooled), size, stream);
    ghost_unlock();
    free(made);
    return ghost_fail(OUT_OF_MEMORY);
}

static status release(void *pointer, enum ghost_action action, const void *stream)
{
    if (!pointer)
        return SUCCESS;
    ghost_lock();
    struct allocation *gone = table_remove(&live, (uint64_t)pointer);
    if (gone) {
        COUNT(frees);
        if (gone->pooled)
            pools[gone->device].used -= gone->taken;
        else
            capacity_give(gone->device, gone->taken);
        address_give(ARENA_MALLOC, gone->address, gone->taken);
        log_event(action, gone->device, gone->address, gone->taken, stream);
    }
    ghost_unlock();
    if (!gone)
        return ghost_fail(INVALID_VALUE);
    forget(gone->address, gone->taken);
    free(gone);
    return SUCCESS;
}

API status cudaMalloc(void **pointer, size_t size) { return allocate(pointer, size, false, NULL); }

API status cudaFree(void *pointer)
{
    everything_synchronized(); /* cudaFree waits for the device; PyTorch relies on it */
    return free_managed(pointer) ? SUCCESS : release(pointer, GHOST_FREE, NULL);
}

API status cudaMallocAsync(void **pointer, size_t size, void *stream)
{
    return allocate(pointer, size, true, stream);
}

API status cudaFreeAsync(void *pointer, void *stream) { return release(pointer, GHOST_FREE_ASYNC, stream); }

API status cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    ghost_lock();
    uint64_t used = capacity_used(ghost_current_device);
    *total = ghost_spec.total_bytes;
    *free_bytes = used < *total ? *total - used : 0;
    ghost_unlock();
    return SUCCESS;
}

/* ---- Which allocation an address lies in ----------------------------------------------------- */

/* Slots are powers of two aligned to their own size, so an address inside one is traced to its
 * start by trying each size. */
static const struct allocation *around(uint64_t address)
{
    for (int order = 9; order < 47; order++) {
        const struct allocation *found = table_get(&live, address & ~(((uint64_t)1 << order) - 1));
        if (found && address - found->address < found->taken)
            return found;
    }
    return NULL;
}

int allocation_device(uint64_t address)
{
    ghost_lock();
    const struct allocation *found = around(address);
    int device = found ? found->device : -1;
    ghost_unlock();
    return device;
}

bool allocation_range(uint64_t address, uint64_t *start, uint64_t *size)
{
    ghost_lock();
    const struct allocation *found = around(address);
    if (found) {
        *start = found->address;
        *size = found->size;
    }
    ghost_unlock();
    return found != NULL;
}

/* ---- Pool attributes ------------------------------------------------------------------------- */

/* Source: driver_types.h, cudaMemPoolAttr. The first three are ints, the others 64 bits wide. */
enum pool_attribute {
    REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
    REUSE_ALLOW_OPPORTUNISTIC = 2,
    REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
    RELEASE_THRESHOLD = 4,
    RESERVED_CURRENT = 5,
    RESERVED_HIGH = 6,
    USED_CURRENT = 7,
    USED_HIGH = 8,
};

API status cudaDeviceGetDefaultMemPool(void **pool, int device)
{
    if (device < 0 || device >= ghost_device_count)
        return ghost_fail(INVALID_DEVICE);
    *pool = &pools[device];
    return SUCCESS;
}

API status cudaMemPoolGetAttribute(void *handle, int attribute, void *value)
{
    const struct pool *pool = handle;
    status result = SUCCESS;
    ghost_lock();
    switch (attribute) {
    case REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case REUSE_ALLOW_OPPORTUNISTIC:
    case REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = 1; break;
    case RELEASE_THRESHOLD: *(uint64_t *)value = pool->threshold; break;
    case RESERVED_CURRENT: *(uint64_t *)value = pool->reserved; break;
    case RESERVED_HIGH: *(uint64_t *)value = pool->reserved_high; break;
    case USED_CURRENT: *(uint64_t *)value = pool->used; break;
    case USED_HIGH: *(uint64_t *)value = pool->used_high; break;
    default: result = INVALID_VALUE;
    }
    ghost_unlock();
    return result ? ghost_fail(result) : SUCCESS;
}

API status cudaMemPoolSetAttribute(void *handle, int attribute, void *value)
{
    struct pool *pool = handle;
    status result = SUCCESS;
    ghost_lock();
    switch (attribute) {
    case REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case REUSE_ALLOW_OPPORTUNISTIC:
    case REUSE_ALLOW_INTERNAL_DEPENDENCIES: break; /* reuse is perfect here either way */
    case RELEASE_THRESHOLD: pool->threshold = *(uint64_t *)value; break;
    case RESERVED_HIGH: pool->reserved_high = pool->reserved; break; /* only a reset is allowed */
    case USED_HIGH: pool->used_high = pool->used; break;
    default: result = INVALID_VALUE;
    }
    ghost_unlock();
    return result ? ghost_fail(result) : SUCCESS;
}

API status cudaMemPoolSetAccess(void *pool, const void *descriptions, size_t count) { return SUCCESS; }

API status cudaMemPoolTrimTo(void *pool, size_t keep)
{
    ghost_lock();
    pool_trim((int)((struct pool *)pool - pools), keep);
    ghost_unlock();
    return SUCCESS;
}

/* Memory of graphs' own allocation nodes: the ghost has none. */
API status cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value)
{
    *(uint64_t *)value = 0;
    return SUCCESS;
}

API status cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) { return SUCCESS; }
