/* CUDA graphs: while a graph is captured, and as long as it may be replayed, it has memory of its own. */

#include "cuda_heaps.h"

typedef struct {
    int device, users, is_open;
    pool_id id;
} pool;

static struct {
    ARRAY(pool);
} pools;
static int64_t open_count;

static pool *find(int device, pool_id id)
{
    for (size_t i = 0; i < pools.count; i++)
        if (pools.items[i].device == device && pools.items[i].id.high == id.high &&
            pools.items[i].id.low == id.low)
            return pools.items + i;
    return NULL;
}

int is_pool(pool_id id) { return id.high || id.low; }

int64_t captures_open(void) { return open_count; }

int capture_uses(int device, pool_id id) { return find(device, id) != NULL; }

pool_id capture_pool(int device, void *stream)
{
    const cuda_functions *cuda = cuda_driver();
    for (size_t i = 0; open_count && i < pools.count; i++) {
        int is_capturing = 0;
        if (!pools.items[i].is_open || pools.items[i].device != device)
            continue;
        if (cuda->StreamIsCapturing(stream, &is_capturing))
            cuda->GetLastError(); /* the default stream cannot be captured */
        else if (is_capturing)
            return pools.items[i].id;
    }
    return (pool_id){0, 0};
}

int capture_relax(int mode)
{
    if (open_count)
        cuda_driver()->ThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

const char *capture_begin(int device, pool_id id)
{
    for (size_t i = 0; i < pools.count; i++)
        if (pools.items[i].is_open && pools.items[i].device == device)
            return "memfit.arena: two CUDA graphs are being captured at once on one GPU. Capture one after "
                   "the other.";
    pool *found = find(device, id);
    if (!found) {
        found = array_append(&pools);
        if (!found)
            return "memfit.arena: out of host memory.";
        *found = (pool){.device = device, .id = id};
    }
    found->users++;
    found->is_open = 1;
    open_count++;
    return NULL;
}

void capture_end(int device, pool_id id)
{
    pool *found = find(device, id);
    if (!found || !found->is_open)
        return;
    found->is_open = 0;
    open_count--;
}

void capture_release(int device, pool_id id)
{
    pool *found = find(device, id);
    if (found && !--found->users)
        *found = pools.items[--pools.count];
}
