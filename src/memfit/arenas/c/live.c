// What lives in an arena: extents in the order of their offsets.

#include <string.h>

#include "placing.h"

// Return the position of the first extent that ends above an offset.
static int64_t above(const live *l, int64_t offset) {
  int64_t from = 0, to = l->count;
  while (from < to) {
    int64_t middle = from + (to - from) / 2;
    if (l->extents[middle].end <= offset) from = middle + 1;
    else to = middle;
  }
  return from;
}

int live_occupy(live *l, int64_t offset, int64_t size) {
  int64_t at = above(l, offset);
  if (at < l->count && l->extents[at].offset < offset + size) return 0;
  if (!grow((void **)&l->extents, l->count, &l->room, sizeof *l->extents)) return 0;
  memmove(l->extents + at + 1, l->extents + at, (size_t)(l->count - at) * sizeof *l->extents);
  l->extents[at] = (extent){offset, offset + size};
  l->count++;
  return 1;
}

void live_vacate(live *l, int64_t offset) {
  int64_t at = above(l, offset);
  if (at == l->count || l->extents[at].offset != offset) return;
  memmove(l->extents + at, l->extents + at + 1, (size_t)(l->count - at - 1) * sizeof *l->extents);
  l->count--;
}
