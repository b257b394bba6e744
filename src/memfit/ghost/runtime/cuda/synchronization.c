/* Waiting for the device. Work is finished the moment it is issued, so waiting never waits.
 *
 * The exception: while ghost_hold_events is on, each recorded event takes a ticket and stays "not ready" until
 * anything synchronizes or the hold ends; with HOLD_UNTIL_AWAITED, until its stream is waited for beyond it. That
 * is how PyTorch's deferred frees (record_stream) come late.
 */
#include "core/ghost.h"

#define MOST_AWAITED 256 /* streams; PyTorch's pools have 64 a device and priority */

static uint64_t last_ticket, finished_ticket;
static int held;
static struct {
    const void *stream;
    uint64_t ticket; /* those up to it are finished */
} awaited[MOST_AWAITED];
static size_t awaited_streams;

API void ghost_hold_events(int hold)
{
    ghost_lock();
    held = hold;
    if (!hold)
        finished_ticket = last_ticket;
    ghost_unlock();
}

/* The entry of a stream; NULL if nothing has waited for it. */
static uint64_t *finished_on(const void *stream)
{
    for (size_t i = 0; i < awaited_streams; i++)
        if (awaited[i].stream == stream)
            return &awaited[i].ticket;
    return NULL;
}

void await_ticket(const void *stream, uint64_t ticket)
{
    ghost_lock();
    if (held == HOLD_UNTIL_AWAITED) {
        uint64_t *finished = finished_on(stream);
        if (!finished && awaited_streams < MOST_AWAITED) {
            awaited[awaited_streams].stream = stream;
            finished = &awaited[awaited_streams++].ticket;
        }
        if (!finished)
            finished_ticket = last_ticket; /* too many streams: early, but never stuck */
        else if (*finished < ticket)
            *finished = ticket;
    }
    ghost_unlock();
}

uint64_t take_ticket(void)
{
    ghost_lock();
    uint64_t ticket = held ? ++last_ticket : 0;
    ghost_unlock();
    return ticket;
}

bool ticket_is_finished(const void *stream, uint64_t ticket)
{
    ghost_lock();
    const uint64_t *reached = finished_on(stream);
    bool finished = ticket <= finished_ticket || (reached && ticket <= *reached);
    ghost_unlock();
    return finished;
}

void synchronize_everything(void)
{
    ghost_lock();
    finished_ticket = last_ticket;
    ghost_unlock();
    trim_pools_to_threshold();
}

API status cudaStreamQuery(void *stream)
{
    ghost_lock();
    bool waiting = finished_ticket < last_ticket;
    ghost_unlock();
    return waiting ? ghost_fail(NOT_READY) : SUCCESS;
}

API status cudaStreamSynchronize(void *stream)
{
    synchronize_everything();
    return SUCCESS;
}

API status cuStreamSynchronize(void *stream) { return cudaStreamSynchronize(stream); }

API status cudaDeviceSynchronize(void)
{
    synchronize_everything();
    return SUCCESS;
}

API status cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
