/* A growable array: any struct with the fields of ARRAY(type). All zeros is an empty one;
 * free(array.items) ends it.
 *
 *     struct { ARRAY(int64_t); } numbers = {0};
 *     int64_t *last = array_append(&numbers);    NULL: the host is out of memory; the array is unchanged
 *
 * The macros evaluate their arguments more than once. Memory is malloc's: memfit hooks the malloc of
 * libc10.so at most (arenas/c/cpu_allocator.c), never its own.
 */
#ifndef MEMFIT_ARRAY_H
#define MEMFIT_ARRAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define ARRAY(type)                                                                                          \
    type *items;                                                                                             \
    size_t count, capacity

/* Make room for `wanted` items in total; false without host memory. */
#define array_reserve(array, wanted)                                                                         \
    ((wanted) <= (array)->capacity ||                                                                        \
     array_grow(&(array)->items, &(array)->capacity, (wanted), sizeof *(array)->items))

/* Add an item at the end, or before the one at an index. Returns its uninitialized place; NULL without
 * host memory. */
#define array_append(array)                                                                                  \
    (array_reserve(array, (array)->count + 1) ? &(array)->items[(array)->count++] : NULL)
#define array_insert(array, index)                                                                           \
    (array_reserve(array, (array)->count + 1)                                                                \
         ? (array_move((array)->items, (index) + 1, (index), (array)->count++ - (index),                     \
                       sizeof *(array)->items),                                                              \
            &(array)->items[index])                                                                          \
         : NULL)

#define array_remove(array, index)                                                                           \
    ((array)->count--,                                                                                       \
     array_move((array)->items, (index), (index) + 1, (array)->count - (index), sizeof *(array)->items))

/* `items` is the address of a pointer of any type. */
static inline bool array_grow(void *items, size_t *capacity, size_t wanted, size_t item_size)
{
    size_t larger = *capacity ? *capacity : 8;
    void *memory;
    while (larger < wanted)
        larger *= 2;
    memcpy(&memory, items, sizeof memory);
    memory = realloc(memory, larger * item_size);
    if (!memory)
        return false;
    memcpy(items, &memory, sizeof memory);
    *capacity = larger;
    return true;
}

static inline void array_move(void *items, size_t to, size_t from, size_t count, size_t item_size)
{
    memmove((char *)items + to * item_size, (char *)items + from * item_size, count * item_size);
}

#endif
