/* Greedy placement: one buffer after the other, each into a gap between the placed ones.
 *
 *   level 0   |                            0                             |  windows of each level, which hold
 *   level 1   |      0      |      1       |      2       |      3       |  the buffers of their own block
 *             |             |      0 ......|      1 ......|      2 ......| 3  and of the next one
 *
 * Only buffers that live nearby are considered: a life no longer than a block is within the window that it
 * begins in. The last block is followed by the first, for time may be a circle. */

#include <stdlib.h>

#include "array.h"
#include "pack.h"

#define LEVELS 16
#define FINER 4 /* times as many blocks as the level before */

typedef struct {
    int64_t offset, end;
    int32_t first, last;
} placed;

typedef struct {
    ARRAY(int32_t); /* indices of placed buffers, by offset */
} window;

typedef struct {
    int32_t length, blocks; /* of a block in sections; the last one may be longer */
    window *windows;
} level;

typedef struct {
    const placed *all;
    int32_t sections;
    level levels[LEVELS];
    int32_t count;
} index_of_time;

static int32_t block_of(const level *l, int32_t section)
{
    int32_t block = section / l->length;
    return block < l->blocks ? block : l->blocks - 1;
}

/* Make levels down to blocks that are shorter than most lives; false without host memory. */
static int make_levels(index_of_time *t, int64_t mean_life)
{
    int64_t blocks = 1;
    for (; t->count < LEVELS && (blocks == 1 || t->sections / blocks >= 1 + mean_life / FINER);
         blocks *= FINER) {
        window *windows = calloc((size_t)blocks, sizeof *windows);
        if (!windows)
            return 0;
        t->levels[t->count++] = (level){(int32_t)(t->sections / blocks), (int32_t)blocks, windows};
    }
    return 1;
}

static void free_levels(index_of_time *t)
{
    for (int32_t i = 0; i < t->count; i++) {
        for (int32_t w = 0; w < t->levels[i].blocks; w++)
            free(t->levels[i].windows[w].items);
        free(t->levels[i].windows);
    }
}

/* Return the smallest window that holds every buffer that overlaps a life. */
static const window *around(const index_of_time *t, int32_t first, int32_t last)
{
    const level *l = &t->levels[t->count - 1];
    while (last - first > l->length)
        l--; /* level 0 has one block, and no life is longer */
    return &l->windows[block_of(l, first)];
}

/* Add the buffer placed last to a window, after the last one that is not above it; false without host
 * memory. */
static int add(const placed *all, window *w, int32_t index)
{
    size_t from = 0, to = w->count;
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if (all[w->items[middle]].offset <= all[index].offset)
            from = middle + 1;
        else
            to = middle;
    }
    int32_t *place = array_insert(w, from);
    if (!place)
        return 0;
    *place = index;
    return 1;
}

/* Add a buffer to every window that has a section of its life. */
static int add_everywhere(index_of_time *t, int32_t index)
{
    int32_t first = t->all[index].first, last = t->all[index].last;
    for (int32_t i = 0; i < t->count; i++) {
        const level *l = &t->levels[i];
        int32_t end =
            last <= t->sections ? block_of(l, last - 1) : l->blocks + block_of(l, last - 1 - t->sections);
        int32_t from = block_of(l, first) - 1; /* whose next block it is */
        int32_t count = end - from + 1 < l->blocks ? end - from + 1 : l->blocks;
        for (int32_t w = 0; w < count; w++)
            if (!add(t->all, &l->windows[(from + l->blocks + w) % l->blocks], index))
                return 0;
    }
    return 1;
}

/* Return the offset of a buffer among those that are placed. */
static int64_t gap_for(const index_of_time *t, int32_t first, int32_t last, int64_t size, int tightest)
{
    const window *near = around(t, first, last);
    int64_t top = 0; /* every gap below was considered */
    int64_t chosen = -1, chosen_gap = INT64_MAX;
    for (size_t i = 0; i < near->count; i++) {
        const placed *other = &t->all[near->items[i]];
        if (!meet(other->first, other->last, first, last, t->sections))
            continue;
        int64_t gap = other->offset - top;
        if (gap >= size && gap < chosen_gap) {
            chosen = top;
            chosen_gap = gap;
            if (!tightest || gap == size)
                break;
        }
        if (other->end > top)
            top = other->end;
    }
    return chosen < 0 ? top : chosen;
}

int pack_place(int32_t buffers, int32_t sections, const int32_t *first, const int32_t *last,
               const int64_t *size, const int32_t *order, int tightest, const atomic_int *cancelled,
               int64_t *offset)
{
    placed *all = malloc((size_t)buffers * sizeof *all);
    index_of_time t = {.all = all, .sections = sections};
    int64_t lives = 0;
    for (int32_t i = 0; i < buffers; i++)
        lives += last[i] - first[i];
    int status = all && make_levels(&t, lives / buffers) ? FOUND : NO_HOST_MEMORY;
    for (int32_t done = 0; status == FOUND && done < buffers; done++) {
        int32_t buffer = order[done];
        offset[buffer] = gap_for(&t, first[buffer], last[buffer], size[buffer], tightest);
        all[done] = (placed){offset[buffer], offset[buffer] + size[buffer], first[buffer], last[buffer]};
        if (!add_everywhere(&t, done))
            status = NO_HOST_MEMORY;
        if (atomic_load_explicit(cancelled, memory_order_relaxed))
            status = CANCELLED;
    }
    free_levels(&t);
    free(all);
    return status;
}
