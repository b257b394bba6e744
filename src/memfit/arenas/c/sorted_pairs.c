/* Pairs of numbers in their order. */

#include "arena.h"

static int is_before(pair a, pair b)
{
    return a.first < b.first || (a.first == b.first && a.second < b.second);
}

size_t pairs_index(const pairs *p, pair least)
{
    size_t from = 0, to = p->count;
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if (is_before(p->items[middle], least))
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

int pairs_add(pairs *p, pair added)
{
    size_t at = pairs_index(p, added);
    pair *place = array_insert(p, at);
    if (place)
        *place = added;
    return place != NULL;
}

void pairs_remove(pairs *p, pair removed)
{
    size_t at = pairs_index(p, removed);
    array_remove(p, at);
}
