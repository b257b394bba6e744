/* The pools of captured graphs and of MemPool, made and released. */
#include "allocator.h"

#include <stdlib.h>

void pool_init(struct allocator *a, struct pool *pool, struct private_pool *owner, bool small)
{
    pool->owner = owner;
    pool->small = small;
    pool->least = small || a->settings.expandable ? MIN_BLOCK : SMALL_SIZE + 1;
}

/* Serve allocations from a private pool from now on, created if need be; 0 is the default pool. */
void caching_allocate_to(struct allocator *a, size_t index)
{
    a->allocates_to = index;
    if (index == 0)
        return;
    if (a->private_pools[index] == NULL) {
        struct private_pool *pool = APPEND(a, &a->every_pool, calloc(1, sizeof *pool));
        or_give_up(a, pool);
        pool->index = index;
        pool_init(a, &pool->small, pool, true);
        pool_init(a, &pool->large, pool, false);
        a->private_pools[index] = pool;
    }
    struct private_pool *pool = a->private_pools[index], **freeable = a->freeable.items;
    for (size_t i = 0; i < a->freeable.count && !pool->used; i++)
        if (freeable[i] == pool)
            array_remove(&a->freeable, i);
    pool->used = true;
}

/* Note that no graph or MemPool uses a private pool any more: its memory may be released. */
void caching_release_pool(struct allocator *a, size_t index)
{
    struct private_pool *pool = a->private_pools[index];
    caching_allocate_to(a, 0);
    if (pool == NULL || !pool->used)
        return;
    pool->used = false;
    APPEND(a, &a->freeable, pool);
}
