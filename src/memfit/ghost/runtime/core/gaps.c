/* Calls that the ghost does not model: the gaps that were reached, and the generated stubs. */
#include "core/ghost.h"

#include <string.h>

#define MAX_GAPS 512

static const char *gaps[MAX_GAPS]; /* string literals, in the order they were first reached */
static size_t gap_count;

void ghost_assumed(const char *name)
{
    HOLD_LOCK;
    size_t i = 0;
    while (i < gap_count && strcmp(gaps[i], name) != 0)
        i++;
    if (i == gap_count && gap_count < MAX_GAPS)
        gaps[gap_count++] = name;
}

API long ghost_gap_called(const char *name, long refusal)
{
    ghost_assumed(name);
    return refusal;
}

long ghost_stub_called(void)
{
    COUNT(library_calls);
    forget_everything();
    return SUCCESS;
}

API size_t ghost_gaps_reached(char *out, size_t capacity)
{
    size_t needed = 1;
    if (capacity)
        out[0] = '\0';
    HOLD_LOCK;
    for (size_t i = 0; i < gap_count; i++) {
        size_t at = needed - 1, length = strlen(gaps[i]);
        needed += length + 1;
        if (needed <= capacity) {
            memcpy(out + at, gaps[i], length);
            memcpy(out + at + length, "\n", 2);
        }
    }
    return needed;
}
