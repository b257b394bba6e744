/* Marks of streams: each is a record that begins and ends at once. */
#include "cuda/stream_marks.h"

#include <stdarg.h>
#include <stdio.h>

static ghost_record_start record_start; /* NULL: nothing is marked */
static ghost_record_end record_end;
static unsigned times; /* that marking has begun: what a thread marked before is not in the trace */

static _Thread_local struct {
    unsigned times;
    const void *stream;
} marked;

static _Thread_local bool paused, launched;

API void ghost_pause_marks(int pause) { paused = pause; }

API void ghost_mark_streams(ghost_record_start start, ghost_record_end end)
{
    times++;
    record_end = end ? end : record_end; /* a thread may be about to call it */
    __atomic_store_n(&record_start, start, __ATOMIC_RELEASE);
}

static ghost_record_start marking(void)
{
    return paused ? NULL : __atomic_load_n(&record_start, __ATOMIC_ACQUIRE);
}

void mark(const char *format, ...)
{
    ghost_record_start start = marking();
    if (!start)
        return;
    char name[160] = MARK;
    va_list values;
    va_start(values, format);
    vsnprintf(name + sizeof MARK - 1, sizeof name - sizeof MARK, format, values);
    va_end(values);
    void *record = NULL;
    if (start(name, NULL, NULL, 0, &record) == SUCCESS && record)
        record_end(record);
}

bool leaves_marks(void) { return marking(); }

void mark_launch(void)
{
    launched = marking();
    mark("launch");
}

bool follows_launch(void)
{
    bool follows = launched;
    launched = false;
    return follows;
}

void mark_stream(const void *stream)
{
    if (!marking() || (marked.times == times && marked.stream == stream))
        return;
    marked.times = times;
    marked.stream = stream;
    mark("stream:%p", stream);
}
