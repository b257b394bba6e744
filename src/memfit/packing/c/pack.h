// Packers: buffers with lives and sizes get offsets. What is passed is described at each function.
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum status { FOUND, INFEASIBLE, NODE_LIMIT, CANCELLED, NO_HOST_MEMORY };

// Time may be a circle: what lives beyond its end lives on from its beginning, and no longer than once around.

// Give each buffer, in the order given, an offset at which it meets none that was placed before it while both live.
//   count                 buffers
//   order                 each of them once
//   lower, upper, size    of each buffer; it lives in [lower, upper)
//   period                length of the circle, from 0 on; 0 if time is a line
//   tightest              in the smallest gap that holds it; otherwise in the lowest
//   offset                result
// Returns FOUND, CANCELLED or NO_HOST_MEMORY.
API int pack_place(int32_t count, const int32_t *order, const int64_t *lower, const int64_t *upper, const int64_t *size,
                   int64_t period, int tightest, const atomic_int *cancelled, int64_t *offset);

// Look for offsets that need no more than capacity, exhaustively: src/memfit/packing/exact.py says how.
//   buffers, sections     how many of each; at least one
//   first, last           a buffer is in the sections [first, last); those beyond the last are the first again
//   size, area, length    of each buffer; the last two only order the search
//   preference            three letters that order buffers, see key() in search.c
//   node_limit            nodes after which it gives up
//   offset                result, if FOUND
//   nodes                 result: how many were looked at
API int pack_search(int32_t buffers, int32_t sections, const int32_t *first, const int32_t *last, const int64_t *size,
                    const double *area, const double *length, int64_t capacity, const char *preference,
                    int64_t node_limit, const atomic_int *cancelled, int64_t *offset, int64_t *nodes);
