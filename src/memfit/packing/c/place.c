// Greedy: one buffer after the other, each into a gap between those that are there.

#include <stdlib.h>
#include <string.h>

#include "pack.h"

typedef struct {
  int64_t lower, upper, offset, end;
} placed;

static int meet(const placed *other, int64_t lower, int64_t upper) {
  return other->lower < upper && lower < other->upper;
}

int pack_place(int32_t count, const int32_t *order, const int64_t *lower, const int64_t *upper, const int64_t *size,
               int64_t period, int tightest, const atomic_int *cancelled, int64_t *offset) {
  placed *all = malloc((size_t)count * sizeof *all);
  int32_t *by_offset = malloc((size_t)count * sizeof *by_offset);
  int status = all && by_offset ? FOUND : NO_HOST_MEMORY;

  for (int32_t done = 0; status == FOUND && done < count; done++) {
    if (atomic_load_explicit(cancelled, memory_order_relaxed)) {
      status = CANCELLED;
      break;
    }
    int32_t buffer = order[done];
    int64_t least = size[buffer], top = 0;  // top: below it everything was looked at
    int64_t chosen = -1, chosen_gap = INT64_MAX;
    for (int32_t i = 0; i < done; i++) {
      const placed *other = &all[by_offset[i]];
      int meets = meet(other, lower[buffer], upper[buffer]);
      if (!meets && period)
        meets = meet(other, lower[buffer] + period, upper[buffer] + period) ||
                meet(other, lower[buffer] - period, upper[buffer] - period);
      if (!meets) continue;
      int64_t gap = other->offset - top;
      if (gap >= least && gap < chosen_gap) {
        chosen = top;
        chosen_gap = gap;
        if (!tightest || gap == least) break;
      }
      if (other->end > top) top = other->end;
    }
    if (chosen < 0) chosen = top;
    offset[buffer] = chosen;
    all[done] = (placed){lower[buffer], upper[buffer], chosen, chosen + least};

    int32_t from = 0, to = done;  // after the last that is not above it
    while (from < to) {
      int32_t middle = from + (to - from) / 2;
      if (all[by_offset[middle]].offset <= chosen) from = middle + 1;
      else to = middle;
    }
    memmove(by_offset + from + 1, by_offset + from, (size_t)(done - from) * sizeof *by_offset);
    by_offset[from] = done;
  }
  free(all);
  free(by_offset);
  return status;
}
