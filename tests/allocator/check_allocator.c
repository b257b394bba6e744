/* Serves random valid and invalid requests under random settings. Build it with sanitizers.
 *
 *     check SEED ROUNDS
 */
#include "allocator.h"

#include <stdio.h>
#include <stdlib.h>

enum { REQUESTS = 3000, BLOCKS = 400 };

static uint64_t state;

static int64_t below(int64_t limit)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (int64_t)(state % (uint64_t)limit);
}

static struct settings random_settings(void)
{
    struct settings settings = {
        .total = 1 + below(INT64_C(1) << (20 + below(41))),
        .allowed = below(3) ? NEVER : below(INT64_C(1) << 34),
        .collect_above = below(3) ? NEVER : below(INT64_C(1) << 33),
        .max_split_size = below(2) ? NEVER : (20 + below(100)) * MIB,
        .max_non_split_rounding = (20 + below(100)) * MIB,
        .large_segment_size = below(2) ? 20 * MIB : (12 + below(9)) * MIB, /* at most max_split_size */
        .expandable = below(2),
        .throw_on_oom = below(8) == 0,
        .numbered = below(2),
        .empties_each_step = below(2),
    };
    settings.taken = below(4) ? 0 : below(settings.total);
    for (int i = 0; i < INTERVALS; i++)
        settings.divisions[i] = below(2) ? 0 : INT64_C(1) << below(8);
    return settings;
}

static int serve_some(struct allocator *a, int64_t *served)
{
    int64_t columns[5][REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        columns[0][i] = below(50) ? below(2) : below(15) - 1; /* mostly mallocs and frees */
        columns[1][i] = below(500) ? below(BLOCKS) : below(1 << 20) - (1 << 19);
        columns[2][i] = below(500) ? 1 + below(INT64_C(1) << (8 + below(20))) : below(1 << 20) - (1 << 19);
        columns[3][i] = below(3);
        columns[4][i] = below(100) ? 0 : below(6) - 1;
    }
    int status = SERVED;
    for (int64_t begin = 0; begin < REQUESTS; begin++) { /* impossible requests are skipped */
        status = allocator_serve(a, REQUESTS - begin, columns[0] + begin, columns[1] + begin,
                                 columns[2] + begin, columns[3] + begin, columns[4] + begin);
        struct outcome outcome;
        allocator_outcome(a, &outcome);
        *served += outcome.position;
        begin += outcome.position;
        if (status == HOST_HAS_NO_MEMORY || status == BEYOND_64_BITS)
            break;
    }
    return status;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    int64_t served = 0;
    for (long round = 0; round < atol(argv[2]); round++) {
        state = 0x9e3779b97f4a7c15u * (uint64_t)(atol(argv[1]) + round + 1);
        struct settings settings = random_settings();
        struct allocator *a = allocator_new(&settings, BLOCKS, 4);
        int status = a == NULL ? HOST_HAS_NO_MEMORY : serve_some(a, &served);
        if (status == HOST_HAS_NO_MEMORY)
            return 1;
        if (status == BEYOND_64_BITS) { /* the last request is served in part */
            allocator_delete(a);
            continue;
        }
        int64_t count = allocator_block_count(a), figures[4 * (POOLS * FIGURES + OVERSIZE) + 6], reserved = 0;
        int64_t (*rows)[COLUMNS] = malloc((size_t)(count + 1) * sizeof *rows);
        if (rows == NULL)
            return 1;
        allocator_blocks(a, rows);
        for (int64_t i = 0; i < count; i++)
            reserved += rows[i][5] ? rows[i][1] : 0; /* bytes of mapped blocks */
        allocator_statistics(a, figures);
        free(rows);
        if (reserved != figures[RESERVED]) {
            fprintf(stderr, "round %ld: blocks have %lld bytes, but %lld are reserved\n", round,
                    (long long)reserved, (long long)figures[RESERVED]);
            return 1;
        }
        allocator_delete(a);
    }
    printf("%lld requests served\n", (long long)served);
    return 0;
}
