/* Waiting for the device. Work is finished the moment it is issued, so waiting never waits.
 *
 * The exception: while ghost_hold_events is on, each recorded event takes a ticket and stays "not ready" until
 * anything synchronizes or the hold ends. With HOLD_UNTIL_AWAITED it stays so until the host waits for its
 * stream beyond it, or for a stream that waits for it: the host may be far ahead of a stream that waits, so the
 * wait alone finishes nothing. That is how PyTorch's deferred frees (record_stream) come late.
 */
#include "cuda/stream_marks.h"
#include "core/ghost.h"
#include "array.h"

struct finished {
    const void *stream;
    uint64_t ticket; /* those up to it are finished */
};

/* From its ticket `since` on, `waiter` runs after `ticket` of `stream`. */
struct dependency {
    const void *waiter, *stream;
    uint64_t since, ticket;
};

static uint64_t last_ticket, finished_ticket;
static int held;
static struct {
    ARRAY(struct finished);
} streams;
static struct {
    ARRAY(struct dependency);
} dependencies;

static void finish_everything(void)
{
    finished_ticket = last_ticket;
    streams.count = dependencies.count = 0;
}

API void ghost_hold_events(int hold)
{
    HOLD_LOCK;
    held = hold;
    if (!hold)
        finish_everything();
}

/* The ticket up to which a stream is finished. */
static uint64_t finished_on(const void *stream)
{
    for (size_t i = 0; i < streams.count; i++)
        if (streams.items[i].stream == stream)
            return streams.items[i].ticket;
    return finished_ticket;
}

static void finish(const void *stream, uint64_t ticket)
{
    struct finished *found = NULL;
    if (ticket <= finished_on(stream))
        return;
    for (size_t i = 0; i < streams.count && !found; i++)
        if (streams.items[i].stream == stream)
            found = &streams.items[i];
    if (!found)
        found = array_append(&streams);
    if (!found) {
        finish_everything(); /* no host memory: early, but never stuck */
        return;
    }
    *found = (struct finished){stream, ticket};
    for (size_t at = 0; at < dependencies.count; at++) {
        struct dependency before = dependencies.items[at];
        if (before.waiter == stream && before.since <= ticket)
            finish(before.stream, before.ticket);
    }
}

void stream_waits(const void *waiter, const void *stream, uint64_t ticket)
{
    HOLD_LOCK;
    struct dependency *added = NULL;
    if (held == HOLD_UNTIL_AWAITED && ticket > finished_on(stream))
        added = array_append(&dependencies);
    if (added)
        *added = (struct dependency){waiter, stream, ++last_ticket, ticket};
}

void host_waits(const void *stream, uint64_t ticket)
{
    COUNT(waits);
    HOLD_LOCK;
    if (held == HOLD_UNTIL_AWAITED)
        finish(stream, ticket);
}

uint64_t take_ticket(void)
{
    HOLD_LOCK;
    return held ? ++last_ticket : 0;
}

bool ticket_is_finished(const void *stream, uint64_t ticket)
{
    HOLD_LOCK;
    return ticket <= finished_on(stream);
}

void synchronize_everything(void)
{
    COUNT(waits);
    ghost_lock();
    finish_everything();
    ghost_unlock();
    trim_pools_to_threshold();
}

API status cudaStreamQuery(void *stream)
{
    HOLD_LOCK;
    return finished_ticket < last_ticket ? ghost_fail(NOT_READY) : SUCCESS;
}

API status cudaStreamSynchronize(void *stream)
{
    mark("synchronize_stream:%p", stream);
    if (held != HOLD_UNTIL_AWAITED) {
        synchronize_everything();
        return SUCCESS;
    }
    host_waits(stream, last_ticket);
    trim_pools_to_threshold();
    return SUCCESS;
}

ALSO(cuStreamSynchronize, cudaStreamSynchronize)
ENTRY(cudaDeviceSynchronize(void), mark("synchronize"), synchronize_everything())
ALSO(cuCtxSynchronize, cudaDeviceSynchronize)
