/* Device addresses: slots of a reservation that cannot be read or written.
 *
 *   0x2000_0000_0000                 0x3000_0000_0000                     0x5000_0000_0000
 *   |  cudaMalloc and the pools      |  cuMemAddressReserve                |
 *   |  16 TiB                        |  32 TiB                             |
 *
 * The whole range is mapped PROT_NONE, so it collides with no host memory and a stray dereference
 * of a device pointer faults at once. It costs no memory: nothing is ever backed.
 *
 * Within an arena a slot is a power of two and aligned to its own size; a freed slot is the next
 * one handed out for its size. Real drivers place segments differently; PyTorch's allocator was
 * driven with three placement policies and its peaks were the same.
 */
#include "core/ghost.h"

#include <sys/mman.h>

#include "array.h"

#define RESERVED_FROM (32 * TIB)
#define RESERVED_TO (80 * TIB)
#define SMALLEST_ORDER 9 /* 512 bytes, cudaMalloc's alignment */
#define ORDERS 47

struct free_slots {
    ARRAY(uint64_t); /* addresses */
};

static struct arena {
    uint64_t next, end;
    struct free_slots free[ORDERS];
} arenas[] = {
    [ARENA_MALLOC] = {.next = RESERVED_FROM, .end = 48 * TIB},
    [ARENA_VIRTUAL] = {.next = 48 * TIB, .end = RESERVED_TO},
};

static bool reserved;

__attribute__((constructor)) static void reserve(void)
{
    void *wanted = (void *)RESERVED_FROM;
    void *got = mmap(wanted, RESERVED_TO - RESERVED_FROM, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != wanted && got != MAP_FAILED)
        munmap(got, RESERVED_TO - RESERVED_FROM); /* a kernel before 4.17 chose its own address */
    reserved = got == wanted;
}

bool addresses_reserved(void) { return reserved; }

bool is_device_address(const void *pointer)
{
    return (uint64_t)pointer >= RESERVED_FROM && (uint64_t)pointer < RESERVED_TO;
}

static int order_of(uint64_t size)
{
    int order = SMALLEST_ORDER;
    while (order < ORDERS && ((uint64_t)1 << order) < size)
        order++;
    return order;
}

uint64_t address_take(enum arena_kind kind, uint64_t size)
{
    struct arena *arena = &arenas[kind];
    int order = order_of(size);
    if (order >= ORDERS || !reserved)
        return 0;
    struct free_slots *list = &arena->free[order];
    if (list->count)
        return list->items[--list->count];

    uint64_t slot = (uint64_t)1 << order;
    uint64_t address = (arena->next + slot - 1) & ~(slot - 1);
    if (address + slot > arena->end)
        return 0;
    arena->next = address + slot;
    return address;
}

void address_release(enum arena_kind kind, uint64_t address, uint64_t size)
{
    struct free_slots *list = &arenas[kind].free[order_of(size)];
    uint64_t *place = array_append(list);
    if (place) /* otherwise the slot is never used again: a loss of addresses, not of correctness */
        *place = address;
}
