/* Packers: they give offsets to buffers with lives and sizes. */
#ifndef MEMFIT_PACK_H
#define MEMFIT_PACK_H

#include <stdatomic.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum status { FOUND, INFEASIBLE, NODE_LIMIT, CANCELLED, NO_HOST_MEMORY };

/* Time is cut into sections, and a buffer is in the sections [first, last). Time may be a circle: those
 * beyond the last section are the first again, and a life goes at most once around. */

/* Return whether two lives have a section in common. */
static inline int meet(int32_t first, int32_t last, int32_t other_first, int32_t other_last, int32_t sections)
{
    return (first < other_last && other_first < last) || (first < other_last - sections) ||
           (other_first < last - sections);
}

/* Give each buffer, in the order given, an offset at which it overlaps none that was placed before it.
 *   buffers, sections     how many of each; at least one
 *   first, last, size     of each buffer
 *   order                 each of them once
 *   tightest              in the smallest gap that holds it; otherwise in the lowest
 *   offset                result
 * Returns FOUND, CANCELLED or NO_HOST_MEMORY. */
API int pack_place(int32_t buffers, int32_t sections, const int32_t *first, const int32_t *last,
                   const int64_t *size, const int32_t *order, int tightest, const atomic_int *cancelled,
                   int64_t *offset);

/* Look for offsets that need no more than capacity, exhaustively: src/memfit/packing/exhaustive_search.py
 * explains how.
 *   buffers, sections, first, last, size    as above
 *   area, length          of each buffer; they only order the search
 *   preference            three letters that order buffers, see key() in exhaustive_search.c
 *   node_limit            nodes after which the search gives up
 *   offset                result, if FOUND
 *   nodes                 result: how many were visited */
API int pack_search(int32_t buffers, int32_t sections, const int32_t *first, const int32_t *last,
                    const int64_t *size, const double *area, const double *length, int64_t capacity,
                    const char *preference, int64_t node_limit, const atomic_int *cancelled, int64_t *offset,
                    int64_t *nodes);

#endif
