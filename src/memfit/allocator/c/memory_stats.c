/* torch.cuda.memory_stats(). */
#include "allocator.h"

static void change(struct figure *figure, int64_t by)
{
    figure->current += by;
    if (by > 0) {
        figure->allocated += by;
        if (figure->current > figure->peak)
            figure->peak = figure->current;
    } else {
        figure->freed -= by;
    }
}

/* Count one event, as memory_stats.py does. */
void count(struct allocator *a, const struct pool *pool, enum kind kind, int64_t size, int64_t requested,
           int64_t splits, int64_t split_bytes)
{
    static const int in_use[] = {[ALLOC] = 1, [FREE] = -1, [FREE_REQUESTED] = -1, [SEGMENT_UNMAP] = 0};
    static const int active[] = {[ALLOC] = 1, [FREE] = -1, [FREE_COMPLETED] = -1, [SEGMENT_UNMAP] = 0};
    static const int segment[] = {[SEGMENT_ALLOC] = 1, [SEGMENT_FREE] = -1, [SEGMENT_UNMAP] = 0};
    static const int reserved[] = {
        [SEGMENT_ALLOC] = 1, [SEGMENT_FREE] = -1, [SEGMENT_MAP] = 1, [SEGMENT_UNMAP] = -1};
    struct figure *pools[] = {a->statistics.figures[ALL],
                              a->statistics.figures[pool->small ? SMALL_POOL : LARGE_POOL]};
    for (size_t i = 0; i < 2; i++) {
        struct figure *figures = pools[i];
        if (in_use[kind]) {
            change(&figures[ALLOCATION], in_use[kind]);
            change(&figures[ALLOCATED], in_use[kind] * size);
        }
        if (active[kind]) {
            change(&figures[ACTIVE], active[kind]);
            change(&figures[ACTIVE_BYTES], active[kind] * size);
            change(&figures[REQUESTED], active[kind] * requested);
            change(&figures[SPLITS], splits);
            change(&figures[SPLIT_BYTES], split_bytes);
        }
        if (segment[kind])
            change(&figures[SEGMENT], segment[kind]);
        if (reserved[kind])
            change(&figures[RESERVED], reserved[kind] * size);
    }
    if (size >= a->settings.max_split_size) {
        change(&a->statistics.oversize[OVERSIZE_ALLOCATIONS], in_use[kind]);
        change(&a->statistics.oversize[OVERSIZE_SEGMENTS], segment[kind]);
    }
}
