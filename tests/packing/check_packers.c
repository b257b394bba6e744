/* Runs both packers on small random problems with extreme sizes. Build it with sanitizers.
 *
 *     check FIRST_SEED COUNT
 */
#include <stdio.h>
#include <stdlib.h>

#include "pack.h"

enum { MOST = 40, MOST_SECTIONS = 19 }; /* one block of time, or four, or sixteen */

static uint64_t state;

static int64_t draw(int64_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)below);
}

static void check(int holds, const char *what, long seed)
{
    if (holds)
        return;
    fprintf(stderr, "seed %ld: %s\n", seed, what);
    exit(1);
}

/* Whether two lives have a section in common; on a circle the last section is followed by the first. */
static int share(int32_t a, int32_t a_end, int32_t b, int32_t b_end, int32_t sections)
{
    for (int32_t i = a; i < a_end; i++)
        for (int32_t j = b; j < b_end; j++)
            if (i % sections == j % sections)
                return 1;
    return 0;
}

/* Whether no two buffers overlap, and none ends above the capacity. */
static int is_packing(int32_t count, int32_t sections, const int32_t *first, const int32_t *last,
                      const int64_t *size, const int64_t *offset, int64_t capacity)
{
    for (int32_t a = 0; a < count; a++) {
        if (offset[a] < 0 || size[a] > capacity - offset[a])
            return 0;
        for (int32_t b = 0; b < a; b++)
            if (offset[a] < offset[b] + size[b] && offset[b] < offset[a] + size[a] &&
                share(first[a], last[a], first[b], last[b], sections))
                return 0;
    }
    return 1;
}

int main(int argc, char **argv)
{
    (void)argc;
    static const char *const preferences[] = {"LAT", "TAL", "TLA"};
    long found = 0, proved = 0, given_up = 0;
    for (long seed = atol(argv[1]), end = seed + atol(argv[2]); seed < end; seed++) {
        state = (uint64_t)seed;
        int32_t count = 1 + (int32_t)draw(MOST), order[MOST], first[MOST], last[MOST];
        int32_t sections = 1 + (int32_t)draw(MOST_SECTIONS);
        int64_t size[MOST], offset[MOST], live[MOST_SECTIONS] = {0}, most = 0, nodes;
        double area[MOST], length[MOST];
        int is_circle = (int)draw(2);
        int32_t longest = 1 + (int32_t)draw(sections);
        int64_t unit = draw(4) ? 1 : (int64_t)1 << 55; /* sizes whose sum just fits 64 bits */
        for (int32_t i = 0; i < count; i++) {
            order[i] = i;
            first[i] = (int32_t)draw(sections);
            int32_t room = is_circle ? sections : sections - first[i];
            last[i] = first[i] + 1 + (int32_t)draw(room < longest ? room : longest);
            size[i] = (1 + draw(6)) * unit;
            length[i] = last[i] - first[i];
            area[i] = (double)size[i] * length[i];
            for (int32_t j = first[i]; j < last[i]; j++)
                live[j % sections] += size[i];
        }
        for (int32_t s = 0; s < sections; s++)
            most = live[s] > most ? live[s] : most;
        atomic_int cancelled = 0;
        int64_t height = 0;
        for (int tightest = 0; tightest < 2; tightest++) {
            check(
                pack_place(count, sections, first, last, size, order, tightest, &cancelled, offset) == FOUND,
                "not placed", seed);
            height = 0;
            for (int32_t i = 0; i < count; i++)
                height = offset[i] + size[i] > height ? offset[i] + size[i] : height;
            check(is_packing(count, sections, first, last, size, offset, height), "greedy packing is invalid",
                  seed);
            check(height >= most, "placed below the bound", seed);
        }
        for (int64_t capacity = most - unit; capacity <= height; capacity += unit) {
            int status = pack_search(count, sections, first, last, size, area, length, capacity,
                                     preferences[seed % 3], 3 * count, &cancelled, offset, &nodes);
            found += status == FOUND;
            proved += status == INFEASIBLE;
            given_up += status == NODE_LIMIT;
            check(status == FOUND || status == INFEASIBLE || status == NODE_LIMIT, "unknown status", seed);
            check(status != FOUND || is_packing(count, sections, first, last, size, offset, capacity),
                  "found packing is invalid", seed);
            check(status != INFEASIBLE || capacity < height, "proved infeasible although a packing exists",
                  seed);
            check(status != FOUND || capacity >= most, "below the bound", seed);
            if (status == FOUND)
                break;
        }
        cancelled = 1;
        check(pack_place(count, sections, first, last, size, order, 0, &cancelled, offset) == CANCELLED,
              "not cancelled", seed);
        check(pack_search(count, sections, first, last, size, area, length, height, "LAT", 500, &cancelled,
                          offset, &nodes) == CANCELLED,
              "search not cancelled", seed);
    }
    printf("found %ld, proved %ld, gave up %ld\n", found, proved, given_up);
    return 0;
}
