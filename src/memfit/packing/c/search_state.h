/* The state of the exhaustive search: which buffers are placed where, and how to undo that. */
#ifndef MEMFIT_PLACEMENTS_H
#define MEMFIT_PLACEMENTS_H

#include "array.h"
#include "pack.h"

#define UNPLACED (-1)

typedef struct {
    int32_t index;
    int64_t before;
} change;

typedef struct {
    ARRAY(change);
} trail;

typedef struct {
    int32_t buffers, sections;
    const int32_t *first, *last;
    const int64_t *size;
    const double *area, *length;
    int64_t capacity;
    const char *preference;
    int64_t nodes, node_limit;
    int32_t wrapping; /* buffers not placed whose life goes around, from the last section to the first ones */
    const atomic_int *cancelled;
    int64_t *solution;

    /* Of buffer b: overlaps[overlaps_from[b]] up to [overlaps_from[b + 1]]. */
    int32_t *overlaps, *overlaps_from;
    int32_t *members, *members_from; /* of a section: its buffers */
    int64_t *floor;                  /* of a section: nothing more fits below it */
    int64_t *left;                   /* of a section: bytes of its buffers that are not placed */
    int32_t *across;                 /* of a section: buffers not placed that are in the next one, too */
    int64_t *placed;                 /* of a buffer: its offset, or UNPLACED */
    int64_t *lowest;                 /* of a buffer not placed: the offset it would get */
    int32_t *rank;                   /* of a buffer, in its part */
    uint8_t *raised; /* of a section: whether `lowest` of a member was; false between placements */
    trail floors, lowests;
} search;

/* ---- The circle of time --------------------------------------------------------------------- */

static inline int wraps(const search *s, int32_t buffer) { return s->last[buffer] > s->sections; }

static inline int32_t on_circle(const search *s, int32_t section)
{
    return section < s->sections ? section : section - s->sections;
}

/* Count a buffer among those that are in both of two neighbouring sections, or (change: -1) no longer.
 * Returns whether no buffer is left in both somewhere. */
int count_across(search *s, int32_t buffer, int32_t change);

/* ---- Placing one buffer --------------------------------------------------------------------- */

/* Make room to record a placement; return whether host memory sufficed. */
int has_room(search *s, int32_t buffer);
/* Place a buffer at its lowest offset, and raise the buffers that it supports. */
void place(search *s, int32_t buffer);
/* Undo a placement; `floors` and `lowests` are how many changes were recorded before it. */
void unplace(search *s, int32_t buffer, size_t floors, size_t lowests);
/* Return whether every section can hold its remaining buffers if all of them go to `offset` or above. */
int may_fit(const search *s, int32_t from, int32_t to, int64_t offset);

#endif
