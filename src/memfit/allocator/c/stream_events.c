/* Events: frees that wait for the streams that use the block. stream_events.py gives the reasons. */
#include "allocator.h"

#include <stdlib.h>

/* Return the index of a stream's queue among the sorted ones, or where it would go. */
static size_t queue_index(const struct allocator *a, int64_t stream)
{
    size_t index;
    BISECT(index, a->by_stream.count, a->by_stream.items[middle]->stream < stream);
    return index;
}

static struct queue *queue_at(const struct allocator *a, size_t index, int64_t stream)
{
    struct queue *queue = index < a->by_stream.count ? a->by_stream.items[index] : NULL;
    return queue != NULL && queue->stream == stream ? queue : NULL;
}

static struct queue *queue_of(struct allocator *a, int64_t stream)
{
    size_t index = queue_index(a, stream);
    struct queue *queue = queue_at(a, index, stream);
    if (queue != NULL)
        return queue;
    queue = or_give_up(a, calloc(1, sizeof *queue));
    queue->stream = stream;
    queue->before = a->last_queue;
    *(a->last_queue ? &a->last_queue->after : &a->queues) = queue;
    a->last_queue = queue;
    return INSERT(a, &a->by_stream, index, queue);
}

static void queue_delete(struct allocator *a, struct queue *queue)
{
    *(queue->before ? &queue->before->after : &a->queues) = queue->after;
    *(queue->after ? &queue->after->before : &a->last_queue) = queue->before;
    size_t index = queue_index(a, queue->stream);
    array_remove(&a->by_stream, index);
    free(queue->blocks.items);
    free(queue);
}

void insert_events(struct allocator *a, struct block *block)
{
    int64_t *streams = block->uses.items;
    for (size_t i = 0; i < block->uses.count; i++) {
        struct queue *queue = queue_of(a, streams[i]);
        APPEND(a, &queue->blocks, block);
        block->events++;
        a->outstanding++;
    }
    block->uses.count = 0;
}

static void insert_deferred_events(struct allocator *a)
{
    struct block **blocks = a->deferred.items;
    for (size_t i = 0; i < a->deferred.count; i++)
        insert_events(a, blocks[i]);
    a->deferred.count = 0;
}

/* Remove the first event of a queue; free its block if that was the last event the block waited for. */
static void finish_first(struct allocator *a, struct queue *queue)
{
    struct block *block = queue->blocks.items[queue->first++];
    a->outstanding--;
    if (queue->done > 0) {
        queue->done--;
        a->ended--;
    }
    if (--block->events == 0) {
        block->waits = false;
        free_block(a, block, FREE_COMPLETED);
    }
}

void process_events(struct allocator *a)
{
    if (a->captures)
        return;
    insert_deferred_events(a);
    if (a->ended == 0)
        return;
    for (struct queue *queue = a->queues, *after; queue != NULL; queue = after) {
        after = queue->after;
        while (queue->done > 0)
            finish_first(a, queue);
        if (queue->first == queue->blocks.count)
            queue_delete(a, queue);
    }
}

void synchronize_and_free_events(struct allocator *a)
{
    a->counters.sync_all_streams++;
    a->device.calls.synchronize++;
    insert_deferred_events(a);
    while (a->queues != NULL) {
        while (a->queues->first < a->queues->blocks.count)
            finish_first(a, a->queues);
        queue_delete(a, a->queues);
    }
}

static void complete_queue(struct allocator *a, struct queue *queue)
{
    size_t waiting = queue->blocks.count - queue->first;
    a->ended += waiting - queue->done;
    queue->done = waiting;
}

void complete_all_events(struct allocator *a)
{
    for (struct queue *queue = a->queues; queue != NULL && a->ended < a->outstanding; queue = queue->after)
        complete_queue(a, queue);
}

void complete_stream(struct allocator *a, int64_t stream)
{
    if (!a->captures)
        insert_deferred_events(a);
    struct queue *queue = queue_at(a, queue_index(a, stream), stream);
    if (queue != NULL)
        complete_queue(a, queue);
}

void record_stream(struct allocator *a, struct block *block, int64_t stream)
{
    if (stream == block->stream)
        return;
    int64_t *streams = block->uses.items;
    for (size_t i = 0; i < block->uses.count; i++)
        if (streams[i] == stream)
            return;
    APPEND(a, &block->uses, stream);
}
