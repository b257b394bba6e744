/* A hash table from addresses to records, so that cudaFree does not search what is live.
 *
 * Open addressing with linear probing; removal moves later entries back, so there are no
 * tombstones and a table that churns for hours stays as fast as a new one.
 */
#include "ghost.h"

#include <stdlib.h>

#define SMALLEST 64

static size_t home(const struct table *table, uint64_t key)
{
    /* Fibonacci hashing: addresses are multiples of 512, so the high bits must be mixed down. */
    return (size_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (table->capacity - 1);
}

static struct table_slot *find(const struct table *table, uint64_t key)
{
    size_t at = home(table, key);
    while (table->slots[at].key != 0 && table->slots[at].key != key)
        at = (at + 1) & (table->capacity - 1);
    return &table->slots[at];
}

static bool grow(struct table *table)
{
    struct table larger = {.capacity = table->capacity ? 2 * table->capacity : SMALLEST,
                           .length = table->length};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (size_t i = 0; i < table->capacity; i++)
        if (table->slots[i].key != 0)
            *find(&larger, table->slots[i].key) = table->slots[i];
    free(table->slots);
    *table = larger;
    return true;
}

bool table_put(struct table *table, uint64_t key, void *value)
{
    if (2 * (table->length + 1) > table->capacity && !grow(table))
        return false;
    struct table_slot *slot = find(table, key);
    table->length += slot->key == 0;
    *slot = (struct table_slot){key, value};
    return true;
}

void *table_get(const struct table *table, uint64_t key)
{
    return table->capacity ? find(table, key)->value : NULL;
}

void *table_remove(struct table *table, uint64_t key)
{
    if (!table->capacity)
        return NULL;
    struct table_slot *gap = find(table, key);
    void *value = gap->value;
    if (gap->key == 0)
        return NULL;
    table->length--;

    size_t mask = table->capacity - 1, hole = (size_t)(gap - table->slots);
    for (size_t at = (hole + 1) & mask; table->slots[at].key != 0; at = (at + 1) & mask) {
        /* An entry may fill the hole only if its home does not lie after the hole. */
        size_t wanted = home(table, table->slots[at].key);
        if (((at - wanted) & mask) >= ((at - hole) & mask)) {
            table->slots[hole] = table->slots[at];
            hole = at;
        }
    }
    table->slots[hole] = (struct table_slot){0, NULL};
    return value;
}
