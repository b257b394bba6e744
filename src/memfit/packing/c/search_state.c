/* Placing one buffer of the exhaustive search, and undoing it: every change is recorded in a trail. */

#include "search_state.h"

static int reserve(trail *t, size_t more) { return array_reserve(t, t->count + more); }

static void set(trail *t, int64_t *values, int32_t index, int64_t value)
{
    t->items[t->count++] = (change){index, values[index]};
    values[index] = value;
}

static void undo(trail *t, int64_t *values, size_t count)
{
    while (t->count > count) {
        change last = t->items[--t->count];
        values[last.index] = last.before;
    }
}

int count_across(search *s, int32_t buffer, int32_t change)
{
    int any_free = 0;
    for (int32_t i = s->first[buffer]; i + 1 < s->last[buffer]; i++) {
        int32_t section = on_circle(s, i);
        if (section + 1 < s->sections)
            any_free |= (s->across[section] += change) == 0;
    }
    return any_free;
}

int has_room(search *s, int32_t buffer)
{
    return reserve(&s->floors, 2 * (size_t)s->sections) &&
           reserve(&s->lowests, (size_t)(s->overlaps_from[buffer + 1] - s->overlaps_from[buffer]));
}

void place(search *s, int32_t buffer)
{
    int64_t end = s->lowest[buffer] + s->size[buffer];
    s->placed[buffer] = s->lowest[buffer];
    for (int32_t i = s->first[buffer]; i < s->last[buffer]; i++) {
        int32_t section = on_circle(s, i);
        set(&s->floors, s->floor, section, end);
        s->left[section] -= s->size[buffer];
    }
    s->wrapping -= wraps(s, buffer);
    int32_t from = s->sections, to = 0;
    for (int32_t i = s->overlaps_from[buffer]; i < s->overlaps_from[buffer + 1]; i++) {
        int32_t other = s->overlaps[i];
        if (s->placed[other] != UNPLACED || s->lowest[other] >= end)
            continue;
        set(&s->lowests, s->lowest, other, end);
        for (int32_t j = s->first[other]; j < s->last[other]; j++)
            s->raised[on_circle(s, j)] = 1;
        if (wraps(s, other))
            from = 0;
        if (s->first[other] < from)
            from = s->first[other];
        if (s->last[other] > to)
            to = s->last[other] < s->sections ? s->last[other] : s->sections;
    }
    for (int32_t section = from; section < to; section++) {
        if (!s->raised[section])
            continue;
        s->raised[section] = 0;
        int64_t least = INT64_MAX;
        for (int32_t i = s->members_from[section]; i < s->members_from[section + 1]; i++) {
            int32_t member = s->members[i];
            if (s->placed[member] == UNPLACED && s->lowest[member] < least)
                least = s->lowest[member];
        }
        if (least != INT64_MAX && least > s->floor[section])
            set(&s->floors, s->floor, section, least);
    }
}

void unplace(search *s, int32_t buffer, size_t floors, size_t lowests)
{
    undo(&s->floors, s->floor, floors);
    undo(&s->lowests, s->lowest, lowests);
    for (int32_t i = s->first[buffer]; i < s->last[buffer]; i++)
        s->left[on_circle(s, i)] += s->size[buffer];
    s->wrapping += wraps(s, buffer);
    s->placed[buffer] = UNPLACED;
}

int may_fit(const search *s, int32_t from, int32_t to, int64_t offset)
{
    for (int32_t section = from; section < to; section++) {
        int64_t floor = s->floor[section] > offset ? s->floor[section] : offset;
        if (s->left[section] > s->capacity - floor)
            return 0;
    }
    return 1;
}
