/* Waiting for the device. Work is finished the moment it is issued, so waiting never waits.
 *
 * The exception is for tests: while ghost_hold_events is on, each recorded event takes a ticket and stays
 * "not ready" until anything synchronizes or the hold ends. That is how PyTorch's deferred frees
 * (record_stream) are driven.
 */
#include "core/ghost.h"

static uint64_t last_ticket, finished_ticket;
static bool held;

API void ghost_hold_events(int on)
{
    ghost_lock();
    held = on;
    if (!on)
        finished_ticket = last_ticket;
    ghost_unlock();
}

uint64_t take_ticket(void)
{
    ghost_lock();
    uint64_t ticket = held ? ++last_ticket : 0;
    ghost_unlock();
    return ticket;
}

bool ticket_is_finished(uint64_t ticket)
{
    ghost_lock();
    bool finished = ticket <= finished_ticket;
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
