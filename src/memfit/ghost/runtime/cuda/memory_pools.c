/* The stream-ordered memory pools behind cudaMallocAsync: their sizes and attributes.
 *
 * There is one default pool per device. Assumed: it rounds to 512 bytes, takes memory from the device in
 * pieces of 32 MiB, reuses freed memory without fragmentation, and keeps it until a synchronization finds
 * more reserved than the release threshold. PyTorch's backend:cudaMallocAsync sets the threshold to the
 * largest value, so there only cudaMemPoolTrimTo releases memory.
 */
#include "core/ghost.h"

#define POOL_PIECE (32 * MIB)

struct pool {
    uint64_t used, used_high, reserved, reserved_high, threshold;
};

static struct pool pools[MAX_DEVICES];

bool pool_take(int device, uint64_t bytes)
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

void pool_release(int device, uint64_t bytes) { pools[device].used -= bytes; }

uint64_t pool_idle_bytes(int device) { return pools[device].reserved - pools[device].used; }

static void pool_trim(int device, uint64_t keep)
{
    struct pool *pool = &pools[device];
    uint64_t least = round_up(pool->used > keep ? pool->used : keep, POOL_PIECE);
    if (pool->reserved > least) {
        capacity_release(device, pool->reserved - least);
        pool->reserved = least;
    }
}

void trim_pools_to_threshold(void)
{
    HOLD_LOCK;
    for (int device = 0; device < ghost_device_count; device++)
        if (pools[device].reserved > pools[device].threshold)
            pool_trim(device, pools[device].threshold);
}

/* ---- Attributes ------------------------------------------------------------------------------ */

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
    HOLD_LOCK;
    switch (attribute) {
    case REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case REUSE_ALLOW_OPPORTUNISTIC:
    case REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = 1; return SUCCESS;
    case RELEASE_THRESHOLD: *(uint64_t *)value = pool->threshold; return SUCCESS;
    case RESERVED_CURRENT: *(uint64_t *)value = pool->reserved; return SUCCESS;
    case RESERVED_HIGH: *(uint64_t *)value = pool->reserved_high; return SUCCESS;
    case USED_CURRENT: *(uint64_t *)value = pool->used; return SUCCESS;
    case USED_HIGH: *(uint64_t *)value = pool->used_high; return SUCCESS;
    default: return ghost_fail(INVALID_VALUE);
    }
}

API status cudaMemPoolSetAttribute(void *handle, int attribute, void *value)
{
    struct pool *pool = handle;
    HOLD_LOCK;
    switch (attribute) {
    case REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case REUSE_ALLOW_OPPORTUNISTIC:
    case REUSE_ALLOW_INTERNAL_DEPENDENCIES: return SUCCESS; /* reuse is perfect here either way */
    case RELEASE_THRESHOLD: pool->threshold = *(uint64_t *)value; return SUCCESS;
    case RESERVED_HIGH: pool->reserved_high = pool->reserved; return SUCCESS; /* only a reset is allowed */
    case USED_HIGH: pool->used_high = pool->used; return SUCCESS;
    default: return ghost_fail(INVALID_VALUE);
    }
}

API status cudaMemPoolSetAccess(void *pool, const void *descriptions, size_t count) { return SUCCESS; }

API status cudaMemPoolTrimTo(void *pool, size_t keep)
{
    HOLD_LOCK;
    pool_trim((int)((struct pool *)pool - pools), keep);
    return SUCCESS;
}

/* Memory of allocation nodes in graphs: the ghost has none. */
ENTRY(cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value), *(uint64_t *)value = 0)

API status cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) { return SUCCESS; }
