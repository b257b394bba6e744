/* The live allocations of an arena: extents in the order of their offsets. */

#include "arena.h"

/* Return the index of the first extent that ends above an offset. */
static size_t first_above(const extents *live, int64_t offset)
{
    size_t from = 0, to = live->count;
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if (live->items[middle].end <= offset)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

int extents_occupy(extents *live, int64_t offset, int64_t size)
{
    size_t at = first_above(live, offset);
    if (at < live->count && live->items[at].offset < offset + size)
        return 0;
    extent *place = array_insert(live, at);
    if (!place)
        return 0;
    *place = (extent){offset, offset + size};
    return 1;
}

void extents_vacate(extents *live, int64_t offset)
{
    size_t at = first_above(live, offset);
    if (at < live->count && live->items[at].offset == offset)
        array_remove(live, at);
}
