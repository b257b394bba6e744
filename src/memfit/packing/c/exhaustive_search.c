/* The exhaustive search for offsets within a capacity. src/memfit/packing/exhaustive_search.py explains
 * why it is complete.
 *
 *   part      buffers that overlap no others in time: sorted by preference, then
 *   descend   each that may be the next one is
 *   settle    placed; the rest may fall into parts, each searched on its own
 */

#include <stdlib.h>

#include "search_state.h"

#define PREFERENCES 3

typedef struct {
    int32_t from, to; /* sections */
    int32_t *order;   /* buffers that are not placed, the most promising first */
    int32_t count;
} part;

static int search_part(search *s, const part *p);

/* ---- the search ----------------------------------------------------------------------------- */

static int descend(search *s, const part *p, int64_t least, int32_t least_rank);

/* Search the rest of a part, which falls apart where no buffer is in two neighbouring sections. */
static int search_parts(search *s, const part *p)
{
    int32_t *inside = malloc((size_t)p->count * sizeof *inside);
    if (!inside)
        return NO_HOST_MEMORY;
    int status = FOUND;
    int32_t from = p->from;
    for (int32_t section = p->from; section < p->to && status == FOUND; section++) {
        if (section + 1 < p->to && s->across[section])
            continue;
        part piece = {.from = from, .to = section + 1, .order = inside, .count = 0};
        for (int32_t i = 0; i < p->count; i++) {
            int32_t other = p->order[i];
            if (s->placed[other] == UNPLACED && s->first[other] >= from && s->last[other] <= section + 1)
                inside[piece.count++] = other;
        }
        if (piece.count)
            status = search_part(s, &piece);
        from = section + 1;
    }
    free(inside);
    return status;
}

/* Continue the search below a buffer that was placed. */
static int settle(search *s, const part *p, int32_t buffer)
{
    int64_t offset = s->placed[buffer];
    s->solution[buffer] = offset;
    int falls_apart = count_across(s, buffer, -1);
    /* A life that wraps connects both ends; when the last such buffer is placed, every earlier split
     * counts. */
    int in_parts = !s->wrapping && (falls_apart || wraps(s, buffer));
    int status = in_parts ? search_parts(s, p) : descend(s, p, offset, s->rank[buffer]);
    count_across(s, buffer, 1);
    return status;
}

/* Place one buffer after the other, none below `least`, nor at it if it ranks before `least_rank`. */
static int descend(search *s, const part *p, int64_t least, int32_t least_rank)
{
    if (++s->nodes > s->node_limit)
        return NODE_LIMIT;
    if (atomic_load_explicit(s->cancelled, memory_order_relaxed))
        return CANCELLED;
    part rest = {
        .from = p->from, .to = p->to, .order = malloc((size_t)p->count * sizeof *rest.order), .count = 0};
    if (!rest.order)
        return NO_HOST_MEMORY;
    int64_t ceiling = INT64_MAX; /* a buffer at or above it would leave a gap that another one fits into */
    for (int32_t i = 0; i < p->count; i++) {
        int32_t buffer = p->order[i];
        if (s->placed[buffer] != UNPLACED)
            continue;
        int64_t lowest = s->lowest[buffer];
        if (lowest + s->size[buffer] < ceiling)
            ceiling = lowest + s->size[buffer];
        int32_t at = rest.count++; /* already nearly sorted, by the node above */
        for (; at > 0; at--) {
            int32_t other = rest.order[at - 1];
            if (s->lowest[other] < lowest || (s->lowest[other] == lowest && s->rank[other] < s->rank[buffer]))
                break;
            rest.order[at] = other;
        }
        rest.order[at] = buffer;
    }
    int status = rest.count ? INFEASIBLE : FOUND;
    for (int32_t i = 0; i < rest.count && status == INFEASIBLE; i++) {
        int32_t buffer = rest.order[i];
        int64_t offset = s->lowest[buffer];
        if (offset >= ceiling)
            break;
        if (offset < least || (offset == least && s->rank[buffer] < least_rank))
            continue;
        if (!has_room(s, buffer)) {
            status = NO_HOST_MEMORY;
            break;
        }
        size_t floors = s->floors.count, lowests = s->lowests.count;
        place(s, buffer);
        if (may_fit(s, p->from, p->to, offset))
            status = settle(s, &rest, buffer);
        unplace(s, buffer, floors, lowests);
    }
    free(rest.order);
    return status;
}

typedef struct {
    double keys[PREFERENCES];
    int32_t buffer;
} ranked;

static int by_keys(const void *one, const void *two)
{
    const ranked *a = one, *b = two;
    for (int i = 0; i < PREFERENCES; i++)
        if (a->keys[i] != b->keys[i])
            return a->keys[i] > b->keys[i] ? -1 : 1;
    return a->buffer < b->buffer ? -1 : 1;
}

/* Return the value that a letter of the preference sorts by, the largest first. */
static double key(const search *s, int32_t buffer, char letter)
{
    if (letter == 'A')
        return s->area[buffer];
    if (letter == 'L')
        return s->length[buffer];
    int64_t most = 0; /* 'T': bytes left in the fullest of its sections */
    for (int32_t i = s->first[buffer]; i < s->last[buffer]; i++)
        if (s->left[on_circle(s, i)] > most)
            most = s->left[on_circle(s, i)];
    return (double)most;
}

static int search_part(search *s, const part *p)
{
    ranked *ranks = malloc((size_t)p->count * sizeof *ranks);
    int32_t *before = malloc((size_t)p->count * sizeof *before);
    int status = NO_HOST_MEMORY;
    if (ranks && before) {
        for (int32_t i = 0; i < p->count; i++) {
            ranks[i].buffer = p->order[i];
            for (int j = 0; j < PREFERENCES; j++)
                ranks[i].keys[j] = key(s, p->order[i], s->preference[j]);
        }
        qsort(ranks, (size_t)p->count, sizeof *ranks, by_keys);
        for (int32_t i = 0; i < p->count; i++) {
            p->order[i] = ranks[i].buffer;
            before[i] = s->rank[p->order[i]];
            s->rank[p->order[i]] = i;
        }
        status = descend(s, p, 0, 0);
        for (int32_t i = 0; i < p->count; i++)
            s->rank[p->order[i]] = before[i];
    }
    free(ranks);
    free(before);
    return status;
}

/* ---- From Python ---------------------------------------------------------------------------- */

static int overlap(const search *s, int32_t one, int32_t two)
{
    return one != two && meet(s->first[one], s->last[one], s->first[two], s->last[two], s->sections);
}

/* Make the lists of overlapping buffers and of the buffers of each section; false without host memory. */
static int make_lists(search *s)
{
    int64_t pairs = 0, memberships = 0;
    for (int32_t b = 0; b < s->buffers; b++) {
        memberships += s->last[b] - s->first[b];
        for (int32_t other = 0; other < s->buffers; other++)
            pairs += overlap(s, b, other);
    }
    s->overlaps = malloc((size_t)(pairs + 1) * sizeof *s->overlaps);
    s->members = malloc((size_t)(memberships + 1) * sizeof *s->members);
    if (!s->overlaps || !s->members)
        return 0;
    int32_t next = 0;
    for (int32_t b = 0; b < s->buffers; b++) {
        s->overlaps_from[b] = next;
        for (int32_t other = 0; other < s->buffers; other++)
            if (overlap(s, b, other))
                s->overlaps[next++] = other;
    }
    s->overlaps_from[s->buffers] = next;
    next = 0;
    for (int32_t section = 0; section < s->sections; section++) {
        s->members_from[section] = next;
        for (int32_t b = 0; b < s->buffers; b++)
            if ((s->first[b] <= section && section < s->last[b]) || section + s->sections < s->last[b])
                s->members[next++] = b;
    }
    s->members_from[s->sections] = next;
    for (int32_t b = 0; b < s->buffers; b++) {
        s->placed[b] = UNPLACED;
        for (int32_t i = s->first[b]; i < s->last[b]; i++)
            s->left[on_circle(s, i)] += s->size[b];
        s->wrapping += wraps(s, b);
        count_across(s, b, 1);
    }
    return 1;
}

static int search_all(search *s)
{
    if (!may_fit(s, 0, s->sections, 0))
        return INFEASIBLE;
    part all = {.from = 0, .to = s->sections, .order = malloc((size_t)s->buffers * sizeof *all.order)};
    if (!all.order)
        return NO_HOST_MEMORY;
    for (; all.count < s->buffers; all.count++)
        all.order[all.count] = all.count;
    int status = s->wrapping ? search_part(s, &all) : search_parts(s, &all);
    free(all.order);
    return status;
}

int pack_search(int32_t buffers, int32_t sections, const int32_t *first, const int32_t *last,
                const int64_t *size, const double *area, const double *length, int64_t capacity,
                const char *preference, int64_t node_limit, const atomic_int *cancelled, int64_t *offset,
                int64_t *nodes)
{
    search s = {
        .buffers = buffers,
        .sections = sections,
        .first = first,
        .last = last,
        .size = size,
        .area = area,
        .length = length,
        .capacity = capacity,
        .preference = preference,
        .node_limit = node_limit,
        .cancelled = cancelled,
        .solution = offset,
    };
    size_t n = (size_t)buffers, m = (size_t)sections;
    s.overlaps_from = calloc(n + 1, sizeof *s.overlaps_from);
    s.members_from = calloc(m + 1, sizeof *s.members_from);
    s.floor = calloc(m, sizeof *s.floor);
    s.left = calloc(m, sizeof *s.left);
    s.across = calloc(m, sizeof *s.across);
    s.placed = calloc(n, sizeof *s.placed);
    s.lowest = calloc(n, sizeof *s.lowest);
    s.rank = calloc(n, sizeof *s.rank);
    s.raised = calloc(m, sizeof *s.raised);
    int made = s.overlaps_from && s.members_from && s.floor && s.left && s.across && s.placed && s.lowest &&
               s.rank && s.raised && make_lists(&s);
    int status = made ? search_all(&s) : NO_HOST_MEMORY;
    *nodes = s.nodes;
    void *all[] = {s.overlaps, s.overlaps_from, s.members,      s.members_from, s.floor,
                   s.left,     s.across,        s.placed,       s.lowest,       s.rank,
                   s.raised,   s.floors.items,  s.lowests.items};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    return status;
}
