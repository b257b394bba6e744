/* Sizes: what a request is rounded to, and the segment it would need. block_and_segment_sizes.py gives the reasons. */
#include "allocator.h"

int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

static int bit_length(int64_t size)
{
    int length = 0;
    for (; size > 0; size >>= 1)
        length++;
    return length;
}

int64_t round_size(const struct settings *settings, int64_t size)
{
    if (size < MIN_BLOCK)
        return MIN_BLOCK;
    int length = bit_length(size), interval = length - bit_length(MIB);
    interval = interval < 0 ? 0 : interval < INTERVALS ? interval : INTERVALS - 1;
    int64_t divisions = settings->divisions[interval], step = MIN_BLOCK;
    if (divisions > 1) {
        int64_t division = (INT64_C(1) << (length - 1)) / divisions;
        step = division > step ? division : step;
    }
    return round_up(size, step);
}

int64_t segment_size(const struct settings *settings, int64_t size)
{
    int64_t rounded = round_size(settings, size);
    if (rounded <= SMALL_SIZE)
        return SMALL_SEGMENT;
    return rounded < MIN_LARGE_SIZE ? settings->large_segment_size : round_up(rounded, ROUND_LARGE);
}
