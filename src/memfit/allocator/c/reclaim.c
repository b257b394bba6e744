/* Free memory that goes back to the device. reclaim.py gives the reasons. */
#include "allocator.h"

#include <stdlib.h>

/* Release a whole segment to the device; return its bytes. */
static int64_t release_block(struct allocator *a, struct block *block)
{
    int64_t size = block->size;
    pool_remove(a, block);
    head_remove(a, block);
    device_free(a, block->address, size);
    complete_all_events(a);
    a->counters.device_free++;
    a->reserved -= size;
    if (block->pool->owner != NULL)
        block->pool->owner->pieces--;
    count(a, block->pool, SEGMENT_FREE, size, 0, 0, 0);
    block_delete(a, block);
    return size;
}

static void release_blocks(struct allocator *a, struct pool *pool)
{
    size_t found, expandable = 0;
    struct block **blocks = pool_blocks(a, pool, &found);
    for (size_t i = 0; i < found; i++) {
        if (blocks[i]->expandable != NULL)
            blocks[expandable++] = blocks[i];
        else if (!block_is_split(blocks[i]))
            release_block(a, blocks[i]);
    }
    for (size_t i = 0; i < expandable; i++)
        expandable_unmap(a, blocks[i]);
    free(blocks);
}

/* Release free memory: of one private pool, or, if `only` is 0, of all pools. */
void caching_empty_cache(struct allocator *a, size_t only)
{
    if (!a->captures) {
        synchronize_and_free_events(a);
        if (only == 0) {
            release_blocks(a, &a->large);
            release_blocks(a, &a->small);
        }
    }
    size_t kept = 0;
    struct private_pool **freeable = a->freeable.items;
    for (size_t i = 0; i < a->freeable.count; i++) {
        struct private_pool *pool = freeable[i];
        if (only == 0 || only == pool->index) {
            release_blocks(a, &pool->small);
            release_blocks(a, &pool->large);
            if (pool->pieces == 0) {
                a->private_pools[pool->index] = NULL;
                continue;
            }
        }
        freeable[kept++] = pool;
    }
    a->freeable.count = kept;
}

/* Release one oversize block that is large enough, or several from the largest down. */
bool release_available_cached_blocks(struct allocator *a, struct pool *pool, int64_t stream, int64_t size)
{
    int64_t limit = a->settings.max_split_size, wanted = size > limit ? size : limit, released = 0;
    if (limit == NEVER)
        return false;
    struct list *list = list_of(a, &pool->cached, stream);
    size_t index = list_first_of(list, wanted);
    if (index < list->blocks.count && list_at(list, index)->expandable == NULL) {
        release_block(a, list_at(list, index));
        return true;
    }
    while (index-- > 0 && released < wanted) {
        struct block *block = list_at(list, index);
        if (block->size < limit)
            break;
        if (block->expandable == NULL)
            released += release_block(a, block);
    }
    return released >= wanted;
}

/* Release whole segments of the large pool that were unused for long, once enough is reserved. */
void garbage_collect_cached_blocks(struct allocator *a)
{
    if (a->reserved <= a->settings.collect_above)
        return;
    int64_t target = a->reserved - a->settings.collect_above, reclaimed = 0, age = 0;
    struct pool *pool = &a->large;
    size_t found, whole = 0; /* whole: blocks that fill their segment */
    struct block **blocks = pool_blocks(a, pool, &found);
    for (size_t i = 0; i < found; i++)
        if (!block_is_split(blocks[i])) {
            age += pool->calls - blocks[i]->gc_base;
            blocks[whole++] = blocks[i];
        }
    for (bool freed = true; reclaimed < target && freed && whole > 0;) {
        double oldest = (double)age / (double)whole;
        size_t kept = 0;
        freed = false;
        for (size_t i = 0; i < whole; i++) {
            int64_t unused_for = pool->calls - blocks[i]->gc_base;
            if (blocks[i]->expandable != NULL || (double)unused_for < oldest) {
                blocks[kept++] = blocks[i];
                continue;
            }
            freed = true;
            age -= unused_for;
            reclaimed += release_block(a, blocks[i]);
        }
        whole = kept;
    }
    free(blocks);
}
