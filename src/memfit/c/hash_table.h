/* A hash table from non-zero keys, usually addresses, to pointers. All zeros is an empty one;
 * free(table.slots) ends it.
 *
 * Open addressing with linear probing; removal moves later entries back, so there are no tombstones and a
 * table that churns for hours stays as fast as a new one.
 */
#ifndef MEMFIT_HASH_TABLE_H
#define MEMFIT_HASH_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct hash_slot {
    uint64_t key; /* 0: empty */
    void *value;
};

struct hash_table {
    struct hash_slot *slots;
    size_t capacity, count; /* capacity: a power of two, or 0 */
};

static inline size_t hash_table_home(const struct hash_table *table, uint64_t key)
{
    /* Fibonacci hashing: addresses are multiples of 512, so the high bits must be mixed down. */
    return (size_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (table->capacity - 1);
}

/* The slot of a key, or the empty one where it would go; the table has slots. */
static inline struct hash_slot *hash_table_probe(const struct hash_table *table, uint64_t key)
{
    size_t at = hash_table_home(table, key);
    while (table->slots[at].key != 0 && table->slots[at].key != key)
        at = (at + 1) & (table->capacity - 1);
    return &table->slots[at];
}

static inline bool hash_table_grow(struct hash_table *table)
{
    struct hash_table larger = {.capacity = table->capacity ? 2 * table->capacity : 64,
                                .count = table->count};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (size_t i = 0; i < table->capacity; i++)
        if (table->slots[i].key != 0)
            *hash_table_probe(&larger, table->slots[i].key) = table->slots[i];
    free(table->slots);
    *table = larger;
    return true;
}

/* Add or replace an entry; false without host memory. */
static inline bool hash_table_put(struct hash_table *table, uint64_t key, void *value)
{
    if (2 * (table->count + 1) > table->capacity && !hash_table_grow(table))
        return false;
    struct hash_slot *slot = hash_table_probe(table, key);
    table->count += slot->key == 0;
    *slot = (struct hash_slot){key, value};
    return true;
}

/* The entry of a key, or NULL. */
static inline struct hash_slot *hash_table_find(const struct hash_table *table, uint64_t key)
{
    struct hash_slot *slot = table->count ? hash_table_probe(table, key) : NULL;
    return slot && slot->key != 0 ? slot : NULL;
}

/* The value of a key; NULL if there is no such entry. */
static inline void *hash_table_get(const struct hash_table *table, uint64_t key)
{
    return table->count ? hash_table_probe(table, key)->value : NULL;
}

/* Remove an entry and return its value; NULL if there is none. */
static inline void *hash_table_remove(struct hash_table *table, uint64_t key)
{
    struct hash_slot *gap = hash_table_find(table, key);
    if (!gap)
        return NULL;
    void *value = gap->value;
    size_t mask = table->capacity - 1, hole = (size_t)(gap - table->slots);
    table->count--;
    for (size_t at = (hole + 1) & mask; table->slots[at].key != 0; at = (at + 1) & mask) {
        /* An entry may fill the hole only if its home does not come after the hole. */
        size_t home = hash_table_home(table, table->slots[at].key);
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            table->slots[hole] = table->slots[at];
            hole = at;
        }
    }
    table->slots[hole] = (struct hash_slot){0, NULL};
    return value;
}

/* Remove every entry; the capacity stays. */
static inline void hash_table_clear(struct hash_table *table)
{
    if (table->count)
        memset(table->slots, 0, table->capacity * sizeof *table->slots);
    table->count = 0;
}

#endif
