/* The allocations of a step, and how long they live:
 *
 *   step n        0  1  2  3  4        step n + 1    0  1
 *   a  until 3    ├────────┤           a' until ...
 *   b  LIVES            ├──────────────────────────────┤    next 1
 *   c  LIVES               ├─────────────────────────────   next LIVES
 */

#include "arena.h"

static uint64_t key_of(const void *pointer) { return (uint64_t)(uintptr_t)pointer; }

static lifetime *lifetime_of(const step_record *record, const struct hash_slot *slot)
{
    return &record->items[(uintptr_t)slot->value];
}

/* Begin a step; the current one becomes the one before. */
void recorder_begin(recorder *r)
{
    step_record emptied = r->before;
    struct hash_table cleared = r->old;
    emptied.count = 0;
    hash_table_clear(&cleared);
    r->before = r->now;
    r->old = r->live;
    r->now = emptied;
    r->live = cleared;
    r->failed = 0;
}

void recorder_clear(recorder *r)
{
    r->now.count = r->before.count = 0;
    hash_table_clear(&r->live);
    hash_table_clear(&r->old);
}

void recorder_add(recorder *r, const void *pointer, int64_t size)
{
    uintptr_t number = r->now.count;
    lifetime *place = array_append(&r->now);
    if (place)
        *place = (lifetime){size, LIVES, LIVES};
    if (!place || !hash_table_put(&r->live, key_of(pointer), (void *)number))
        r->failed = 1;
    hash_table_remove(&r->old, key_of(pointer));
}

void recorder_share(recorder *r, const void *pointer)
{
    const struct hash_slot *live = hash_table_find(&r->live, key_of(pointer));
    const struct hash_slot *old = live ? NULL : hash_table_find(&r->old, key_of(pointer));
    if (live) {
        lifetime_of(&r->now, live)->until = SHARED;
        hash_table_remove(&r->live, key_of(pointer));
    } else if (old) {
        lifetime_of(&r->before, old)->until = SHARED;
        hash_table_remove(&r->old, key_of(pointer));
    }
}

void recorder_free(recorder *r, const void *pointer, int is_within_step)
{
    const struct hash_slot *live = hash_table_find(&r->live, key_of(pointer));
    const struct hash_slot *old = live ? NULL : hash_table_find(&r->old, key_of(pointer));
    if (live) {
        lifetime *of = lifetime_of(&r->now, live);
        if (is_within_step)
            of->until = (int64_t)r->now.count;
        else
            of->next = 0;
        hash_table_remove(&r->live, key_of(pointer));
    } else if (old) {
        lifetime_of(&r->before, old)->next = (int64_t)r->now.count;
        hash_table_remove(&r->old, key_of(pointer));
    }
}
