/* Streams: handles with a priority, and callbacks that run at once. */
#include "cuda/stream_captures.h"

API status cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    status result = ghost_new_handle(stream, sizeof(struct stream));
    if (result != SUCCESS)
        return ghost_fail(result);
    *(struct stream *)*stream = (struct stream){.priority = priority, .flags = flags};
    return SUCCESS;
}

CALL(cudaStreamCreateWithFlags(void **stream, unsigned flags), cudaStreamCreateWithPriority(stream, flags, 0))

API status cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

ENTRY(cudaStreamDestroy(void *stream), free(created_stream(stream)))
ENTRY(cudaStreamGetPriority(void *stream, int *priority),
      *priority = created_stream(stream) ? created_stream(stream)->priority : 0)
ENTRY(cudaStreamGetFlags(void *stream, unsigned *flags),
      *flags = created_stream(stream) ? created_stream(stream)->flags : 0)

API status cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5; /* as on every card since Pascal */
    return SUCCESS;
}

ENTRY(cudaStreamAddCallback(void *stream, void (*callback)(void *, status, void *), void *data,
                            unsigned flags),
      callback(stream, SUCCESS, data))

API status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    note_stream_work(stream);
    if (!stream_capture(stream)) /* in a graph it runs when the graph does, which it never does */
        function(data);
    return SUCCESS;
}

ALSO(cuLaunchHostFunc, cudaLaunchHostFunc)
ENTRY(cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags),
      note_stream_work(stream);
      forget(address, sizeof value))
