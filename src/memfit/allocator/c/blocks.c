/* Blocks, the lists of free ones that pools keep, and what becomes of a block that is freed. */
#include "allocator.h"

#include <stdlib.h>

enum { PAGE = 1024 }; /* blocks allocated together */

struct block *block_new(struct allocator *a, int64_t stream, int64_t size, struct pool *pool, int64_t address)
{
    if (a->unused == NULL) {
        struct block *page = APPEND(a, &a->pages, calloc(PAGE, sizeof *page));
        or_give_up(a, page);
        for (size_t i = 0; i < PAGE; i++) {
            page[i].next = a->unused;
            a->unused = &page[i];
        }
    }
    struct block *block = a->unused;
    a->unused = block->next;
    number_array uses = block->uses; /* its memory is reused */
    uses.count = 0;
    *block = (struct block){.address = address, .size = size, .stream = stream, .pool = pool, .uses = uses};
    block->free = block->mapped = true;
    return block;
}

void page_delete(struct block *page)
{
    for (size_t i = 0; page != NULL && i < PAGE; i++)
        free(page[i].uses.items);
    free(page);
}

void block_delete(struct allocator *a, struct block *block)
{
    block->free = false;
    block->next = a->unused;
    a->unused = block;
}

/* Shorten a block to its first bytes; return the rest, which is in no pool yet. */
struct block *block_split(struct allocator *a, struct block *block, int64_t size)
{
    struct block *rest = block_new(a, block->stream, block->size - size, block->pool, block->address + size);
    rest->number = block->number;
    rest->expandable = block->expandable;
    rest->mapped = block->mapped;
    rest->prev = block;
    rest->next = block->next;
    if (rest->next != NULL)
        rest->next->prev = rest;
    block->next = rest;
    block->size = size;
    return rest;
}

/* Extend a block by the one that follows it, which is deleted. */
void block_swallow(struct allocator *a, struct block *block, struct block *following)
{
    block->size += following->size;
    block->next = following->next;
    if (block->next != NULL)
        block->next->prev = block;
    block_delete(a, following);
}

bool block_is_split(const struct block *block) { return block->prev != NULL || block->next != NULL; }

struct list *list_of(struct allocator *a, list_array *lists, int64_t stream)
{
    struct list **at = lists->items;
    size_t index;
    BISECT(index, lists->count, at[middle]->stream < stream);
    if (index < lists->count && at[index]->stream == stream)
        return at[index];
    struct list *list = or_give_up(a, malloc(sizeof *list));
    *list = (struct list){.stream = stream};
    return INSERT(a, lists, index, list);
}

struct block *list_at(const struct list *list, size_t index) { return list->blocks.items[index]; }

static int compare(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int by_fit(const struct block *a, const struct block *b)
{
    int order = compare(a->size, b->size);
    order = order ? order : compare(a->number, b->number);
    return order ? order : compare(a->address, b->address);
}

static int by_address(const struct block *a, const struct block *b)
{
    return compare(a->address, b->address);
}

/* Return the index of a block, or where it would go. */
static size_t search(const struct list *list, const struct block *block,
                     int (*order)(const struct block *, const struct block *))
{
    size_t index;
    BISECT(index, list->blocks.count, order(list_at(list, middle), block) < 0);
    return index;
}

/* Return the index of the first block of at least `size` bytes; the number of blocks if there is none. */
size_t list_first_of(const struct list *list, int64_t size)
{
    size_t index;
    BISECT(index, list->blocks.count, list_at(list, middle)->size < size);
    return index;
}

/* Return the list of its pool that a free block belongs to, and its place there. */
static struct list *list_with(struct allocator *a, const struct block *block, size_t *index)
{
    struct pool *pool = block->pool;
    struct list *list = list_of(a, block->mapped ? &pool->cached : &pool->unmapped, block->stream);
    *index = search(list, block, block->mapped ? by_fit : by_address);
    return list;
}

void pool_add(struct allocator *a, struct block *block)
{
    size_t index;
    struct list *list = list_with(a, block, &index);
    block->gc_base = block->pool->calls;
    INSERT(a, &list->blocks, index, block);
}

void pool_remove(struct allocator *a, struct block *block)
{
    size_t index;
    struct list *list = list_with(a, block, &index);
    array_remove(&list->blocks, index);
}

/* Return a copy of a pool's free blocks as they are now, by stream and fit; the caller frees it. */
struct block **pool_blocks(struct allocator *a, const struct pool *pool, size_t *count)
{
    struct list **lists = pool->cached.items;
    *count = 0;
    for (size_t i = 0; i < pool->cached.count; i++)
        *count += lists[i]->blocks.count;
    struct block **blocks = or_give_up(a, calloc(*count + 1, sizeof *blocks)), **next = blocks;
    for (size_t i = 0; i < pool->cached.count; i++)
        for (size_t j = 0; j < lists[i]->blocks.count; j++)
            *next++ = list_at(lists[i], j);
    return blocks;
}

void head_add(struct allocator *a, struct block *block)
{
    block->head = a->heads.count;
    APPEND(a, &a->heads, block);
}

void head_remove(struct allocator *a, struct block *block)
{
    struct block **heads = a->heads.items, *last = heads[--a->heads.count];
    heads[block->head] = last;
    last->head = block->head;
}

/* ---- Freeing ---------------------------------------------------------------------------------- */

/* Merge a block that is in no pool with its free neighbours that are mapped, or unmapped, like it. */
struct block *merged(struct allocator *a, struct block *block)
{
    struct block *before = block->prev, *after = block->next;
    if (after != NULL && after->free && after->mapped == block->mapped) {
        pool_remove(a, after);
        block_swallow(a, block, after);
    }
    if (before != NULL && before->free && before->mapped == block->mapped) {
        pool_remove(a, before);
        block_swallow(a, before, block);
        return before;
    }
    return block;
}

/* Make a block free. */
void free_block(struct allocator *a, struct block *block, enum kind kind)
{
    int64_t size = block->size, requested = block->requested, splits = 0, split_bytes = 0;
    struct block *neighbours[] = {block->next, block->prev};
    for (size_t i = 0; i < 2; i++) {
        struct block *other = neighbours[i];
        if (other != NULL && other->free && other->mapped) {
            splits--;
            split_bytes -= other->size;
        }
    }
    block->free = true;
    block = merged(a, block);
    pool_add(a, block);
    if (block->expandable != NULL) {
        splits = split_bytes = 0;
    } else if (block_is_split(block)) {
        splits++;
        split_bytes += block->size;
    }
    count(a, block->pool, kind, size, requested, splits, split_bytes);
}
