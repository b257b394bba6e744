/* Marks in the trace that PyTorch's observer writes of a step: what it cannot see itself. */
#ifndef MEMFIT_GHOST_MARKS_H
#define MEMFIT_GHOST_MARKS_H

#include "core/ghost.h"

/* Mark in the trace of PyTorch's observer on which stream work runs, which work of others it waits for, what NCCL
 * is asked for, where the host waits, and what memory it asks of the driver; NULLs: no longer. Source: aoti_record_function_start and _end, torch/csrc/inductor/aoti_torch/c/shim.h,
 * PyTorch 2.10 and 2.14. They need no lock of Python's, which the allocator's thread must not wait for. */
typedef int (*ghost_record_start)(const char *name, void *keywords, const void *inputs, uint64_t count,
                                  void **record);
typedef int (*ghost_record_end)(void *record);
API void ghost_mark_streams(ghost_record_start start, ghost_record_end end);
API void ghost_pause_marks(int pause); /* what the calling thread does is not the script's doing */

/* Leave a mark in PyTorch's trace, while it is marked; the calling thread's work is on a stream
 * from here on. */
#define MARK "memfit:gpu:" /* what all of them begin with; recording/step_streams.py reads them */
void mark(const char *format, ...) __attribute__((format(printf, 1, 2)));
void mark_stream(const void *stream);

/* Mark that NCCL launches a collective; return whether the thread has done so since this was last asked. */
void mark_launch(void);
bool follows_launch(void);
bool leaves_marks(void); /* whether what the calling thread does is marked */

#endif
