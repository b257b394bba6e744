/* Blocks that become free, and their merging with free neighbours. */
#include "allocator.h"

/* Take a free block out of its pool. */
static void take_out(struct allocator *a, struct block *block)
{
    if (block->mapped)
        pool_remove(a, block);
    else
        pool_remove_unmapped(a, block);
}

/* Merge a block that is in no pool with its free neighbours that are mapped, or unmapped, like it. */
struct block *merged(struct allocator *a, struct block *block)
{
    struct block *before = block->prev, *after = block->next;
    if (after != NULL && after->free && after->mapped == block->mapped) {
        take_out(a, after);
        block_swallow(a, block, after);
    }
    if (before != NULL && before->free && before->mapped == block->mapped) {
        take_out(a, before);
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
