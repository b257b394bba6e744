/* malloc and free. caching_allocator.py gives the reasons. */
#include "allocator.h"

/* ---- Finding a block -------------------------------------------------------------------------- */

static int64_t size_to_grow_to(const struct block *block)
{
    const struct block *following = block->next;
    return block->size + (following != NULL && !following->mapped ? following->size : 0);
}

static size_t best_expandable(const struct allocator *a, const struct list *list, size_t index)
{
    if (!a->settings.expandable) {
        while (index < list->blocks.count && list_at(list, index)->expandable != NULL)
            index++;
        return index;
    }
    struct block *block = list_at(list, index);
    while (block->expandable != NULL && index + 1 < list->blocks.count) {
        struct block *following = list_at(list, index + 1);
        if (size_to_grow_to(following) >= size_to_grow_to(block))
            break;
        block = following;
        index++;
    }
    return index;
}

/* Return the index of the block to take, starting at the first that is large enough. */
static size_t choose(const struct allocator *a, struct pool *pool, const struct list *list, size_t index,
                     int64_t size)
{
    size_t none = list->blocks.count;
    int64_t limit = a->settings.max_split_size;
    pool->calls += a->collects;
    if (index < none && list_at(list, index)->expandable != NULL)
        index = best_expandable(a, list, index);
    if (index == none)
        return none;
    int64_t has = list_at(list, index)->size;
    if (size < limit && limit <= has)
        return none;
    if (size >= limit && has >= size + a->settings.max_non_split_rounding)
        return none;
    return index;
}

static void fail(struct allocator *a, int64_t size)
{
    a->failed = true;
    a->failed_size = size;
    a->failed_free = a->device.total - a->device.used;
}

static struct block *alloc_block(struct allocator *a, struct pool *pool, int64_t stream, int64_t size)
{
    int64_t wanted = segment_size(&a->settings, size);
    if (wanted > a->settings.allowed - a->reserved)
        return NULL;
    if (a->settings.throw_on_oom && wanted > a->device.total - a->device.used) {
        a->counters.oom_rejections++;
        fail(a, size);
        return NULL;
    }
    struct block *block;
    if (a->settings.expandable) {
        block = expandable_allocate(a, pool, stream, size);
    } else {
        int64_t address = device_malloc(a, wanted);
        if (!address)
            return NULL;
        a->counters.device_alloc++;
        a->reserved += wanted;
        count(a, pool, SEGMENT_ALLOC, wanted, 0, 0, 0);
        a->segments_made += a->settings.numbered;
        block = block_new(a, stream, wanted, pool, address);
        block->number = a->segments_made;
        head_add(a, block);
    }
    if (block != NULL && pool->owner != NULL)
        pool->owner->pieces++;
    return block;
}

/* Get memory from the device, releasing cached memory if need be; NULL if it fails. */
static struct block *new_block(struct allocator *a, struct pool *pool, int64_t stream, int64_t size,
                               int64_t requested)
{
    if (a->collects)
        garbage_collect_cached_blocks(a);
    struct block *block = alloc_block(a, pool, stream, size);
    if (block == NULL && !a->failed && release_available_cached_blocks(a, pool, stream, size))
        block = alloc_block(a, pool, stream, size);
    if (block == NULL && !a->failed && !a->captures) {
        caching_empty_cache(a, 0);
        a->counters.retries++;
        block = alloc_block(a, pool, stream, size);
    }
    if (block == NULL && !a->failed) {
        a->counters.ooms++;
        fail(a, requested);
    }
    return block;
}

/* ---- malloc and free -------------------------------------------------------------------------- */

static struct pool *pool_for(struct allocator *a, int64_t rounded)
{
    bool small = rounded <= SMALL_SIZE;
    struct private_pool *pool = a->private_pools[a->allocates_to];
    if (pool == NULL)
        return small ? &a->small : &a->large;
    return small ? &pool->small : &pool->large;
}

/* Return a block; NULL if the device does not have it. */
struct block *caching_malloc(struct allocator *a, int64_t size, int64_t stream)
{
    a->failed = false;
    if (a->outstanding || a->deferred.count)
        process_events(a);
    int64_t rounded = round_size(&a->settings, size), splits = 0, split_bytes = 0;
    struct pool *pool = pool_for(a, rounded);
    struct list *list = list_of(a, &pool->cached, stream);
    size_t index = list_first_of(list, rounded);
    if (a->has_conditions)
        index = choose(a, pool, list, index, rounded);
    struct block *block;
    if (index < list->blocks.count) {
        block = list_at(list, index);
        array_remove(&list->blocks, index);
    } else {
        block = new_block(a, pool, stream, rounded, size);
        if (block == NULL)
            return NULL;
    }
    int64_t remainder = block->size - rounded;
    bool split = block_is_split(block);
    if (remainder >= pool->least && rounded < a->unsplit_from) {
        splits = split ? 0 : 1;
        split_bytes = split ? -rounded : remainder;
        pool_add(a, block_split(a, block, rounded));
    } else if (split) {
        splits = -1;
        split_bytes = -block->size;
    }
    if (block->expandable != NULL)
        splits = split_bytes = 0;
    block->free = false;
    block->requested = size;
    count(a, pool, ALLOC, block->size, size, splits, split_bytes);
    return block;
}

void caching_free(struct allocator *a, struct block *block)
{
    if (block->uses.count == 0) {
        free_block(a, block, FREE);
        return;
    }
    block->waits = true;
    count(a, block->pool, FREE_REQUESTED, block->size, 0, 0, 0);
    if (a->captures)
        APPEND(a, &a->deferred, block);
    else
        insert_events(a, block);
}
